"""The untrained policy: a Qwen3-VL-MoE with half a million parameters, its tokenizer, chat template and image processor.

A picture of 84 x 84 pixels is 6 x 6 patches of 14 pixels and, 2 x 2 merged, 9 tokens, as in Seed1.5-VL (arXiv 2505.07062).
"""

import string
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny_model import END, PAD, SPECIAL_TOKENS, write_json, write_tokenizer

PATCH, MERGE, FRAMES = 14, 2, 2
"""Pixels of a patch, patches of a token (each in both directions), and frames that a patch is repeated for."""
MAX_IMAGE_TOKENS = 64
MAX_TOKENS = 256
HIDDEN = 64
IMAGE, VIDEO, VISION_START, VISION_END = VISION_TOKENS = (
    "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>",
)  # fmt: skip
TAGS = ("<think>", "</think>", "<bbox>", "</bbox>")
TOKEN_PATTERN = r"</?[a-z]+>|[A-Za-z]+|[\s\S]"
"""A token is a tag, a word or a single character."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_vision_model(folder: Path, words: Sequence[str]) -> None:
    """config.json and the files of tokenizer and processor; each of ``words`` is one token."""
    special = (*SPECIAL_TOKENS, *VISION_TOKENS)
    vocabulary = [*special, *TAGS, *dict.fromkeys(words), *string.printable]
    write_json(folder / "config.json", model_config(vocabulary))
    write_json(folder / "processor_config.json", _processor_config())
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    write_tokenizer(
        folder,
        vocabulary,
        TOKEN_PATTERN,
        max_tokens=MAX_TOKENS,
        special_tokens=special,
        tokenizer_class="TokenizersBackend",
        backend="tokenizers",
        processor_class="Qwen3VLProcessor",
        image_token=IMAGE,
        video_token=VIDEO,
        vision_bos_token=VISION_START,
        vision_eos_token=VISION_END,
    )


def model_config(vocabulary: Sequence[str]) -> dict[str, Any]:
    """config.json. SGLang's Qwen3-VL-MoE takes features of exactly three encoder layers, so the model has three."""
    ids = {token: index for index, token in enumerate(vocabulary)}
    text = {
        "model_type": "qwen3_vl_moe_text",
        "vocab_size": -(-len(vocabulary) // 8) * 8,
        "hidden_size": HIDDEN,
        "intermediate_size": 192,
        "moe_intermediate_size": 96,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_TOKENS,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.08,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": ids[END],
        "pad_token_id": ids[PAD],
        "tie_word_embeddings": False,
    }
    vision = {
        "model_type": "qwen3_vl_moe_vision",
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "patch_size": PATCH,
        "temporal_patch_size": FRAMES,
        "spatial_merge_size": MERGE,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 1, 2],
        "initializer_range": 0.08,
    }
    return {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "model_type": "qwen3_vl_moe",
        "text_config": text,
        "vision_config": vision,
        "image_token_id": ids[IMAGE],
        "video_token_id": ids[VIDEO],
        "vision_start_token_id": ids[VISION_START],
        "vision_end_token_id": ids[VISION_END],
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def _processor_config() -> dict[str, Any]:
    token_pixels = (PATCH * MERGE) ** 2
    common = {
        "patch_size": PATCH,
        "temporal_patch_size": FRAMES,
        "merge_size": MERGE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "size": {"shortest_edge": token_pixels, "longest_edge": MAX_IMAGE_TOKENS * token_pixels},
    }
    return {
        "processor_class": "Qwen3VLProcessor",
        "image_processor": {"image_processor_type": "Qwen2VLImageProcessor", **common},
        "video_processor": {"video_processor_type": "Qwen3VLVideoProcessor", **common},
    }
