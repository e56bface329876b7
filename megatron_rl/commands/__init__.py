"""The commands of ``megatron-rl``: one file each."""
