"""A model folder whose tokens are words, digits and single characters: prose and small programs in few tokens."""

import json
import re
import string
from pathlib import Path
from typing import Any

from megatron_rl.rewards.judges.templates import JUDGE_TEMPLATE, PAIRWISE_TEMPLATE
from tests.tiny_models import make_tiny_model

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
PATTERN = r"[A-Za-z]+|[\s\S]"


def words(extra: str = "") -> list[str]:
    """Every word of the judges' templates and of ``extra``, and all printable characters."""
    found = re.findall(r"[A-Za-z]+", re.sub(r"\{\w+\}", "", PAIRWISE_TEMPLATE + JUDGE_TEMPLATE) + " " + extra)
    return sorted({*found, *string.printable})


def write_tokenizer(folder: str | Path, extra: str = "") -> int:
    """Write the tokenizer's files; returns the size of the vocabulary."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = [PAD, EOS, UNK, *words(extra)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, EOS, UNK])
    tokenizer.save(str(Path(folder) / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNK,
        "clean_up_tokenization_spaces": False,
    }
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(vocabulary)


def make_word_model(folder: str | Path, family: str = "qwen2", *, extra: str = "", **config_overrides: Any) -> Path:
    """A tiny model with this tokenizer; ``extra``: further words, the rest as for ``tiny_models.make_tiny_model``."""
    path = make_tiny_model(folder, family, vocab_size=256, **config_overrides)
    assert write_tokenizer(path, extra) <= 256
    return path
