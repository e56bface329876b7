"""`python -m megatron_rl`: the command line, where its script is not on PATH."""

import sys

from megatron_rl.cli import run

if __name__ == "__main__":
    sys.exit(run())
