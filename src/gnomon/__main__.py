"""`python -m gnomon VERB …`, which is also what torchrun starts: `torchrun --nproc-per-node 2 -m gnomon train RECIPE`."""

import sys

from gnomon.cli import main

if __name__ == "__main__":
    sys.exit(main())
