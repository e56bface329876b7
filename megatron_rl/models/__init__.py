"""Megatron Core models: the policy, the critic, their log-probs and values, and their Hugging Face weights."""

import megatron_rl.parallel  # noqa: F401  (prepares Megatron Core for a CPU before any module here imports it)
