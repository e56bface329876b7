"""Laws of the examples' make_task.py: what recipes and scripts name is written, readable, disjoint, and the same each time."""

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.config.derived import eval_sets
from megatron_rl.config.load import load_config
from megatron_rl.config.schema.commands import RL_COMMANDS
from megatron_rl.data.conversation_rows import check_supervised_files
from megatron_rl.data.preferences import check_reward_files
from megatron_rl.data.prompts import check_files, read_content
from megatron_rl.data.row_files import read_rows
from megatron_rl.data.trajectory import Prompt
from megatron_rl.rewards.judges.pairwise import check_prompts
from tests.unit.examples.test_examples import ROOT, command_of

TEXT_EXAMPLES = ("agents/repair", "calculator", "fire", "line_rewards", "pag", "pairwise_ppo", "prompt_selection", "reward_models")
EXAMPLES = (*TEXT_EXAMPLES, "seed_vl_hybrid")
"""The last has pictures: its own laws are in test_visual_puzzles.py."""
SIZES = {
    "agents/repair": ["--num-train", "300", "--num-sft", "300", "--num-held-out", "50"],
    "fire": ["--num-train", "300", "--num-sft", "300", "--num-held-out", "100"],
    "line_rewards": ["--num-train", "300", "--num-sft", "300", "--num-held-out", "100", "--num-label", "80"],
    "pairwise_ppo": ["--num-train", "300", "--num-held-out", "100"],
    "prompt_selection": ["--num-pool", "300", "--num-sft", "300", "--num-held-out", "50"],
    "reward_models": ["--num-train", "300", "--num-held-out", "100"],
    "seed_vl_hybrid": ["--num-train", "20", "--num-held-out", "10", "--num-judgements", "20"],
}
RECIPES = [path for name in EXAMPLES for path in sorted((ROOT / "examples" / name).glob("*.yaml"))]


def make_task(name, output, *arguments):
    spec = importlib.util.spec_from_file_location(f"{name}_task", ROOT / "examples" / name / "make_task.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(["--output", str(output), *SIZES.get(name, []), *arguments]) == 0
    return module


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder as the repository's root is after every make_task.py has run."""
    root = tmp_path_factory.mktemp("examples")
    for name in EXAMPLES:
        make_task(name, root / "outputs" / name / "task")
    return root


def eval_files(config):
    return [file for one in eval_sets(config).values() for file in one.files]


def files_of(config):
    return [
        *config.data.train_files, *config.sft.train_files, *config.reward_train.train_files,
        *config.reward_train.eval_files, *config.dpo.train_files, *config.dpo.eval_files,
        *filter(None, [config.label_lines.input_path]), *eval_files(config),
    ]  # fmt: skip


def rows_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_files_named_by_a_recipe_are_written_and_readable(recipe, tasks, monkeypatch):
    monkeypatch.chdir(tasks)
    config, command = load_config(recipe), command_of(recipe)
    files = files_of(config)
    of_task = {name for name in files if "/task/" in name}
    """What is named outside of it, a command of run.sh writes."""
    assert files and [name for name in of_task if not Path(name).is_file()] == []
    assert of_task == set(files) or (recipe.parent / "run.sh").is_file()
    if command in RL_COMMANDS:
        for named in (config.data.train_files, eval_files(config)):
            if set(named) <= of_task:
                assert check_files(named, config.data)
    if command in ("reward-train", "dpo") and of_task == set(files):
        check_reward_files(config, command)
    if config.sft.output_path:
        assert check_supervised_files(config.sft.train_files or config.data.train_files, config.data)


@pytest.mark.parametrize("name", EXAMPLES)
def test_files_named_by_scripts_and_readme_are_written(name, tasks):
    folder = ROOT / "examples" / name
    texts = [path.read_text() for path in (*folder.glob("*.sh"), folder / "README.md", *folder.glob("*.yaml"))]
    named = {found for text in texts for found in re.findall(rf"(?:\$O|outputs/{name})/(task/[\w./]*\w)(?!\w|\.?\$)", text)}
    assert "task/model" in named
    assert [path for path in sorted(named) if not (tasks / "outputs" / name / path).exists()] == []


@pytest.mark.parametrize("name", TEXT_EXAMPLES)
def test_the_same_arguments_write_the_same_bytes_and_another_seed_others(name, tasks, tmp_path):
    task = tasks / "outputs" / name / "task"
    make_task(name, tmp_path / "again")
    make_task(name, tmp_path / "other", "--seed", "2")
    files = sorted(path.relative_to(task) for path in task.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(tmp_path / "again") for path in (tmp_path / "again").rglob("*.*"))
    for file in files:
        assert (tmp_path / "again" / file).read_bytes() == (task / file).read_bytes(), file
        same = (tmp_path / "other" / file).read_bytes() == (task / file).read_bytes()
        assert same == (file.parts[0] == "model"), file


@pytest.mark.parametrize("name", TEXT_EXAMPLES)
def test_every_text_is_known_to_the_tokenizer_and_decodes_to_itself(name, tasks):
    from tokenizers import Tokenizer

    task = tasks / "outputs" / name / "task"
    tokenizer = Tokenizer.from_file(str(task / "model" / "tokenizer.json"))
    size = json.loads((task / "model" / "config.json").read_text())["vocab_size"]
    assert tokenizer.get_vocab_size() <= size
    for file in task.glob("*.jsonl"):
        for row in rows_of(file)[:100]:
            for field in {"prompt", "response", "chosen", "rejected", "anchor"} & row.keys():
                text = row[field].replace("<eos>", "")
                ids = tokenizer.encode(text, add_special_tokens=False).ids
                assert tokenizer.token_to_id("<unk>") not in ids and tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", TEXT_EXAMPLES)
def test_no_held_out_prompt_is_trained_on(name, tasks):
    """The programs of reward_models all have the same prompt; the repositories of an agent are files beside its prompt."""
    rows = {file.name: rows_of(file) for file in (tasks / "outputs" / name / "task").glob("*.jsonl")}
    prompts = {file: {row.get("files") or row["prompt"] for row in found} for file, found in rows.items() if "line_labels" not in found[0]}
    held_out = {file for file in prompts if "held_out" in file or file == "eval.jsonl"}
    trained = prompts.keys() - held_out
    assert held_out and trained
    assert not set().union(*(prompts[f] for f in held_out)) & set().union(*(prompts[f] for f in trained))


def test_judged_prompts_have_one_anchor_that_is_a_near_miss(tasks, monkeypatch):
    monkeypatch.chdir(tasks)
    config = load_config(ROOT / "examples" / "pairwise_ppo" / "pairwise_ppo.yaml")
    fields = replace(config.data, reward_fields=["anchor"])
    for file in (*config.data.train_files, *config.data.eval_files):
        contents = [read_content(row, place, fields) for row, place in read_rows([file])]
        prompts = [Prompt(c.id, (), c.text, c.answer, c.place, fields=c.fields) for c in contents]
        assert check_prompts(prompts, {}) == []
        for row in rows_of(file):
            assert row["answer"] == "".join(sorted(row["prompt"].rstrip(":")))
            assert row["anchor"] != row["answer"] and sorted(row["anchor"]) == sorted(row["answer"])


def test_preferences_of_the_judge_name_the_sorted_digits(tasks):
    for side in ("train", "held_out"):
        for row in rows_of(tasks / "outputs" / "pairwise_ppo" / "task" / f"preferences.{side}.jsonl"):
            assert row["chosen"] == "".join(sorted(row["prompt"].rstrip(":"))) != row["rejected"]
