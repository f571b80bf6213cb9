"""`python -m mamba3 ...` is `mamba3 ...`."""

import sys

from mamba3.cli import program

if __name__ == "__main__":
    sys.exit(program())
