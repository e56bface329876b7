"""Tiny Hugging Face model folders for tests: random weights from a seed and a one-character-per-token tokenizer."""

from pathlib import Path
from typing import Any

from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops

CHARACTERS = "0123456789+-*=() abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,?!:\n"
PAD_TOKEN_ID, EOS_TOKEN_ID, UNK_TOKEN_ID = 0, 1, 2

DEFAULT_CONFIG: dict[str, Any] = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    eos_token_id=EOS_TOKEN_ID,
    pad_token_id=PAD_TOKEN_ID,
    bos_token_id=None,
    tie_word_embeddings=False,
)
FAMILY_CONFIG: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "llama": {},
    "qwen3_moe": dict(
        head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
}

WEIGHT_SCALE = 4.0
"""Matrices are scaled up from the usual initialisation: with it, all tokens would be about equally likely."""
VECTOR_NOISE = 0.1
"""Standard deviation of the noise on biases and norm weights."""


def make_tokenizer(path: str | Path) -> None:
    """Write a tokenizer of single characters (``CHARACTERS``) after <pad>, <eos> and <unk>."""
    declare_torchvision_ops()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(path)


def make_tiny_model(
    path: str | Path, family: str = "qwen2", *, dtype: str = "float32", seed: int = 0, **config_overrides: Any
) -> Path:
    """Write config.json, safetensors and a tokenizer to ``path`` and return it.

    ``family`` is a key of ``FAMILY_CONFIG``; ``config_overrides`` are fields of its Hugging Face configuration, over
    ``DEFAULT_CONFIG``. The same arguments give the same weights; the caller's random state is left alone.
    """
    if family not in FAMILY_CONFIG:
        raise ValueError(f"family is one of {sorted(FAMILY_CONFIG)}, got {family!r}")
    declare_torchvision_ops()
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**DEFAULT_CONFIG, **FAMILY_CONFIG[family], **config_overrides})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(WEIGHT_SCALE)
            else:
                # Biases start at 0 and norms at 1: a conversion that loses or swaps them would go unnoticed.
                parameter.add_(torch.randn_like(parameter) * VECTOR_NOISE)
    model = model.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    path = Path(path)
    model.save_pretrained(path)
    make_tokenizer(path)
    return path
