"""The untrained model of the examples: a Qwen3 with 0.1 M parameters and a tokenizer of whole words or characters."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAD, END, UNKNOWN = SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")


def model_config(vocab_size: int, *, max_tokens: int = 256, hidden_size: int = 64) -> dict[str, Any]:
    """config.json, for random weights; the ids of the special tokens are their places in ``SPECIAL_TOKENS``.

    ``initializer_range`` fits the width; with the usual 0.02 so small a model learns far more slowly. Heads have 16
    dimensions: with a width of 64 they divide by 2 and 4, for tensor parallelism.
    """
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": hidden_size // 16,
        "num_key_value_heads": hidden_size // 16,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": max_tokens,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "initializer_range": round(0.64 / hidden_size**0.5, 3),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": SPECIAL_TOKENS.index(END),
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
        "torch_dtype": "float32",
    }


def write_tiny_model(
    folder: Path, vocabulary: Sequence[str], pattern: str, *, vocab_size: int, max_tokens: int = 256, hidden_size: int = 64
) -> None:
    """config.json and the tokenizer's files; see ``model_config`` and ``write_tokenizer``."""
    write_json(folder / "config.json", model_config(vocab_size, max_tokens=max_tokens, hidden_size=hidden_size))
    write_tokenizer(folder, vocabulary, pattern, max_tokens=max_tokens)


def write_tokenizer(
    folder: Path,
    vocabulary: Sequence[str],
    pattern: str,
    *,
    max_tokens: int,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    **settings: Any,
) -> None:
    """tokenizer.json and tokenizer_config.json, the latter with further ``settings``.

    ``vocabulary`` begins with ``special_tokens``, and those with ``SPECIAL_TOKENS``; ``pattern`` is a regular expression
    of one token, empty for single characters. transformers' AutoTokenizer takes tokenizer.json as it stands for a Qwen3;
    for a Qwen2 it would rebuild it.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    ids = {token: index for index, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern) if pattern else "", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(special_tokens))
    tokenizer.save(str(folder / "tokenizer.json"))
    common = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": END,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_tokens,
    }
    write_json(folder / "tokenizer_config.json", common | settings)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
