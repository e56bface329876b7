"""Mixtral: experts in every layer, with the model's ``intermediate_size``."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.families.family import JOINED, Experts, Family, SGLangSupport
from megatron_rl.families.layer_rules import ATTENTION, NORMS, expert_mlp, moe_kwargs
from megatron_rl.families.sglang_limits import OTHERWISE, rope_of

_EXPERTS = expert_mlp("block_sparse_moe", "w1", "w3", "w2")


def _problems(model: Mapping[str, Any], where: str) -> Iterator[str]:
    rope, heads, hidden = rope_of(model), model.get("num_attention_heads", 1), model.get("hidden_size", 0)
    if rope["rope_type"] != "default":
        yield f"{where}: rope_type={rope['rope_type']}: SGLang's mixtral does not scale rotary positions; {OTHERWISE}"
    if model.get("head_dim") and model["head_dim"] * heads != hidden:
        yield (
            f"{where}: head_dim={model['head_dim']}: SGLang's mixtral uses hidden_size / num_attention_heads = "
            f"{hidden / heads:g}; {OTHERWISE}"
        )
    theta = rope.get("rope_theta", 0)
    if theta != int(theta):
        yield f"{where}: rope_theta={theta}: SGLang's mixtral drops the fraction; {OTHERWISE}"


FAMILY = Family(
    layer=lambda config, index: (*NORMS, *ATTENTION, *_EXPERTS),
    transformer_kwargs=lambda config: dict(moe_kwargs(config), moe_router_pre_softmax=False),
    forbidden={"sliding_window": None},
    experts=Experts(
        in_layer=lambda config, index: True, number=("num_local_experts", "num_experts"), ffn_size="intermediate_size"
    ),
    served=SGLangSupport(
        joined=JOINED,
        expert_parts={"w1": ("w13_weight", 0, 2), "w3": ("w13_weight", 1, 2), "w2": ("w2_weight", 0, 1)},
        is_never_tied=True,
        scales_rope=False,
        problems=_problems,
    ),
)
