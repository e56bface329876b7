"""Process groups and their collectives. Importing this package makes Megatron Core importable on a CPU (``cpu.py``)."""

from megatron_rl.parallel import cpu

cpu.install()
