"""Qwen2.5-VL: the language model of Qwen2, and an encoder whose layers attend within windows of an image."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.families.family import Family, SGLangSupport, VisionSpec
from megatron_rl.families.layer_rules import ATTENTION, DENSE_MLP, NORMS, QKV_BIAS
from megatron_rl.families.sglang_limits import OTHERWISE
from megatron_rl.families.vision_encoder import VISION_KWARGS

_PATCH_VALUES = 1176
"""3 channels x 2 frames x 14 x 14 pixels: the only patch size that SGLang does not mistake for precomputed features."""


def _problems(model: Mapping[str, Any], where: str) -> Iterator[str]:
    vision = model.get("vision_config", {})
    channels = vision.get("in_channels") or vision.get("in_chans") or 3
    values = channels * vision.get("temporal_patch_size", 2) * vision.get("patch_size", 14) ** 2
    if values != _PATCH_VALUES:
        yield (
            f"{where}: vision_config.patch_size={vision.get('patch_size', 14)}: a patch has {values} values, but SGLang's "
            f"qwen2_5_vl mistakes any size but {_PATCH_VALUES} for precomputed features and crashes; {OTHERWISE}"
        )


FAMILY = Family(
    layer=lambda config, index: (*NORMS, *ATTENTION, *QKV_BIAS, *DENSE_MLP),
    transformer_kwargs=lambda config: dict(VISION_KWARGS, add_qkv_bias=True),
    forbidden={"use_sliding_window": False},
    vision=VisionSpec(encoder_prefix="visual.", text_prefix="model.", title="Qwen2.5-VL", interleaves_positions=False),
    served=SGLangSupport(problems=_problems),
)
