"""Qwen3-VL, dense: the language model of Qwen3, whose first layers also receive features from the encoder (DeepStack)."""

from megatron_rl.families.family import Family, VisionSpec
from megatron_rl.families.layer_rules import ATTENTION, DENSE_MLP, NORMS, QK_NORM
from megatron_rl.families.vision_encoder import VISION_KWARGS

VISION = VisionSpec(
    encoder_prefix="model.visual.", text_prefix="model.language_model.", title="Qwen3-VL", interleaves_positions=True
)
FAMILY = Family(
    layer=lambda config, index: (*NORMS, *ATTENTION, *QK_NORM, *DENSE_MLP),
    transformer_kwargs=lambda config: dict(VISION_KWARGS, qk_layernorm=True),
    forbidden={"attention_bias": False},
    vision=VISION,
)
