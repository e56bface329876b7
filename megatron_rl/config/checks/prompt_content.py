"""What prompts are made of."""

from collections.abc import Iterator

from megatron_rl.config.schema import DataConfig


def problems(data: DataConfig) -> Iterator[str]:
    levels, budget = data.video_frame_tokens, data.max_video_tokens
    if not levels or min(levels) < 1:
        yield f"data.video_frame_tokens: expected at least one number of tokens above 0, got {list(levels)}"
    elif budget < min(levels):
        yield f"data.max_video_tokens: expected room for one frame of {min(levels)} tokens, got {budget}"
    if data.system_prompt and not data.use_chat_template:
        yield "data.system_prompt: plain prompts have no system message; set data.use_chat_template=true, or leave it empty"
