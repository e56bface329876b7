"""Kimi-K2: DeepSeek-V3's layers with more experts and fewer heads (arXiv 2507.20534)."""

from dataclasses import replace

from megatron_rl.families import deepseek_v3

# transformers has no class for the type, whose files name remote code that this project never runs.
FAMILY = replace(deepseek_v3.FAMILY, read_as="deepseek_v3")
