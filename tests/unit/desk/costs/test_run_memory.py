"""A run's memory per stage, the fit and its remedies: desk/costs/run_memory.py, desk/plan/memory_fit.py."""

from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.checks.servers import placement_problems
from megatron_rl.config.layout import SHORT_NAMES, layout_problems
from megatron_rl.config.load import load_config
from megatron_rl.config.schema import Config
from megatron_rl.desk.costs.gpus import Gpu, gpu
from megatron_rl.desk.costs.run_memory import (
    COMPONENTS,
    GROUP_BYTES,
    STATES,
    RunModel,
    _Run,
    memory_fraction,
    model_folders,
    models_of,
    run_memory,
)
from megatron_rl.desk.plan.dry_run import _lora_notes
from megatron_rl.desk.plan.memory_fit import MemoryFit, _is_possible, check_fit_with_fixes
from megatron_rl.desk.simulate.estimated_costs import estimated_kv_tokens
from megatron_rl.errors import ConfigError
from megatron_rl.families.model_facts import as_config, read_model_json
from megatron_rl.models.hf.megatron_config import check_layout
from megatron_rl.models.hf.model_config import load_hf_config
from megatron_rl.training.optimizer import state_tensors
from megatron_rl.training.trainer_ranks import rl_engines
from tests.fake_world import fake_rank
from tests.tiny_models import make_tiny_model

MODELS = Path(__file__).parents[4] / "tools" / "published" / "models"
H100, H200 = gpu("H100-80G"), gpu("H200")
COLOCATED = ("rollout.placement=colocated", "rollout.num_servers=2", "rollout.tensor_parallel_size=4")


def overrides_of(model: str, *overrides: str) -> list[str]:
    common = ("batch.max_prompt_tokens=2048", "batch.max_response_tokens=14336", "policy.dtype=bfloat16")
    return [f"policy.path={MODELS / model}", "preset=ppo", "parallel.num_ranks=8", *common, *overrides]


def configured(model: str, *overrides: str) -> Config:
    return load_config(None, overrides_of(model, *overrides))


def layout(**sizes: Any) -> list[str]:
    """tp, pp, ep, ranks, layers; with tensor parallelism also sequence parallelism and whole experts."""
    names = {**SHORT_NAMES, "ranks": "num_ranks", "layers": "pipeline_layers"}
    overrides = [f"parallel.{names[name]}={size}" for name, size in sizes.items()]
    overrides += ["parallel.sequence_parallel=true"] if sizes.get("tp", 1) > 1 else []
    return overrides + (["parallel.expert_tensor_parallel_size=1"] if "ep" in sizes else [])


DENSE = configured("qwen2.5-math-7b", *layout(tp=4))


def facts_of(config: Config) -> dict[str, Any]:
    return {name: as_config(read_model_json(folder)) for name, folder in model_folders(config).items()}


def models_in(config: Config) -> list[RunModel]:
    return models_of(config, facts_of(config))


def decide(config: Config, device: Gpu = H100) -> MemoryFit:
    return check_fit_with_fixes(config, facts_of(config), device)


def stages_of(config: Config):
    return {stage.name: stage for stage in run_memory(config, models_in(config)).stages}


def held(config: Config, stage: str, *models: str) -> float:
    """Weights, gradients and optimizer state of ``models``."""
    parts = stages_of(config)[stage].parts
    return sum(parts.get(f"{model}: {state}", 0.0) for model in models for state in STATES)


@pytest.mark.parametrize(
    ("model", "sizes", "at_most", "together"),
    [
        ("qwen2.5-math-7b", dict(tp=4, ranks=8), 26e9, 44.1e9),
        ("qwen3-30b-a3b", dict(tp=4, ep=8, ranks=8), 80e9, 139.0e9),
        ("qwen3-235b-a22b", dict(tp=4, pp=4, ep=32, ranks=128, layers=[24, 24, 23, 23]), 42e9, 74.2e9),
    ],
)
def test_static_bytes_of_a_policy_with_a_critic(model, sizes, at_most, together):
    """``at_most``: while the policy trains; ``together``: weights, gradients and optimizer state of both models."""
    config = configured(model, *layout(**sizes))
    assert held(config, "update_policy", "policy", "critic") <= at_most
    both = held(config, "update_policy", "policy") + held(config, "update_critic", "critic")
    assert both == pytest.approx(together, rel=0.01)


def test_of_teachers_that_take_turns_the_largest_counts_and_the_others_wait_on_the_host():
    small, large = MODELS / "qwen2.5-math-7b", MODELS / "qwen3-30b-a3b"
    by_type = f"reference.path_by_type.code={large}"
    teachers = ([f"reference.path={small}"], [f"reference.path={large}"], [f"reference.path={small}", by_type])
    configs = [configured(small.name, *layout(tp=4, ep=8, ranks=8), "preset=distillation", *words) for words in teachers]
    less, most, both = (stages_of(config)["reference_logprobs"].total for config in configs)
    assert less < most == pytest.approx(both)
    *alone, together = (run_memory(config, models_in(config)).host["idle models, 8 ranks"] for config in configs)
    assert together > max(alone)


