#!/bin/sh
cat > /home/user/work/median.py <<'END'
import statistics
import sys

print(statistics.median(float(line) for line in sys.stdin))
END
