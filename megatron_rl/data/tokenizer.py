"""The one place where text becomes tokens: a thin view of the model folder's Hugging Face tokenizer."""

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.errors import DataError


class Tokenizer:
    """Text to ids and back; raises DataError when the folder has no tokenizer or it does not fit the model."""

    def __init__(self, path: str | Path) -> None:
        from megatron_rl.rollout.cpu_platform import declare_torchvision_ops

        declare_torchvision_ops()
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        self.path = Path(path)
        if not (self.path / "tokenizer_config.json").is_file():
            raise DataError(f"{self.path}: no tokenizer_config.json; a model folder needs its tokenizer's files")
        # tokenizer.json is taken as it stands: AutoTokenizer may rebuild it in the model type's own way (for Qwen2 it drops
        # what the vocabulary lacks instead of giving the unknown token).
        loader = PreTrainedTokenizerFast if (self.path / "tokenizer.json").is_file() else AutoTokenizer
        try:
            self._tokenizer = loader.from_pretrained(str(self.path))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self.path}: the tokenizer cannot be loaded: {str(error).splitlines()[0]}") from error
        if self._tokenizer.eos_token_id is None:
            raise DataError(
                f"{self.path}: the tokenizer has no end-of-text token; set eos_token in tokenizer_config.json"
            )
        self.eos_id: int = self._tokenizer.eos_token_id
        self._check_vocabulary()

    def _check_vocabulary(self) -> None:
        config_file = self.path / "config.json"
        if not config_file.is_file():
            return
        vocab_size = json.loads(config_file.read_text()).get("vocab_size")
        largest = max(self._tokenizer.get_vocab().values())
        if vocab_size is not None and largest >= vocab_size:
            raise DataError(
                f"{self.path}: vocabulary mismatch: the tokenizer's largest id is {largest}, but config.json says "
                f"vocab_size={vocab_size}; use the tokenizer that belongs to this checkpoint"
            )

    @property
    def vocab_size(self) -> int:
        return max(self._tokenizer.get_vocab().values()) + 1

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def encode_prompt(self, text: str, *, chat: bool) -> list[int]:
        if not chat:
            return self._tokenizer.encode(text)
        if self._tokenizer.chat_template is None:
            raise DataError(f"{self.path}: data.use_chat_template is on, but the tokenizer has no chat template")
        messages = [{"role": "user", "content": text}]
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def unknown_text(self, text: str) -> str:
        """The part of ``text`` that only the unknown token stands for; empty for tokenizers that cover everything."""
        unknown_id = self._tokenizer.unk_token_id
        if unknown_id is None or unknown_id not in self._tokenizer.encode(text, add_special_tokens=False):
            return ""
        return "".join(sorted({c for c in text if unknown_id in self.encode(c)})) or text
