"""Laws of examples/long_tail: right chains, the tail that was asked for, one right response, exact accuracies."""

import importlib.util
import itertools
import json
import math
import random
import re
import sys
from pathlib import Path

import pytest
import torch

from megatron_rl.config.load import flat_params, load_config

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "long_tail"
NAMES = ("train", "sft", "eval")


def load_script(name):
    spec = importlib.util.spec_from_file_location(f"long_tail_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


make_task = load_script("make_task")


def run(output, *arguments):
    sizes = ("--num-train", "300", "--num-sft", "300", "--num-eval", "200")
    return make_task.main(["--output", str(output), *sizes, *arguments])


def rows_of(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def numbers(text):
    """The numbers of a text, each from its units up; one below zero counts as its digits say, less 1,000."""
    found = []
    for digits in re.findall(r" (\d(?:[+']\d0+)*(?:<0)?)", text):
        tokens = re.split("[+']", digits.removesuffix("<0"))
        assert [len(token) for token in tokens] == list(range(1, len(tokens) + 1))
        value = sum(int(token) for token in tokens)
        found.append(value - 1000 if digits.endswith("<0") else value)
    return found


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    output = tmp_path_factory.mktemp("long_tail") / "task"
    assert run(output) == 0
    return output


@pytest.mark.parametrize("name", ["train", "eval"])
def test_chains_take_the_divisor_away_until_they_fall_below_zero(task, name):
    for row in rows_of(task, name):
        dividend, divisor = numbers(row["prompt"])
        expected = [dividend]
        while expected[-1] >= 0:
            expected.append(expected[-1] - divisor)
        assert numbers(row["response"]) == expected[1:]
        assert len(expected) - 2 == dividend // divisor
        marks = re.findall(r" \d([+'])", row["response"])
        borrows = [left % 10 < divisor % 10 for left in expected[:-1]]
        assert [mark == "'" for mark in marks] == borrows


def test_careless_solutions_forget_the_share_of_borrowed_tens_that_was_asked_for(tmp_path):
    quotients = make_task.Quotients(1.15, 3, 180)
    forgotten = borrowed = 0
    for row in make_task.rows("sft", 2000, quotients, 0.3, 1):
        dividend, divisor = numbers(row["prompt"])
        chain = [dividend, *numbers(row["response"])]
        for before, after in itertools.pairwise(chain):
            borrows = before % 10 < divisor % 10
            assert before - after in ((divisor, divisor - 10) if borrows else (divisor,))
            borrowed += borrows
            forgotten += before - after != divisor
    assert forgotten / borrowed == pytest.approx(0.3, abs=0.02)
    careful = list(make_task.rows("sft", 300, quotients, 0.0, 1))
    assert all(re.fullmatch(row["answer"], row["response"]) for row in careful)


@pytest.mark.parametrize("tail", [0.8, 1.15, 2.0])
def test_quotients_have_the_tail_that_was_asked_for(tail):
    """Against the distribution function, at the numbers in between: the share of quotients of at least q."""
    quotients, generator = make_task.Quotients(tail, 3, 180), random.Random(7)
    drawn = [quotients.draw(generator) for _ in range(20000)]
    assert min(drawn) == 3 and max(drawn) <= 180
    rest = (3 / 181) ** tail
    for q in (4, 6, 12, 30, 100):
        expected = ((3 / q) ** tail - rest) / (1 - rest)
        share = sum(number >= q for number in drawn) / len(drawn)
        assert share == pytest.approx(expected, abs=4 * math.sqrt(expected / len(drawn)))


def test_both_sides_have_the_same_quotients_and_no_prompt_in_common(task):
    prompts = {name: {row["prompt"] for row in rows_of(task, name)} for name in NAMES}
    assert not prompts["eval"] & (prompts["train"] | prompts["sft"])
    quotients = make_task.Quotients(1.15, 3, 180)
    means = [
        sum(math.log(len(numbers(row["response"]))) for row in make_task.rows(name, 3000, quotients, 0.3, 1)) / 3000
        for name in ("train", "eval")
    ]
    assert means[0] == pytest.approx(means[1], abs=0.06)


def test_the_reward_takes_the_right_chain_alone(task):
    from megatron_rl.rewards.rules.regex import score

    options = load_config(FOLDER / "tppo.yaml").reward.options
    for row in rows_of(task, "eval")[:50]:
        right = row["response"]
        assert score(right, row["answer"], **options).value == 1.0
        steps = right.split(" ")
        for wrong in (right + steps[-1], " ".join(steps[:-1]), right.replace("<0", "+0000"), " ".join(steps[:1] + steps[2:])):
            assert score(wrong, row["answer"], **options).value == 0.0


def test_the_same_arguments_write_the_same_bytes_and_another_seed_or_tail_others(task, tmp_path):
    assert run(tmp_path / "again") == run(tmp_path / "seed", "--seed", "2") == run(tmp_path / "tail", "--tail", "2") == 0
    files = [path.relative_to(task) for path in sorted(task.rglob("*")) if path.is_file()]
    assert len(files) == 6
    for file in files:
        assert (tmp_path / "again" / file).read_bytes() == (task / file).read_bytes(), file
        for other in ("seed", "tail"):
            same = (tmp_path / other / file).read_bytes() == (task / file).read_bytes()
            assert same == (file.parts[0] == "model"), file


def test_every_text_is_known_to_the_tokenizer_and_fits_into_the_recipes(task):
    from megatron_rl.data.tokenizer import Tokenizer

    tokenizer = Tokenizer(task / "model")
    batch = load_config(FOLDER / "tppo.yaml").batch
    assert batch.max_prompt_tokens + batch.max_response_tokens <= make_task.MAX_TOKENS
    longest = make_task.Problem(400 * 24 + 23, 24).response
    assert len(tokenizer.encode(longest)) + 1 == 5 * 401 + 1 <= batch.max_response_tokens
    for row in rows_of(task, "sft"):
        prompt_ids, response_ids = tokenizer.encode(row["prompt"]), tokenizer.encode(row["response"])
        assert (len(prompt_ids), len(response_ids)) == (11, 5 * row["response"].count(" "))
        assert make_task.vocabulary().index("<unk>") not in prompt_ids + response_ids
        assert tokenizer.decode(prompt_ids) == row["prompt"] and tokenizer.decode(response_ids) == row["response"]


def test_the_recipes_differ_in_what_makes_a_window_and_what_their_search_found():
    one, two = (flat_params(load_config(FOLDER / f"{mode}.yaml")) for mode in ("tppo", "ppo"))
    differing = {key for key in one if one[key] != two[key] and not key.startswith(("sft.", "critic_pretrain."))}
    searched = {"batch.num_prompts_per_step", "batch.policy_minibatch_size", "batch.critic_minibatch_size"}
    assert differing - searched <= {
        "preset", "run.output_dir", "run.num_steps", "schedule.mode", "batch.window_tokens", "batch.window_jitter_tokens",
        "algorithm.ignore_boundary_tokens", "policy.optimizer.lr", "critic.optimizer.lr",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tail", "0"), "a tail above 0"),
        (("--min-quotient", "0"), "1 <= min-quotient"),
        (("--max-quotient", "421"), "max-quotient <= 420"),
        (("--min-quotient", "9", "--max-quotient", "4"), "min-quotient 9 and max-quotient 4"),
    ],
)
def test_impossible_arguments_are_refused_and_nothing_is_written(tmp_path, capsys, arguments, message):
    assert run(tmp_path / "task", *arguments) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_accuracies_are_those_of_sampling_each_token(task):
    """Against the product of next-token probabilities, one prefix at a time, of a random model."""
    evaluate = load_script("evaluate")
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(task / "model")).eval()
    examples = sorted(evaluate.read_examples(task, 40), key=lambda example: len(example[0]))[:3]
    for (tokens, start), found in zip(examples, evaluate.probabilities(model, examples), strict=True):
        assert tokens[-1] == 1
        expected = 1.0
        for place in range(start, len(tokens)):
            expected *= model(torch.tensor([tokens[:place]])).logits[0, -1].softmax(-1)[tokens[place]].item()
        assert found == pytest.approx(expected, rel=1e-3)
