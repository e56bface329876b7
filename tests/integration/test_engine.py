"""Laws of the engine on real Megatron Core: parallelism invariance, resume, skipped steps, learning-rate schedule.

Three launches of engine_worker.py (1, 2 and 4 ranks), each running all of its layouts; the tests compare their results.
"""

import math
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.config.schema import DecayStyle, OptimizerConfig
from megatron_rl.training.optimizer import build_scheduler
from tests.integration.collective_order import Call, disagreements, of_files
from tests.integration.engine_worker import (
    LENGTHS,
    NUM_DRIFT_STEPS,
    OPTIMIZER,
    POISONED,
    PROMPT_TOKENS,
    RESHARDED,
    RESUMED,
    SCENARIOS,
    Scenario,
    make_batch,
)
from tests.integration.torchrun import run_ranks
from tests.integration.two_layouts import CASES, calls_file, received_file
from tests.tiny_families import make_family_model
from tests.tiny_models import make_tiny_model

LAUNCH_TIMEOUT_S = 600
RELATIVE = 1e-5
NUM_TOKENS = sum(LENGTHS)

COMPARED = [
    (world_size, scenario.name, objective)
    for world_size, scenarios in SCENARIOS.items()
    for scenario in scenarios
    for objective in scenario.objectives
    if not scenario.name.startswith("reference")
]


def cases(scenarios: dict[int, list[Scenario]]) -> list[tuple[int, str]]:
    return [(world_size, scenario.name) for world_size, group in scenarios.items() for scenario in group]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """World size -> results of its launch, which happens when first asked for; the single process always runs first."""
    folder = tmp_path_factory.mktemp("engine")
    make_tiny_model(folder / "models" / "qwen2", "qwen2")
    make_tiny_model(folder / "models" / "qwen3-tied", "qwen3", tie_word_embeddings=True)
    make_tiny_model(folder / "models" / "experts", "qwen3_moe", num_hidden_layers=4)
    make_family_model(folder / "models" / "latent", "deepseek_v3_yarn", vocab_size=128)

    @cache
    def of(world_size: int) -> dict:
        if world_size > 1:
            of(1)
        out = folder / f"ranks{world_size}"
        out.mkdir()
        run_ranks(
            world_size,
            "tests.integration.engine_worker",
            folder / "models",
            out,
            log=out / "log.txt",
            timeout_s=LAUNCH_TIMEOUT_S,
        )
        return {"models": folder / "models", "out": out, **torch.load(out / "results.pt", weights_only=False)}

    return of


def assert_same_weights(found: dict, expected: dict, relative: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        difference = (found[name] - value).abs().max().item()
        assert difference <= relative * value.abs().max().item(), f"{name}: differs by {difference}"


def assert_same_step(found: dict, expected: dict, relative: float = RELATIVE) -> None:
    assert found["lr"] == expected["lr"]
    assert found["skipped"] == expected["skipped"]
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=relative)
    assert found["metrics"].keys() == expected["metrics"].keys()
    for name, (total, denominator) in expected["metrics"].items():
        # Sums of differences that nearly cancel, such as approx_kl_k1, keep the rounding of what they sum.
        assert found["metrics"][name][0] == pytest.approx(total, rel=relative, abs=3 * relative), name
        assert found["metrics"][name][1] == pytest.approx(denominator, rel=relative), name


@pytest.mark.parametrize("world_size,scenario,objective", COMPARED)
def test_results_do_not_depend_on_layout_split_or_recompute(results, world_size, scenario, objective):
    found = results(world_size)[f"{scenario}/{objective}"]
    kind = next((f"-{kind}" for kind in ("tied", "latent") if kind in scenario), "")
    expected = results(1)[f"reference{kind}/{objective}"]
    answers = found["answers"][:NUM_TOKENS]
    torch.testing.assert_close(answers, expected["answers"], rtol=1e-5, atol=5e-6)
    if objective == "critic":
        finals = found["final values"][: len(LENGTHS)]
        torch.testing.assert_close(finals, expected["final values"], rtol=1e-5, atol=5e-6)
    for step, step_expected in zip(found["steps"], expected["steps"], strict=True):
        assert_same_step(step, step_expected)
    assert_same_weights(found["weights"], expected["weights"], RELATIVE)


@pytest.mark.parametrize("world_size,scenario,objective", [case for case in COMPARED if case[2] != "critic"])
def test_a_first_updates_own_logprobs_equal_a_separate_pass(results, world_size, scenario, objective):
    """Bit for bit: whoever asks no pass of them loses nothing."""
    same = results(world_size)[f"{scenario}/{objective}"]["own log-probs"]
    assert same and all(same)


