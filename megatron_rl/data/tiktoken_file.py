"""Reads a vocabulary in tiktoken's format (``tiktoken.model``), as Kimi-K2 has it, without running the folder's own code.

Invariant: texts become the tokens that tiktoken makes of them with Kimi's split pattern. Special tokens take the 256 ids after
the ranks; tokenizer_config.json names some of them, the others are reserved.
"""

import json
from base64 import b64decode
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.errors import DataError

if TYPE_CHECKING:  # slow to import
    from transformers import PreTrainedTokenizerFast

FILE = "tiktoken.model"
NUM_SPECIAL = 256
_LETTERS = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_LETTERS}]*[\p{{Ll}}{_LETTERS}]+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_LETTERS}]+[\p{{Ll}}{_LETTERS}]*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Pieces that are encoded one by one: words by script and case, up to three digits, punctuation, blanks."""


def read_tiktoken(folder: Path) -> "PreTrainedTokenizerFast":
    """Return the tokenizer of a folder with ``tiktoken.model``. Raises DataError if the file is no vocabulary."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    ranks, spelled = _ranks(folder / FILE), bytes_to_unicode()

    def text_of(token: bytes) -> str:
        return "".join(spelled[byte] for byte in token)

    merges = [(text_of(left), text_of(right)) for left, right in _merges(ranks)]
    tokenizer = Tokenizer(models.BPE({text_of(token): rank for token, rank in ranks.items()}, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    named = {int(id): token["content"] for id, token in settings.get("added_tokens_decoder", {}).items()}
    # tiktoken treats all 256 as special, whatever the file says of them.
    specials = [named.get(id, f"<|reserved_token_{id}|>") for id in range(len(ranks), len(ranks) + NUM_SPECIAL)]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    kept = {name: settings[name] for name in ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template") if settings.get(name)}
    template = folder / "chat_template.jinja"
    if template.is_file():
        kept["chat_template"] = template.read_text(encoding="utf-8")
    texts = {name: value["content"] if isinstance(value, dict) else value for name, value in kept.items()}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **texts)


def _ranks(file: Path) -> dict[bytes, int]:
    """Map each token to its rank, which is its id."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise DataError(f"{file}:{number}: expected a token in base64 and its rank, got {line[:60]!r}") from error
    has_all_bytes = all(bytes([byte]) in ranks for byte in range(256))
    if sorted(ranks.values()) != list(range(len(ranks))) or not has_all_bytes:
        expected = f"the ranks 0 to {len(ranks) - 1} once each, and a token for every byte"
        raise DataError(f"{file}: expected {expected}; the file may be truncated")
    return ranks


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """All pairs of tokens that form a token, in the order in which tiktoken merges them: by the rank of the result."""
    merges = []
    for token, rank in ranks.items():
        parts = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        merges += [(rank, ranks[left], ranks[right], left, right) for left, right in parts]
    return [(left, right) for *_, left, right in sorted(merges)]
