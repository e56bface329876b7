"""`python -m megatron_rl`: the command line, where its script is not on PATH."""

import sys

from megatron_rl.cli import run

sys.exit(run())