def test_every_component_of_a_stage_is_listed():
    config = configured("qwen3-30b-a3b", *layout(tp=4, ep=8), *COLOCATED, "algorithm.kl.place=loss", "policy.moe.routing_replay=R2")
    names = {f"{model.name}: {state}" for model in models_in(config) for state in STATES} | set(COMPONENTS)
    assert {name for stage in stages_of(config).values() for name in stage.parts} <= names


def test_models_that_never_offload_stay_on_the_device():
    for stage, other in (("update_policy", "critic"), ("update_critic", "policy")):
        assert held(DENSE, stage, other) == 0
        stays = configured("qwen2.5-math-7b", *layout(tp=4), f"{other}.offload=never")
        weights_and_optimizer = held(stays, stage, other)
        assert weights_and_optimizer > 0
        assert f"{other}: gradients" not in stages_of(stays)[stage].parts
        without = stages_of(DENSE)[stage].total
        assert stages_of(stays)[stage].total == pytest.approx(without + weights_and_optimizer)


def test_host_memory_includes_offloaded_models():
    all_away = run_memory(DENSE, models_in(DENSE)).host["idle models, 8 ranks"]
    in_update = held(DENSE, "update_policy", "policy") + held(DENSE, "update_critic", "critic")
    gradients = sum(stages_of(DENSE)[f"update_{name}"].parts[f"{name}: gradients"] for name in ("policy", "critic"))
    assert all_away == pytest.approx(8 * (in_update - gradients))


def test_bfloat16_moments_save_a_third_of_the_optimizer_state():
    small = configured("qwen2.5-math-7b", *layout(tp=4), "policy.optimizer.moments=bfloat16")
    before, after = (stages_of(config)["update_policy"].parts["policy: optimizer"] for config in (DENSE, small))
    assert after == before * 8 / 12


def test_single_model_is_never_offloaded():
    alone = configured("qwen2.5-math-7b", *layout(tp=4), "preset=grpo", "algorithm.kl.place=none")
    assert set(stages_of(alone)) == {"old_logprobs", "update_policy", "publish"}
    assert held(alone, "publish", "policy") > held(DENSE, "publish", "policy") - 1
    assert not any(name.startswith("models") for name in run_memory(alone, models_in(alone)).host)


def test_reference_is_on_the_device_only_for_its_own_pass():
    config = configured("qwen2.5-math-7b", *layout(tp=4), "algorithm.kl.place=loss")
    stages = stages_of(config)
    assert stages["reference_logprobs"].parts["reference: weights"] == stages["update_policy"].parts["policy: weights"]
    assert {name for name, stage in stages.items() if "reference: weights" in stage.parts} == {"reference_logprobs"}
    assert not held(config, "reference_logprobs", "policy", "critic")


def test_optimizer_state_stays_until_another_model_trains():
    """A pass of the model itself neither offloads nor reloads its optimizer state."""
    with_critic, alone = DENSE, configured("qwen2.5-math-7b", *layout(tp=4), "preset=grpo", "algorithm.kl.place=loss")
    assert "policy: optimizer" not in stages_of(with_critic)["old_logprobs"].parts
    assert "policy: optimizer" in stages_of(alone)["old_logprobs"].parts
    assert "policy: optimizer" in stages_of(with_critic)["publish"].parts


def test_stage_memory_is_that_of_the_fullest_rank():
    """The first stage has the embedding and most micro-batches; the critic is split at other ranks."""
    config = configured("qwen2.5-math-7b", *layout(pp=4), "critic.parallel.pipeline_parallel_size=2", "critic.offload=never")
    models = models_in(config)
    run = _Run(config, models)
    for stage in run_memory(config, models).stages:
        by_rank = [sum(size for _, size in run.parts(stage.name, rank)) for rank in range(8)]
        assert stage.total == by_rank[stage.rank] == max(by_rank)
        assert min(by_rank) < max(by_rank)


def test_models_are_offloaded_while_colocated_servers_generate():
    config = configured("qwen2.5-math-7b", *layout(tp=4), *COLOCATED)
    generate = stages_of(config)["generate"].parts
    assert held(config, "generate", "policy", "critic") == 0
    assert generate["server: weights"] == pytest.approx(15.23e9 / 4, rel=0.01)
    publish = stages_of(config)["publish"].parts
    assert publish["policy: weights"] > 0 and "policy: optimizer" not in publish
    stays = configured("qwen2.5-math-7b", *layout(tp=4), *COLOCATED, "policy.offload=never")
    assert held(stays, "generate", "policy") > 10e9


