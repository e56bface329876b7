"""Files of a tiny vision-language model's folder next to its weights: tokenizer, chat template and image processor."""

import json
from pathlib import Path

from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops
from tests.tiny_models import CHARACTERS

SPECIAL = {
    "<|image_pad|>": "image_token_id",
    "<|video_pad|>": "video_token_id",
    "<|vision_start|>": "vision_start_token_id",
    "<|vision_end|>": "vision_end_token_id",
}
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
MIN_TOKENS, MAX_TOKENS = 1, 64
"""Tokens of an image."""


def write_vision_files(folder: str | Path, *, max_tokens: int = MAX_TOKENS) -> None:
    """Tokenizer of single characters and processor files for the ``config.json`` in ``folder``."""
    declare_torchvision_ops()
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    config = json.loads((Path(folder) / "config.json").read_text())
    vision = config["vision_config"]
    places = {config[field]: text for text, field in SPECIAL.items()}
    characters = iter(["<pad>", "<eos>", "<unk>", *CHARACTERS, "[", "]"])
    tokens = [places[i] if i in places else next(characters, f"<unused{i}>") for i in range(max(places) + 1)]
    if rest := list(characters):
        raise ValueError(f"no ids below {max(places)} are left for {rest}")
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens={
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>",
        },
    )
    sizes = {name: vision[name] for name in ("patch_size", "temporal_patch_size")} | {
        "merge_size": vision["spatial_merge_size"]
    }
    token_pixels = (sizes["patch_size"] * sizes["merge_size"]) ** 2
    image = Qwen2VLImageProcessor(**sizes, min_pixels=MIN_TOKENS * token_pixels, max_pixels=max_tokens * token_pixels)
    video_class, processor_class = (
        (Qwen2VLVideoProcessor, transformers.Qwen2_5_VLProcessor)
        if config["model_type"] == "qwen2_5_vl"
        else (Qwen3VLVideoProcessor, transformers.Qwen3VLProcessor)
    )
    processor_class(
        image_processor=image, tokenizer=fast, video_processor=video_class(**sizes), chat_template=CHAT_TEMPLATE
    ).save_pretrained(folder)
