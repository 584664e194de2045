"""How long do `import gnomon` and `gnomon --help` take, beside a bare interpreter and beside `import torch`?"""

import subprocess
import sys
from pathlib import Path

from machine import described, repeat, save

ENTRY = Path(sys.executable).with_name("gnomon")
COMMANDS = {
    "bare interpreter": [sys.executable, "-c", "pass"],
    "import gnomon": [sys.executable, "-c", "import gnomon"],
    "gnomon --help": [str(ENTRY), "--help"] if ENTRY.exists() else [sys.executable, "-m", "gnomon", "--help"],
    "import torch": [sys.executable, "-c", "import torch"],
}


def main() -> None:
    """Measure each command in turn, in the same run."""
    seconds = {}
    for name, command in COMMANDS.items():
        seconds[name] = repeat(lambda command=command: subprocess.run(command, check=True, stdout=subprocess.DEVNULL), runs=9)
        median, low, high = (seconds[name][key] * 1000 for key in ("median", "min", "max"))
        print(f"{name:18} {median:7.0f} ms   ({low:.0f} to {high:.0f})")
    save("startup", {"seconds": seconds})


if __name__ == "__main__":
    described(__doc__)
    main()