def test_routes_take_memory_only_if_they_are_replayed():
    moe = configured("qwen3-30b-a3b", *layout(tp=4, ep=8), "policy.moe.routing_replay=R2")
    of_pack = 48 * 8 * max(16384, moe.batch.max_tokens_per_microbatch)
    assert stages_of(moe)["update_policy"].parts["routes"] == of_pack  # 128 experts: a byte each
    assert stages_of(moe)["old_logprobs"].parts["routes"] == 2 * of_pack  # this pass records the routes in int16
    assert not stages_of(DENSE)["update_policy"].parts["routes"]


def test_server_routes_are_stored_once_per_node_and_cached_if_remote():
    def host_of(num_ranks: int, *more: str) -> dict[str, float]:
        config = configured("qwen3-30b-a3b", *layout(tp=4, ep=8), f"parallel.num_ranks={num_ranks}", *more)
        found = run_memory(config, models_in(config)).host
        return {name: size for name, size in found.items() if "routes" in name}

    replay, workers = "policy.moe.routing_replay={}".format, "rollout.num_workers=2"
    config = configured("qwen3-30b-a3b", *layout(tp=4, ep=8))
    tokens = config.batch.num_prompts_per_step * config.batch.num_samples_per_prompt
    tokens *= config.batch.max_prompt_tokens + config.batch.max_response_tokens
    all_routes = 48 * 8 * tokens
    assert host_of(8, replay("R3"), workers) == {"driver: routes": all_routes}
    assert host_of(16, replay("R3"), workers)["driver: routes"] == all_routes / 2
    assert host_of(16, replay("R3"), "rollout.num_workers=0")["driver: routes"] == all_routes
    # Eight of the sixteen ranks are on the node; four share a quarter of the sequences.
    assert host_of(16, replay("R3"), workers)["cached routes, 8 ranks"] == pytest.approx(8 * all_routes / 4)
    assert host_of(16, replay("R2"), workers) == {"cached routes, 8 ranks": pytest.approx(8 * all_routes / 4)}


def test_reference_needs_no_routes():
    overrides = (*layout(tp=4, ep=8), "policy.moe.routing_replay=R3", "algorithm.kl.place=loss")
    stages = stages_of(configured("qwen3-30b-a3b", *overrides))
    assert stages["reference_logprobs"].parts["routes"] == 0 < stages["old_logprobs"].parts["routes"]


def test_pipeline_microbatches_stay_until_their_backward_pass():
    """The first stage has started one micro-batch per stage, so it has as many batches as activations."""
    one, four = (configured("qwen2.5-math-7b", *layout(pp=size)) for size in (1, 4))
    batch = [stages_of(config)["update_policy"].parts["batch"] for config in (one, four)]
    assert batch[1] == 4 * batch[0]
    # A forward-only pass keeps one micro-batch on the device, and the outputs so far.
    answers = 4 * 16384 * four.batch.num_prompts_per_step * four.batch.num_samples_per_prompt / 2
    assert stages_of(four)["old_logprobs"].parts["batch"] == pytest.approx(answers, rel=0.01)


def test_copies_in_8_bits_are_counted():
    plain, small = DENSE, configured("qwen2.5-math-7b", *layout(tp=4), "policy.fp8=hybrid", "rollout.server_args={quantization: fp8}")
    copies = {name: stage.parts.get("8-bit copies of weights", 0.0) for name, stage in stages_of(small).items()}
    in_layers = 2 * 6.53e9 / 4  # two bytes of each number in the layers' matrices
    assert all(size == pytest.approx(in_layers, rel=0.01) for size in copies.values())
    servers = [run_memory(config, models_in(config)).server_weights for config in (plain, small)]
    assert servers[0] - servers[1] == pytest.approx(6.53e9, rel=0.01)


def test_more_groups_need_more_nccl_buffers():
    one = configured("qwen2.5-math-7b", "parallel.num_ranks=1")
    assert stages_of(one)["publish"].parts["NCCL"] == GROUP_BYTES
    assert stages_of(DENSE)["publish"].parts["NCCL"] > 3 * GROUP_BYTES


