"""megatron_rl: reinforcement learning of language models with Megatron Core and SGLang."""

from megatron_rl.cpu import import_hook

__version__ = "0.2.0"

import_hook.install()
