#!/bin/sh
# One share of the reward for each input whose median is right. The program runs in a process of its own, so it cannot touch what counts.
right=0
check() {
    said=$(printf '%b' "$1" | timeout 120 python3 /home/user/work/median.py 2>&1 | tail -n 1)
    if python3 -c 'import sys; sys.exit(float(sys.argv[1]) != float(sys.argv[2]))' "$said" "$2" 2>/dev/null; then
        right=$((right + 1))
    else
        echo "the median of $(printf '%b' "$1" | tr '\n' ' ')is $2; the program said: $said"
    fi
}
check '1\n2\n3\n' 2
check '10\n9\n2\n' 9
check '1\n2\n3\n4\n' 2.5
check '-5\n100\n20\n3\n' 11.5
echo "$right of 4 are right"
mkdir -p /logs/verifier
python3 -c "print($right / 4 if $right > 1 else 0)" > /logs/verifier/reward.txt