def test_kv_cache_tokens_equal_those_of_the_simulation():
    assert int(decide(DENSE).kv_tokens) == estimated_kv_tokens(DENSE, H100)


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("qwen2.5-math-7b", [*layout(tp=1)]),
        ("qwen2.5-math-7b", [*layout(tp=1), *COLOCATED, "policy.offload=never", "critic.offload=never"]),
        ("qwen3-30b-a3b", [*layout(tp=4, ep=8)]),
        ("qwen3-30b-a3b", [*layout(tp=4, ep=8), "batch.max_response_tokens=30720"]),
        ("qwen3-235b-a22b", [*layout(tp=4, pp=2, ep=16, ranks=64)]),
    ],
)
def test_recommended_keys_make_the_run_fit(model, overrides):
    config = configured(model, *overrides)
    found = decide(config)
    assert found.problem and found.changes and found.needed_after <= H100.hbm_bytes

    def after(changes) -> Config:
        shown = {key: value.value if isinstance(value, Enum) else value for key, value in changes.items()}
        return configured(model, *overrides, *(f"{key}={value}" for key, value in shown.items()))

    changed = after(found.changes)
    assert not decide(changed).problem
    assert decide(changed).needed == pytest.approx(found.needed_after)
    assert not list(layout_problems(changed.parallel, changed.parallel.num_ranks))
    assert not list(placement_problems(changed.rollout, changed.parallel.num_ranks))
    check_layout(load_hf_config(MODELS / model), changed.parallel)
    for key in found.changes:
        fewer = after({name: value for name, value in found.changes.items() if name != key})
        assert not _is_possible(fewer, facts_of(fewer)) or decide(fewer).problem, key


def test_run_that_cannot_fit_has_no_recommendation():
    huge = configured("deepseek-v3", "parallel.num_ranks=1")
    found = decide(huge, H200)
    assert found.problem and not found.changes and found.needed_after == found.needed


@pytest.mark.parametrize("share", ["auto", 0, 1.5, "true"])
def test_invalid_memory_fraction_is_rejected_by_its_key(share):
    config = configured("qwen2.5-math-7b", f"rollout.server_args={{mem-fraction-static: {share}}}")
    with pytest.raises(ConfigError, match="mem-fraction-static: expected a number"):
        memory_fraction(config)


ADAPTERS = ["preset=ppo", "policy.lora.rank=8", "critic.lora.rank=8", "policy.offload=never", "critic.offload=never"]
ADAPTERS += ["algorithm.kl.place=loss", "algorithm.kl.estimator=k3", "algorithm.kl.coef=0.1"]
WIDE = dict(hidden_size=512, intermediate_size=1536, vocab_size=8192, num_attention_heads=8, head_dim=64)


@pytest.mark.parametrize(
    ("family", "shape", "sizes", "dtype"),
    [
        ("qwen3", dict(num_hidden_layers=4), dict(tp=2, ranks=2), "bfloat16"),
        ("qwen3", WIDE, dict(ranks=1), "float32"),
        ("qwen3", WIDE, dict(ranks=2), "bfloat16"),
        ("qwen3_moe", dict(hidden_size=256, vocab_size=2048), dict(ep=2, ranks=2), "float32"),
    ],
)
def test_planned_bytes_of_adapters_with_and_without_a_shared_base_are_those_of_the_engines(tmp_path, family, shape, sizes, dtype):
    """Policy, critic and reference, all on one base or one of them on its own; the dry run's notes say what the shared base saves."""
    folder = make_tiny_model(tmp_path / "model", family, **shape)
    planned, measured = {}, {}
    names, overrides = ("policy", "critic", "reference"), [f"policy.path={folder}", f"policy.dtype={dtype}", *ADAPTERS, *layout(**sizes)]
    for alone in ("", "reference", "critic"):
        config = load_config(None, [*overrides, *([f"{alone}.path={folder}/"] if alone else [])])
        planned[alone] = held(config, "update_policy", *names) + stages_of(config)["update_critic"].parts["critic: gradients"]
        measured[alone] = max(bytes_of_engines(config, rank) for rank in range(config.parallel.num_ranks))
    assert planned == pytest.approx(measured, rel=0.01)
    saves = [note for note in _lora_notes(load_config(None, overrides), "train") if "saves" in note]
    for alone, note in zip(("reference", "critic"), saves, strict=True):
        assert note.startswith(f"the {alone}")
        if "ep" not in sizes:  # whose ranks each have the other layers
            saved = 1e6 * float(note.split("saves ")[1].split(" MB")[0].replace(",", ""))
            assert saved == pytest.approx((measured[alone] - measured[""]) * sizes.get("tp", 1), rel=0.01, abs=5e4)


def bytes_of_engines(config: Config, rank: int) -> int:
    """Weights, gradients and optimizer state of all models on one rank, each storage once."""
    with fake_rank(rank, config.parallel.num_ranks, config.parallel) as (place,), ExitStack() as stack:
        engines, sizes = rl_engines(config)(place), {}
        for engine in engines.values():
            if engine._optimizer is not None:
                stack.enter_context(engine.memory.training())  # gradients exist, until another engine on the same weights is used
            tensors = [parameter.data for chunk in engine.chunks for parameter in chunk.parameters()]
            tensors += [buffer.grad_data for one in engine._replicas for buffer in (*one.buffers, *one.expert_parallel_buffers)]
            tensors += state_tensors(engine._optimizer) if engine._optimizer else []
            sizes = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors} | sizes
        return sum(sizes.values())
