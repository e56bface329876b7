"""``megatron-rl doctor --mismatch``: each fault is put into a real trainer or a real server, and named.

One server and one trainer for the whole file; each test leaves both as it found them.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.config.load import load_config
from megatron_rl.config.schema import Config
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.trajectory import Prompt
from megatron_rl.desk.doctor import mismatch_ranks, mismatch_runs
from megatron_rl.desk.doctor.mismatch_factors import (
    BATCH_SHAPE,
    HELD_HERE,
    PREFIX_CACHE,
    ROUTING,
    SAMPLING,
    WEIGHTS,
    culprits,
    is_settled,
    verdict,
)
from megatron_rl.desk.doctor.mismatch_ranks import TrainerAndServers, trials
from megatron_rl.desk.doctor.trainer_and_servers import temporary_servers
from megatron_rl.models.layers.routing import _Choice, replay
from megatron_rl.parallel import topology as topologies
from megatron_rl.rollout.generation import Sampling
from megatron_rl.rollout.sglang.wire.response_validation import route_shape
from megatron_rl.training.trainer_group import TrainerGroup
from megatron_rl.training.trainer_rank import TrainerRank
from megatron_rl.training.trainer_ranks import build_engine
from tests.integration.preloaded import preloading
from tests.tiny_models import make_tiny_model

RECIPE = """
preset: ppo
policy: {{path: {model}, dtype: float32, moe: {{routing_replay: R3}}}}
critic: {{warmup_steps: 1}}
batch: {{max_prompt_tokens: 48, max_response_tokens: 24}}
data: {{train_files: ["{folder}/train.jsonl"], use_chat_template: false}}
reward: {{name: math}}
rollout: {{num_parity_prompts: 6, start_timeout_s: 400}}
run: {{output_dir: {folder}/run}}
tracking: {{mlflow: false}}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    folder = tmp_path_factory.mktemp("mismatch")
    model = make_tiny_model(folder / "model", "qwen3_moe", eos_token_id=1)
    rows = [{"prompt": f"{i}+{i}= and {'x' * (3 * i)}", "answer": str(2 * i)} for i in range(8)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(RECIPE.format(model=model, folder=folder))
    return load_config([folder / "recipe.yaml"], [])


@pytest.fixture(scope="module")
def sides(config) -> Iterator[TrainerAndServers]:
    place = topologies.initialize(config.parallel, seed=1)
    tokenizer = Tokenizer(config.policy.path)
    prompts = [Prompt(str(i), tuple(range(5 + i, 22 + 3 * i))) for i in range(6)]
    sampling = replace(Sampling.of(config.rollout, tokenizer, seed=1), routes=route_shape(config.policy.path))
    try:
        engine = build_engine(config, place, "policy", config.policy, None)
        group = TrainerGroup(TrainerRank(config, place, {"policy": engine}))
        with preloading(), temporary_servers(config, group, tokenizer, note=print) as (rollout, wait_for):
            rollout.publish()
            yield TrainerAndServers(config, group, rollout, sampling, prompts, wait_for)
    finally:
        topologies.destroy()


@pytest.fixture
def other_weights(config, tmp_path) -> Path:
    """The policy's folder with other values in one matrix."""
    for file in Path(config.policy.path).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"] *= 1.5
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def load(sides: TrainerAndServers, folder: Path | str, *, flush: bool) -> None:
    """Change the server's weights, as another client would."""
    body = {"model_path": str(folder), "load_format": "auto", "flush_cache": flush}

    async def post() -> None:
        async with mismatch_ranks.HttpSession() as http:
            await mismatch_ranks.post_json(http, sides.rollout.addresses()[0], "/update_weights_from_disk", body, 120.0)

    sides.wait_for(post())


def named(sides: TrainerAndServers) -> list[str]:
    found = list(trials(sides, HELD_HERE))
    assert is_settled(found)
    return culprits(found)


def test_no_cause_is_named_if_both_sides_agree(sides):
    (base,) = trials(sides, HELD_HERE)
    assert base.agrees and base.num_tokens > 50
    assert verdict([base]) == ["trainer and servers agree on the tokens that these servers sample now"]


def test_stale_weights_are_named_with_their_parameter(sides, other_weights):
    load(sides, other_weights, flush=True)
    found = list(trials(sides, HELD_HERE))
    assert culprits(found) == [WEIGHTS] and is_settled(found)
    assert "1 parameters differed: model.layers.1.self_attn.qkv_proj.weight" in found[-1].evidence


def test_a_prefix_cache_of_older_weights_is_named(sides, other_weights, config):
    load(sides, other_weights, flush=True)
    sides.measure(frozenset())  # fills the cache
    load(sides, config.policy.path, flush=False)
    assert named(sides) == [PREFIX_CACHE]


def test_a_temperature_on_one_side_only_is_named(sides):
    assert named(replace(sides, sampling=replace(sides.sampling, temperature=0.7))) == [SAMPLING]


def test_a_logit_penalty_of_the_servers_is_named(sides, monkeypatch):
    plain = mismatch_ranks.generate_body

    def with_default(requests, rids):  # as preferred_sampling_params of a server: what a request says comes first
        body = plain(requests, rids)
        body["sampling_params"] = [{"repetition_penalty": 1.5} | params for params in body["sampling_params"]]
        return body

    monkeypatch.setattr(mismatch_ranks, "generate_body", with_default)
    assert named(sides) == [SAMPLING]


def test_results_that_depend_on_the_batch_are_named(sides, monkeypatch):
    post, in_progress = mismatch_ranks.post_json, []

    async def disturbed(http, address, path, body, timeout_s):
        in_progress.append(path)
        try:
            content = await post(http, address, path, body, timeout_s)
            if len(in_progress) == 1 or path != "/generate":
                return content
            (sample,) = orjson.loads(content)
            for entry in sample["meta_info"]["output_token_logprobs"]:
                entry[0] -= 0.05
            return orjson.dumps([sample])
        finally:
            in_progress.pop()

    monkeypatch.setattr(mismatch_ranks, "post_json", disturbed)
    assert named(sides) == [BATCH_SHAPE]


def test_a_different_choice_of_experts_is_named(sides, monkeypatch):
    def other_choice(self, scores, topk, num_groups, group_topk, compute_topk):
        _, ids = compute_topk(scores.flip(1), topk, num_groups=num_groups, group_topk=group_topk)
        top_scores = scores.gather(1, ids)
        if self.wanted is not None:
            top_scores, ids = replay(scores, ids, self.wanted)
        self.chosen = ids
        return top_scores, ids

    monkeypatch.setattr(_Choice, "get_replay_topk", other_choice)
    assert named(sides) == [ROUTING]


def test_two_faults_are_both_named(sides, other_weights):
    load(sides, other_weights, flush=True)
    assert named(replace(sides, sampling=replace(sides.sampling, temperature=0.7))) == [SAMPLING, WEIGHTS]


def test_remaining_factors_are_tested_in_other_launches(sides, monkeypatch):
    logprobs = sides.group.logprobs

    def rounded(batch, **options):
        return logprobs(batch, **options).to(torch.bfloat16).float()

    monkeypatch.setattr(sides.group, "logprobs", rounded)
    found = list(trials(sides, HELD_HERE))
    assert [trial.factor for trial in found[1:]] == list(HELD_HERE) and not is_settled(found) and not culprits(found)


@pytest.mark.parametrize(
    ("overrides", "guilty"),
    [(["policy.dtype=bfloat16"], "dtype"), (["parallel.expert_parallel_size=2", "parallel.num_ranks=2"], "expert parallelism")],
)
def test_dtype_and_expert_parallelism_are_tested_in_separate_launches(sides, config, monkeypatch, tmp_path, overrides, guilty):
    """The launch is a stand-in; what is launched is the run's recipe without the factor."""
    launched = []

    def launch(folder, config, scratch, held, tries, name, how):
        launched.append(config)
        is_right = config.policy.dtype.value == "float32" and config.parallel.expert_parallel_size == 1
        (base,) = trials(sides, [], name=name, how=how)
        wrong = replace(base, figures=replace(base.figures, mean=0.9, k3=0.9, max=2.0))
        return [base if is_right else wrong, *(replace(wrong, factor=factor) for factor in tries)]

    monkeypatch.setattr(mismatch_runs, "_launched", launch)
    (tmp_path / "config.yaml").write_text((Path(config.run.output_dir).parent / "recipe.yaml").read_text())
    found = list(mismatch_runs._trials(tmp_path, mismatch_runs.load_recipe(tmp_path, overrides)))
    assert culprits(found) == [guilty] and is_settled(found)
    assert found[-1].factor == guilty and len(launched) == 2


def test_a_changed_chat_template_is_named_and_bad_folders_are_refused(config, tmp_path, capsys):
    from megatron_rl.cli import main
    from megatron_rl.data.prompts import load_prompts
    from megatron_rl.desk.doctor.mismatch_runs import template_trial
    from megatron_rl.run.output import write_first_prompts

    prompts = load_prompts(config.data.train_files, config.data, Tokenizer(config.policy.path), max_prompt_tokens=99).prompts
    write_first_prompts(tmp_path, prompts)
    same = template_trial(tmp_path, config)
    assert not same.is_at_fault and same.evidence == "equal" and "8 prompts" in same.held
    changed = [replace(prompts[0], token_ids=(2, *prompts[0].token_ids)), *prompts[1:]]
    (tmp_path / "first_prompts.json").unlink()
    write_first_prompts(tmp_path, changed)
    off = template_trial(tmp_path, config)
    assert culprits([off]) == ["chat template"]
    assert "1 of 8 prompts differ" in off.evidence and "at token 0" in off.evidence
    (tmp_path / "run").mkdir()
    loose = (Path(config.run.output_dir).parent / "recipe.yaml").read_text().replace("num_parity", "max_logprob_difference: 9, num_parity")
    (tmp_path / "run" / "config.yaml").write_text(loose)
    assert mismatch_runs.load_recipe(tmp_path / "run", []).rollout.max_logprob_difference is None
    kept = mismatch_runs.load_recipe(tmp_path / "run", ["rollout.max_logprob_difference=2"])
    assert kept.rollout.max_logprob_difference == 2
    assert main(["doctor", "--mismatch", str(tmp_path)]) == 2
    assert "has no config.yaml" in capsys.readouterr().err
