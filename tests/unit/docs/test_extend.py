"""The examples of docs/extend.md behave as documented, in the code paths of a run."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from megatron_rl.config.checks import check_config
from megatron_rl.config.load import load_config
from megatron_rl.data.batch import PackedBatch
from megatron_rl.data.trajectory import Prompt, Score, Segment, Trajectory
from megatron_rl.environments.base import TurnView, build
from megatron_rl.errors import ConfigError
from megatron_rl.rewards.score_file import score_file
from megatron_rl.step.packing import window_batch
from megatron_rl.step.window_advantages import ModelOutputs, window_advantages
from megatron_rl.training.losses import policy_denominators, policy_objective

PAGE = (Path(__file__).parents[3] / "docs" / "extend.md").read_text()
FILES = dict(re.findall(r"^```python (\S+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
RECIPES = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Writes the page's package where Python and worker processes find it; the recipe of all its pieces together."""
    for name, source in FILES.items():
        if name.startswith("my_rl/"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(source)
    (tmp_path / "my_rl" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for number, text in enumerate(RECIPES):
        (tmp_path / f"{number}.yaml").write_text(text)
    yield [tmp_path / f"{number}.yaml" for number in range(len(RECIPES))]
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_rl"]:
        del sys.modules[name]


def response(score, group, id, tokens=3):
    segment = Segment((7,) * tokens, (-0.5,) * tokens, 0, "stop", 0)
    return Trajectory(id, Prompt(id=str(group), token_ids=(1, 2)), group, 0, 100, [segment], score=Score(score))


def test_the_page_has_five_examples():
    assert [name.rpartition("/")[2] for name in FILES] == [
        "advantages.py", "losses.py", "rewards.py", "environments.py", "mistral.py",
    ]  # fmt: skip
    assert len(RECIPES) == 4


def test_all_pieces_together_are_checked_before_a_run(recipe):
    overrides = ["policy.path=/nowhere", "data.train_files=[/nowhere/train.jsonl]", "batch.num_samples_per_prompt=4"]
    with pytest.raises(ConfigError) as error:
        check_config(load_config(recipe, overrides), command="train", world_size=1)
    assert all("/nowhere" in problem for problem in str(error.value).splitlines()), error.value


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("algorithm.advantage_options={scal: 2.0}", "no option 'scal'; its options: scale; did you mean 'scale'?"),
        ("algorithm.policy_loss_options={max_ratio: much}", "option max_ratio must be a number, got 'much'"),
        ("algorithm.advantage=my_rl.advantages:mean_advantages", "my_rl.advantages has no 'mean_advantages'"),
    ],
)
def test_a_mistake_is_reported_before_a_run(recipe, override, says):
    with pytest.raises(ConfigError) as error:
        check_config(load_config(recipe, ["policy.path=/nowhere", override]), command="train", world_size=1)
    assert says in str(error.value)


def test_the_advantage_applies_to_the_window(recipe):
    algorithm = load_config(recipe, ["algorithm.normalization=none", "algorithm.advantage_clamp=0"]).algorithm
    rewards = [1.0, 0.0, 0.0, 5.0, 1.0, 3.0]
    trajectories = [response(reward, index // 3, index) for index, reward in enumerate(rewards)]
    batch = window_batch(trajectories, 0)
    found = window_advantages(trajectories, batch, ModelOutputs(), step=0, window_tokens=100, algorithm=algorithm)
    expected = torch.tensor([2.0, 0.0, 0.0, 4.0, -4.0, 0.0]).repeat_interleave(3)
    assert torch.equal(found.advantages[found.mask], expected)


def test_the_loss_equals_its_formula_for_any_micro_batches(recipe):
    algorithm = load_config(recipe, ["algorithm.aggregation=token_mean", "algorithm.kl.place=none"]).algorithm
    torch.manual_seed(0)
    sizes, total = [4, 3, 5], 12
    batch = PackedBatch(
        torch.zeros(total, dtype=torch.int64),
        torch.tensor([0, 4, 7, 12]),
        {
            "mask": torch.rand(total) < 0.7,
            "old_logprobs": -torch.rand(total),
            "advantages": torch.randn(total),
        },
    )
    logprobs = (-2 * torch.rand(total)).requires_grad_()
    ratio = (logprobs.detach() - batch.fields["old_logprobs"]).exp().clamp(max=3.0)
    mask = batch.fields["mask"]
    expected = (-batch.fields["advantages"] * ratio * logprobs)[mask].sum() / mask.sum()
    objective = policy_objective(algorithm, policy_denominators(batch, algorithm))
    whole, metrics = objective({"logprobs": logprobs, "entropy": torch.zeros(total)}, batch)
    torch.testing.assert_close(whole, expected)
    assert "truncated_fraction" in metrics
    parts = [
        objective({"logprobs": part, "entropy": torch.zeros(len(part))}, batch.select([row]))[0]
        for row, part in enumerate(logprobs.split(sizes))
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_the_reward_scores_a_file_in_worker_processes(recipe, tmp_path):
    rows = ["(a[b])", "(a", "no bracket", "()" * 200]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"response": r, "answer": ""}) + "\n" for r in rows))
    reward = load_config(recipe).reward
    score_file(reward.name, tmp_path / "in.jsonl", tmp_path / "out.jsonl", num_workers=1, options=reward.options)
    scored = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["score"] for row in scored] == [1.0, 0.0, None, 0.0]
    assert "no bracket to judge by" in scored[2]["error"]


def test_the_environment_gives_a_second_chance(recipe):
    environment = load_config(recipe).environment
    chance = build(environment.name, environment.options)
    prompt = Prompt(id="p", token_ids=(1,), answer="7")

    def turns(*texts):
        return [TurnView("policy", text, (1,), "stop") for text in texts]

    assert chance.respond(prompt, turns("it is 7")) is None
    assert chance.respond(prompt, turns("8")).text.startswith("That is not right")
    assert chance.respond(prompt, turns("8", "7")) is None
    assert chance.graded_text(prompt, turns("8", "7"), 0) is None
    assert chance.turn_reward(prompt, turns("8", "7"), 1, {1: Score(1.0)}).value == 0.25
    assert chance.turn_reward(prompt, turns("7"), 0, {0: Score(1.0)}).value == 1.0
    assert chance.metrics(prompt, turns("8", "7"), {}) == {"needed_second": 1.0}
