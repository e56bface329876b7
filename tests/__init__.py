"""Tests may import Megatron Core before anything of ours: this package is imported first."""

import megatron_rl  # noqa: F401  (prepares Megatron Core on a machine without a GPU)