@pytest.mark.parametrize("objective", ["policy", "critic", "sft"])
def test_an_update_moves_the_weights_far_more_than_the_tolerance(results, objective):
    """Otherwise the comparison of weights above could not fail."""
    found = results(1)[f"reference/{objective}"]
    start = load_file(results(1)["models"] / "qwen2" / "model.safetensors")
    shared = found["weights"].keys() & start.keys()
    assert shared
    moved = max(
        ((found["weights"][name] - start[name]).abs().max() / start[name].abs().max()).item() for name in shared
    )
    assert moved > 20 * RELATIVE


def test_results_are_zero_outside_the_requested_tokens(results):
    batch = make_batch()
    wanted = batch.fields["mask"] | batch.fields["lm_mask"]
    answers = results(1)["reference/policy"]["answers"]
    assert (answers[~wanted] == 0).all()
    assert (answers[wanted] < 0).all()


def test_every_token_and_every_sequence_end_has_a_value(results):
    answers = results(1)["reference/critic"]["answers"]
    starts = make_batch().cu_seqlens[:-1]
    assert answers.isfinite().all()
    inside = torch.ones(NUM_TOKENS, dtype=torch.bool)
    inside[starts] = False
    assert (answers[:NUM_TOKENS][inside] != 0).all()
    finals = results(1)["reference/critic"]["final values"]
    assert finals.isfinite().all() and (finals != 0).all()


def test_metrics_are_sums_over_all_microbatches_with_their_denominators(results):
    batch = make_batch()
    metrics = results(1)["reference/sft"]["steps"][0]["metrics"]
    denominators = {denominator for _, denominator in metrics.values()}
    assert float(batch.fields["mask"].sum()) in denominators


def test_warm_up_reaches_the_full_rate_and_then_decays(results):
    steps = results(1)["reference/policy"]["steps"] + results(1)["resume/resumed"]["policy"]["kept"][1:]
    third = OPTIMIZER.min_lr + (OPTIMIZER.lr - OPTIMIZER.min_lr) * 0.5 * (1 + math.cos(math.pi / 8))
    assert [step["lr"] for step in steps] == pytest.approx([OPTIMIZER.lr / 2, OPTIMIZER.lr, third])


@pytest.mark.parametrize("world_size,scenario", cases(RESUMED))
@pytest.mark.parametrize("role", ["policy", "critic"])
def test_a_resumed_run_equals_an_uninterrupted_run_bit_for_bit(results, world_size, scenario, role):
    found = results(world_size)[f"{scenario}/resumed"][role]
    assert found["resumed"] == found["kept"]
    assert found["resumed weights"].keys() == found["kept weights"].keys()
    for name, value in found["kept weights"].items():
        assert torch.equal(found["resumed weights"][name], value), name
    # A disk that is full under one rank is told to all, which then load the checkpoint before.
    assert len(found["full disk"]) == world_size and len(set(found["full disk"])) == 1
    assert "No space left on device" in found["full disk"][0]


@pytest.mark.parametrize("world_size,scenario", cases(RESHARDED))
@pytest.mark.parametrize("role", ["policy", "critic"])
def test_a_checkpoint_of_one_process_continues_in_another_layout(results, world_size, scenario, role):
    found = results(world_size)[f"{scenario}/resharded"][role]
    expected = results(1)["resume/resumed"][role]
    for step, step_expected in zip(found["resumed"], expected["kept"], strict=True):
        assert_same_step(step, step_expected, relative=1e-4)
    assert_same_weights(found["weights"], expected["kept weights"], RELATIVE)


@pytest.mark.parametrize("world_size,scenario", cases(POISONED))
def test_a_non_finite_gradient_changes_no_state(results, world_size, scenario):
    found = results(world_size)[f"{scenario}/poisoned"]
    assert not found["first"]["skipped"]
    assert found["skipped"]["skipped"] and not math.isfinite(found["skipped"]["grad_norm"])
    assert found["skipped"]["lr"] == found["first"]["lr"]
    for name, value in found["weights before"].items():
        assert torch.equal(found["weights after"][name], value), name
    assert found["disturbed"] == found["calm"]
    for name, value in found["calm weights"].items():
        assert torch.equal(found["disturbed weights"][name], value), name


