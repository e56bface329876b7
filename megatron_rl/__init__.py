"""megatron_rl: reinforcement learning of language models with Megatron Core and SGLang."""

__version__ = "0.1.0"
