"""The chat template of a model: whole prompts, and the tail that follows an answer."""

from megatron_rl.agents.chat import ChatRequest
from megatron_rl.data.tokenizer import Tokenizer


class ChatTemplate:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def prompt_ids(self, request: ChatRequest) -> list[int]:
        """The whole request as tokens, up to the start of the answer; its length is what ``count_tokens`` says."""
        raise NotImplementedError
