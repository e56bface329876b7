"""What the judge examples share: an untrained model whose tokens are words and characters, and digits to be sorted.

Invariants: the same arguments write the same bytes; a row of digits belongs to training or is held out, which follows
from the digits alone, so that no order of held-out digits occurs in training.
"""

import json
import random
import re
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.rewards.templates import JUDGE_TEMPLATE, PAIRWISE_TEMPLATE

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
TOKEN_PATTERN = r"[A-Za-z]+|[\s\S]"
"""A token is a word or a single character."""
LENGTHS = (3, 6)
"""Digits in a prompt, from and to."""
HELD_OUT_SHARE = 5
"""One in so many digit rows is held out."""


def vocabulary(words: Sequence[str]) -> list[str]:
    """Special tokens, ``words``, the words of the judges' templates, all printable characters."""
    fixed_text = re.sub(r"\{\w+\}", "", PAIRWISE_TEMPLATE + JUDGE_TEMPLATE)
    return [*SPECIAL_TOKENS, *sorted({*re.findall(r"[A-Za-z]+", fixed_text), *words, *string.printable})]


def model_config() -> dict[str, Any]:
    """A Qwen3 with 0.1 M parameters, for random weights; the vocabulary leaves room for tensor parallelism."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 192,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.08,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": SPECIAL_TOKENS.index("<eos>"),
        "pad_token_id": SPECIAL_TOKENS.index("<pad>"),
        "torch_dtype": "float32",
    }


def write_model_folder(folder: Path, words: Sequence[str]) -> None:
    """config.json and the tokenizer's files; each of ``words`` is one token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model_config(), indent=2) + "\n")
    pad, eos, unknown = SPECIAL_TOKENS
    ids = {token: index for index, token in enumerate(vocabulary(words))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(TOKEN_PATTERN), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"pad_token": pad, "eos_token": eos, "unk_token": unknown, "clean_up_tokenization_spaces": False}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def digit_rows(count: int, *, held_out: bool, seed: int) -> Iterator[list[int]]:
    """Unsorted rows of different digits; which side a row is on follows from its digits alone."""
    generator = random.Random(f"{seed} digits {held_out}")
    while count:
        digits = generator.sample(range(1, 10), generator.randint(*LENGTHS))
        is_held_out = sum(digit * 7**place for place, digit in enumerate(sorted(digits))) % HELD_OUT_SHARE == 0
        if digits != sorted(digits) and is_held_out == held_out:
            count -= 1
            yield digits


def near_miss(digits: Sequence[int], generator: random.Random) -> list[int]:
    """``digits`` sorted, but for two neighbours that have changed places."""
    row = sorted(digits)
    place = generator.randrange(len(row) - 1)
    row[place], row[place + 1] = row[place + 1], row[place]
    return row


def joined(digits: Sequence[int]) -> str:
    return "".join(map(str, digits))
