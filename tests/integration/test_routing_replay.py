"""Laws of routing replay, balance and load metrics on real Megatron Core (R3: arXiv 2510.11370), over layouts.

Two launches of routing_worker.py (1 and 2 ranks), each running all of its layouts; the tests compare their results.
"""

from functools import cache

import pytest
import torch

from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops
from tests.integration.routing_worker import BIAS_RATE, BIASED, LENGTHS, PROMPT_TOKENS, SCENARIOS
from tests.integration.torchrun import run_ranks
from tests.tiny_families import COMMON, LATENT

LAUNCH_TIMEOUT_S = 400
RELATIVE = 1e-5
NUM_LAYERS, NUM_EXPERTS, TOP_K = 2, 8, 2
ALL = [(world_size, scenario.name) for world_size, scenarios in SCENARIOS.items() for scenario in scenarios]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """World size -> results of its launch, which happens when first asked for."""
    declare_torchvision_ops()
    from transformers import AutoConfig

    folder = tmp_path_factory.mktemp("routing")
    AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        # Scores far enough apart that a choice is a choice, and experts that differ.
        initializer_range=0.3,
    ).save_pretrained(folder / "models" / "qwen3_moe")
    sizes = dict(
        first_k_dense_replace=1, n_routed_experts=NUM_EXPERTS, n_group=1, topk_group=1, num_experts_per_tok=TOP_K
    )
    deepseek = {**COMMON, **LATENT, **sizes, "vocab_size": 128, "initializer_range": 0.3}
    AutoConfig.for_model("deepseek_v3", **deepseek).save_pretrained(folder / "models" / "deepseek_v3")

    @cache
    def of(world_size: int) -> dict:
        out = folder / f"ranks{world_size}"
        out.mkdir()
        run_ranks(
            world_size,
            "tests.integration.routing_worker",
            folder / "models",
            out,
            log=out / "log.txt",
            timeout_s=LAUNCH_TIMEOUT_S,
        )
        return torch.load(out / "results.pt", weights_only=False)

    return of


def mean_distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return (found - expected).abs().mean().item()


def sets(routes: torch.Tensor) -> torch.Tensor:
    return routes.sort(-1).values


@pytest.mark.parametrize("world_size,scenario", ALL)
def test_the_configured_dispatcher_moves_the_tokens(results, world_size, scenario):
    gathers = scenario.endswith("allgather")
    expected = {"PackedAllGatherDispatcher" if gathers else "MoEAlltoAllTokenDispatcher"}
    assert results(world_size)[scenario]["dispatchers"] == expected


@pytest.mark.parametrize("world_size,scenario", ALL)
def test_replay_of_a_passs_own_record_changes_no_bit(results, world_size, scenario):
    found = results(world_size)[scenario]
    assert torch.equal(found["replayed"], found["logprobs"])
    assert torch.equal(found["followed"], found["routes"])
    assert torch.equal(found["reordered"], found["logprobs"])
    assert torch.equal(found["half"], found["logprobs"])
    native, replayed = found["native steps"][0], found["replayed steps"][0]
    assert replayed["grad_norm"] == native["grad_norm"]
    share = (sum(LENGTHS) * NUM_LAYERS, sum(LENGTHS) * NUM_LAYERS)
    assert {**native["metrics"], "moe_replayed_share": share} == replayed["metrics"]
    for name, value in found["native weights"].items():
        assert torch.equal(found["replayed weights"][name], value), name


@pytest.mark.parametrize("world_size,scenario", ALL)
def test_a_record_has_distinct_experts_for_every_token_and_layer(results, world_size, scenario):
    routes = results(world_size)[scenario]["routes"]
    assert routes.shape == (sum(LENGTHS), NUM_LAYERS, TOP_K)
    assert routes.min() >= 1 and routes.max() <= NUM_EXPERTS
    assert (sets(routes).diff(dim=-1) > 0).all()


@pytest.mark.parametrize("world_size,scenario", ALL)
def test_shuffled_records_make_the_ratio_explode(results, world_size, scenario):
    found = results(world_size)[scenario]
    assert mean_distance(found["replayed"], found["logprobs"]) == 0.0
    response = torch.cat([torch.arange(length) >= PROMPT_TOKENS for length in LENGTHS])
    assert mean_distance(found["shuffled"][response], found["logprobs"][response]) > 0.3


@pytest.mark.parametrize("world_size,scenario", ALL)
def test_the_router_learns_under_replay(results, world_size, scenario):
    found = results(world_size)[scenario]
    for layer in range(NUM_LAYERS):
        name = f"model.layers.{layer}.mlp.gate.weight"
        assert (found["replayed weights"][name] - found["weights before"][name]).abs().max() > 1e-4


@pytest.mark.parametrize("world_size,scenario", ALL)
def test_replay_keeps_the_routes_while_the_weights_change(results, world_size, scenario):
    found = results(world_size)[scenario]
    assert torch.equal(sets(found["later followed"]), sets(found["routes"]))
    assert not torch.equal(sets(found["later routes"]), sets(found["routes"]))


@pytest.mark.parametrize("world_size,scenario", [case for case in ALL if case[1] != "reference"])
def test_routes_and_load_balancing_do_not_depend_on_layout_split_or_recompute(results, world_size, scenario):
    found, expected = results(world_size)[scenario], results(1)["reference"]
    assert torch.equal(sets(found["routes"]), sets(expected["routes"]))
    torch.testing.assert_close(found["logprobs"], expected["logprobs"], rtol=1e-5, atol=5e-6)
    for step, step_expected in zip(found["replayed steps"], expected["replayed steps"], strict=True):
        assert step["grad_norm"] == pytest.approx(step_expected["grad_norm"], rel=RELATIVE)
        assert step["metrics"].keys() >= {"moe_max_load", "moe_dead_share", "moe_load_entropy", "moe_balance_loss"}
        for name, pair in step_expected["metrics"].items():
            if name in step["metrics"]:
                assert step["metrics"][name] == pytest.approx(pair, rel=RELATIVE, abs=RELATIVE), name
    for name, value in expected["later weights"].items():
        difference = (found["later weights"][name] - value).abs().max().item()
        assert difference <= 2 * RELATIVE * value.abs().max().item(), f"{name}: differs by {difference}"


@pytest.mark.parametrize("world_size,scenario", [case for case in ALL if case[1] in BIASED])
def test_the_expert_bias_moves_once_per_update_by_the_loads_of_real_tokens(results, world_size, scenario):
    found = results(world_size)[f"{scenario}/bias"]
    assert list(found["before"]) == ["model.layers.1.mlp.gate.e_score_correction_bias"]
    (before,) = found["before"].values()
    for unchanged in ("after answers", "frozen"):
        assert torch.equal(*found[unchanged].values(), before)
    expected = results(1)["split-recompute/bias"]
    torch.testing.assert_close(found["logprobs"], expected["logprobs"], rtol=1e-5, atol=5e-6)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=RELATIVE)
    loads = torch.bincount(found["routes"][:, 1].flatten().long(), minlength=NUM_EXPERTS + 1)[1:].double()
    assert loads.sum() == sum(LENGTHS) * TOP_K
    expected = before + BIAS_RATE * torch.sign(loads.mean() - loads).float()
    assert (expected != before).any()
    torch.testing.assert_close(*found["moved"].values(), expected)
