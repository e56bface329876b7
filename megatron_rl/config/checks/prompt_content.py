"""What prompts are made of."""

from collections.abc import Iterator

from megatron_rl.config.schema import DataConfig

TAKEN_ARGUMENTS = (
    "add_generation_prompt", "continue_final_message", "conversation", "max_length", "messages", "padding",
    "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "tools", "truncation",
)  # fmt: skip
"""Arguments of ``apply_chat_template`` that neither rows nor recipes give: prompts are made in one way."""


def problems(data: DataConfig) -> Iterator[str]:
    taken = sorted(set(data.chat_template_kwargs) & set(TAKEN_ARGUMENTS))
    if taken:
        yield f"data.chat_template_kwargs: {reserved_argument_problem(taken[0])}"
    levels, budget = data.video_frame_tokens, data.max_video_tokens
    if not levels or min(levels) < 1:
        yield f"data.video_frame_tokens: expected at least one number of tokens above 0, got {list(levels)}"
    elif budget < min(levels):
        yield f"data.max_video_tokens: expected room for one frame of {min(levels)} tokens, got {budget}"
    if data.system_prompt and not data.use_chat_template:
        yield "data.system_prompt: plain prompts have no system message; set data.use_chat_template=true, or leave it empty"


def reserved_argument_problem(name: str) -> str:
    """What is wrong with a chat-template argument of ``TAKEN_ARGUMENTS``."""
    hint = "; tools have a column of their own (data.tools_field)" if name == "tools" else ""
    return f"{name!r} is set by megatron_rl itself, take it out{hint}"
