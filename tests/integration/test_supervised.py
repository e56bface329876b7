"""`megatron-rl sft` on conversations and `megatron-rl dpo`, as a user runs them."""

import json
import random
import re

import pytest

from tests.integration.test_reward_training import ROOT, run, task  # noqa: F401
from tests.word_models import make_word_model

RECIPE = ROOT / "examples" / "reward_models" / "dpo.yaml"


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content and loop.last %}({{ m.reasoning_content }}){% endif %}{{ m.content }}<eos>"
    "{% else %}{{ m.content }};{% endif %}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Earlier turns lose their thoughts."""


def conversation(generator):
    """The user's digits cannot be predicted, and the assistant's words follow from the turn."""
    turns = []
    for turn in range(2):
        turns.append({"role": "user", "content": "".join(generator.choices("0123456789", k=8))})
        turns.append({"role": "assistant", "reasoning_content": f"turn {turn}", "content": ["one", "two"][turn]})
    return {"messages": turns}


def test_sft_learns_every_turn_of_the_assistant_and_nothing_of_the_user(tmp_path):
    make_word_model(tmp_path / "model", extra="user assistant turn one two")
    settings = tmp_path / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    generator = random.Random(1)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(conversation(generator)) + "\n" for _ in range(200)))
    (tmp_path / "recipe.yaml").write_text(
        f"""
policy: {{path: {tmp_path}/model, init: random}}
parallel: {{num_ranks: 2}}
batch: {{max_tokens_per_microbatch: 512}}
data: {{messages_field: messages}}
sft:
  train_files: [{tmp_path}/rows.jsonl]
  output_path: {tmp_path}/sft
  num_steps: 400
  stop_at_loss: 0.2
  batch_size: 16
  optimizer: {{lr: 3.0e-3}}
"""
    )
    status, output = run("sft", "--config", tmp_path / "recipe.yaml")
    assert status == 0, output
    assert "of 200 conversations: 200 conversations in which the chat template changes earlier turns" in output
    record = json.loads((tmp_path / "sft" / "sft_training.json").read_text())
    # A digit that counted would cost log(10) = 2.3 nats.
    assert record["num_sequences"] == 400 and record["history"][-1]["train/loss"] <= 0.2, output
    (stopped,) = re.findall(r"sft: stopped after (\d+) of 400 steps: the mean loss of the last 10 is 0.[12]\d*, at most sft.stop_at_loss=0.2", output)
    assert record["history"][-1]["step"] == int(stopped) < 100 and f"sft step {stopped}/400" in output


def train(task, name, num_steps, **settings):  # noqa: F811
    values = {
        "policy.path": task / "task" / "model",
        "dpo.output_path": task / name,
        "dpo.train_files": f"[{task}/task/preferences.train.jsonl]",
        "dpo.eval_files": f"[{task}/task/preferences.held_out.jsonl]",
        "dpo.num_steps": num_steps,
        **settings,
    }
    status, output = run("dpo", "--config", RECIPE, *(f"{key}={value}" for key, value in values.items()))
    assert status == 0, output
    return json.loads((task / name / "dpo_training.json").read_text()), output


def test_dpo_raises_the_accuracy_on_held_out_preferences(task):  # noqa: F811
    record, output = train(task, "dpo", 30)
    first, last = record["history"][0], record["history"][-1]
    # The policy is its own reference before the first update.
    assert first["eval/loss"] == pytest.approx(0.6931, abs=1e-4) and first["eval/margin"] == pytest.approx(0.0, abs=1e-4)
    assert last["eval/accuracy"] > 0.9 and last["eval/margin"] > 1.0
    assert "dpo step 30 held out: loss" in output and record["beta"] == 0.1
    assert list((task / "dpo").glob("*.safetensors"))


def test_dpo_does_not_depend_on_layout_or_packing(task):  # noqa: F811
    settings = {"dpo.eval_files": "[]", "dpo.loss": "ipo", "dpo.length_normalized": "true", "dpo.label_smoothing": 0.1}
    one, _ = train(task, "two_ranks", 3, **settings)
    two, _ = train(task, "one_rank", 3, **settings, **{"parallel.num_ranks": 1, "batch.max_tokens_per_microbatch": 64})
    for first, second in zip(one["history"], two["history"], strict=True):
        assert second["train/loss"] == pytest.approx(first["train/loss"], rel=1e-3, abs=1e-4)
        assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-2)
