"""Process groups and their collectives. Importing this package makes Megatron Core importable on a CPU."""

from megatron_rl.cpu import megatron as cpu

cpu.install()