def test_bfloat16_experts_train_like_float32_also_below_bfloat16_resolution(results):
    """A step that rounds away in bfloat16 has to add up in the float32 main weights."""
    exact, found = results(1)["experts/drift"], results(2)["experts-bfloat16/drift"]
    assert found["losses"] == pytest.approx(exact["losses"], rel=0.02)
    assert exact["losses"][-1] < 0.9 * exact["losses"][0]
    moves = {name: (exact["after"][name] - exact["before"][name]).flatten() for name in exact["before"]}
    found_moves = {name: (found["after"][name] - found["before"][name]).flatten() for name in moves}
    agreement = torch.cosine_similarity(torch.cat(list(moves.values())), torch.cat(list(found_moves.values())), dim=0)
    assert agreement > 0.98
    norms = [name for name in moves if "norm" in name]
    # Norm weights are about 1, where neighbouring bfloat16 numbers are at least 1/256 apart.
    assert max(moves[name].abs().max() for name in norms) / NUM_DRIFT_STEPS < 0.5 / 256
    for name in norms:
        assert torch.cosine_similarity(moves[name], found_moves[name], dim=0) > 0.6, name


@pytest.mark.parametrize("part", ["begun", "resumed"])
@pytest.mark.parametrize("case", CASES)
def test_policy_and_critic_in_different_layouts_train_and_resume_as_on_one_rank(results, case, part):
    found, expected = results(4)["two layouts"][case][part], results(1)["two layouts"][case][part]
    for name in ("values", "final values", "logprobs"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=5e-6)
    for engine in ("policy", "critic"):
        assert_same_step(found[engine], expected[engine])
        assert_same_weights(found[f"weights of {engine}"], expected[f"weights of {engine}"], RELATIVE)


@pytest.mark.parametrize("part", ["begun", "resumed"])
@pytest.mark.parametrize("case", CASES)
def test_all_ranks_enqueue_the_collectives_of_all_groups_in_one_order(results, case, part):
    """Two models in two layouts: values, log-probs, updates, weights put together, checkpoints."""
    calls = of_files([calls_file(results(4)["out"], case, part, rank) for rank in range(4)])
    assert len({call.group for call in calls[0]}) > 3
    assert disagreements(calls) == []


@pytest.mark.parametrize("part", ["begun", "resumed"])
@pytest.mark.parametrize("case", CASES)
def test_a_rank_gets_each_sequence_once_per_step(results, case, part):
    """In each of the two layouts: values, log-probs and both updates."""
    files = [received_file(results(4)["out"], case, part, rank) for rank in range(4)]
    by_rank = [torch.load(path) for path in files]
    for layout in range(2):
        numbers = [received[layout] for received in by_rank]
        assert all(len(own) == len(set(own)) for own in numbers)
        assert set().union(*numbers) == set(range(len(LENGTHS)))


def test_crossed_and_missing_collectives_are_detected():
    a, b = Call("a", (0, 1), "allreduce"), Call("b", (0, 1), "allreduce")
    assert disagreements({0: [a, b, a], 1: [a, b, a]}) == []
    assert "different orders" in disagreements({0: [a, b], 1: [b, a]})[0]
    assert "different calls" in disagreements({0: [a, b], 1: [a]})[0]
    # Three ranks, no two of which cross the same two groups.
    ring = [Call(name, ranks, "broadcast") for name, ranks in (("c", (0, 1)), ("d", (1, 2)), ("e", (2, 0)))]
    assert disagreements({0: [ring[2], ring[0]], 1: [ring[0], ring[1]], 2: [ring[1], ring[2]]})


@pytest.mark.parametrize("case", CASES)
def test_the_second_update_of_both_models_differs_from_the_first(results, case):
    """Otherwise going on from the files could not be told from starting over."""
    begun, resumed = (results(1)["two layouts"][case][part] for part in ("begun", "resumed"))
    for name in ("logprobs", "values"):
        assert (begun[name] - resumed[name]).abs().max() > 1e-3


def test_an_impossible_learning_rate_schedule_is_refused():
    with pytest.raises(ValueError, match="decay_steps"):
        build_scheduler(OptimizerConfig(decay_style=DecayStyle.cosine, warmup_steps=5, decay_steps=5), optimizer=None)
    with pytest.raises(ValueError, match="min_lr"):
        build_scheduler(OptimizerConfig(lr=1e-5, min_lr=1e-4), optimizer=None)


def test_the_scenarios_cover_prompt_tokens_and_masked_sequences():
    batch = make_batch(masked_rows=2)
    assert not batch.fields["mask"][: LENGTHS[0]].any()
    assert not batch.fields["mask"][NUM_TOKENS:].any()
    assert not batch.fields["mask"][LENGTHS[0] : LENGTHS[0] + PROMPT_TOKENS].any()
