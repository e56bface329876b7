"""Megatron Core models: the policy, the critic, their log-probs and values, and their Hugging Face weights."""
