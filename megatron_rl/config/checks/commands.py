"""Which commands need what."""

RL_COMMANDS = ("train", "critic-pretrain")
"""They sample responses and score them."""
SERVED_COMMANDS = (*RL_COMMANDS, "select-prompts", "label-lines")
"""They sample from SGLang servers."""
