"""Commands on pages do their work in a reader's folder: a small model, prompts, a finished run; no GPU and no server.

Commands that would train or start servers are dry-run. A command that is neither run nor dry-run is in ELSEWHERE or in
NOT_RUN with its reason, so a new kind of command cannot be overlooked.
"""

import gzip
import itertools
import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from megatron_rl.cli import main
from megatron_rl.config.load import config_to_yaml, load_config
from megatron_rl.tracking.metrics_file import MetricsWriter
from megatron_rl.tracking.samples_file import write_samples
from tests.tiny_models import make_tiny_model
from tests.unit.desk.simulate.made_runs import make_config, make_run
from tests.unit.desk.watch.stored_samples import columns_of
from tests.unit.docs.fences import ROOT, Code, fences
from tests.unit.docs.test_doc_commands import COMMAND_PAGES, READERS, STAND_INS, called, fake_root, is_placeholder

SHORTER = {
    **{command: ["--dry-run"] for command in ("train", "sft", "dpo", "reward-train", "label-lines", "evaluate")},
    "simulate": ["--steps", "3"],
    "watch": ["--once"],
}
"""Options that commands get for the sake of time, or because they would train."""
NOT_RUN = {
    "megatron-rl check": "trains; tests/integration/test_check.py",
    "megatron-rl doctor": "starts ranks; tests/integration/test_mismatch.py, test_hang.py and test_layouts.py",
    "megatron-rl serve": "starts servers; tests/integration/test_rollout_server.py",
    "megatron-rl score --reward genrm": "needs a judge; tests/unit/rewards/judges",
    "megatron-rl convert": "tests/integration/test_models.py",
    "megatron-rl plan --model": "seconds each; tests/unit/commands/test_plan.py and tests/unit/examples/test_model_recipes.py",
    "megatron-rl examples": "tests/integration/test_wheel.py",
    "megatron-rl --version": "tests/unit/commands/test_cli.py",
    "megatron-rl reward-train --config examples/reward_models/process.yaml reward_train.train_files": "reads what label-lines makes",
    "megatron-rl dpo --config examples/reward_models/dpo.yaml": "reads the example's pairs; tests/integration/test_supervised.py",
    "megatron-rl critic-pretrain --config examples/models": "reads the papers' data; tests/unit/examples/test_model_recipes.py",
    "python launch": "compiles",
    "python examples/effects/effects.py run": "hours of training; tests/unit/examples/test_effects.py",
    "python tools/release.py": "changes the repository; tests/unit/tools/test_release.py",
    "python tools/gpu_validate.py": "tests/unit/tools/test_gpu_validate.py",
}
"""Commands that are only parsed, by test_doc_commands.py, with the reason."""
ELSEWHERE = ("docs/tutorial.md", "CONTRIBUTING.md")
"""Pages that tests/integration/test_tutorial.py runs, or whose commands are the developer's."""
READERS_NAMES = (
    (r"(?<!\S)(policy\.path=)?(/models/\S+|MODEL|FOLDER)$", r"\1model"),
    (r"\bNAME$", "math"),
    (r"/(shared|data)/", r"\1/"),
)
"""Names that a page leaves to the reader, and those in the reader's folder here."""
LEFT_OUT = ("rollout.urls=", "parallel.num_ranks=")
"""Servers on other machines, and a number that readers leave out."""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PROMPT = {"id": "a", "prompt": "1+1=", "question": "1+1?", "answer": "1+1=2\n#### 2"}
RESPONSE = {"id": "a", "prompt": "1+1=", "response": "2", "answer": "2"}
HUMAN_EVAL = {
    "task_id": "a/1",
    "prompt": "def f(x):\n",
    "canonical_solution": "    return x\n",
    "entry_point": "f",
    "test": "def check(candidate):\n    assert candidate(1) == 1\n",
}


def write_rows(path: Path, *rows: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_run(folder: Path) -> Path:
    """A finished run with everything that commands read of it."""
    config = make_config(num_prompts=8)
    config.batch.max_response_tokens = 16384
    make_run(folder, config, num_steps=12)
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        for step in range(1, 9):
            writer.log(step, {"reward/mean": 0.1 * step, "step/time_s": 1.0, "eval/accuracy": 0.5})
            columns = columns_of(step)
            columns["id"][0] = 131  # the response that docs/samples.md shows
            write_samples(folder, step, columns)
    return folder


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """The reader's folder: the repository, a model, prompts, and a run under every name that pages give to runs."""
    folder = fake_root(tmp_path_factory.mktemp("reader"))
    make_tiny_model(folder / "model", num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=32768)
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    for name in ("train.jsonl", "eval.jsonl", "data/train.jsonl", "data/eval.jsonl", "prompts.jsonl"):
        write_rows(folder / name, PROMPT)
    write_rows(folder / "HumanEval.jsonl.gz", HUMAN_EVAL)
    write_rows(folder / "responses.jsonl", RESPONSE)
    write_rows(folder / "scored.jsonl", {**RESPONSE, "score": 0.0}, {**RESPONSE, "score": 1.0})
    write_rows(folder / "shared/urls/one.urls")
    run = write_run(folder / "outputs" / "run")
    for name in ("a", "b", "c", "my_run", "arithmetic/tppo"):
        (folder / "outputs" / name).parent.mkdir(exist_ok=True)
        shutil.copytree(run, folder / "outputs" / name)
    costs = next(code.text for code in fences(ROOT / "docs" / "simulate.md") if code.text.startswith("decode:"))
    (folder / "costs.yaml").write_text(costs)
    return folder


def readers_words(words: list[str], folder: Path) -> list[str]:
    """The words of a ``megatron-rl`` command with the reader's names, and with --dry-run if it would train."""
    named = []
    for word in words:
        for pattern, name in READERS_NAMES:
            word = re.sub(pattern, name, word)
        named.append(word)
    command = words[0]
    if READERS in named:
        recipe = folder / f"recipe-{command}.yaml"
        own = ["policy.path=model", "parallel.num_ranks=8", "run.output_dir=outputs/new", "data.train_files=[train.jsonl]"]
        own += ["data.eval_files=[]", "eval.every_steps=0"]
        recipe.write_text(config_to_yaml(load_config(ROOT / STAND_INS.get(command, STAND_INS[""]), own)))
        named = [str(recipe) if word == READERS else word for word in named]
    named = [word for word in named if not word.startswith(LEFT_OUT)]
    recipes = [word for before, word in itertools.pairwise(named) if before == "--config"]
    path = load_config(recipes, [word for word in named if "=" in word]).policy.path if recipes else ""
    if path.startswith("/models/"):
        named.append("policy.path=model")
    elif path and not any(Path(path).glob("*.safetensors")):  # what a dry run of `sft` has left without weights
        named.append("policy.init=random")
    return [*named, *SHORTER.get(command, ())] if "--dry-run" not in named else named


def run(
    call: list[str], code: Code, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run a call in this process, in the reader's folder; AssertionError if it fails.

    A run with the reader's own model must also name the key if the model's folder is mistyped.
    """
    program, *words = [word for word in call if not is_placeholder(word)]
    if program == "sbatch":
        program, words = "megatron-rl", words[next(n for n, word in enumerate(words) if word.endswith(".sbatch")) + 1 :]
    elif program == "bash" and words[0] == "launch/torchrun.sh":
        program, words = "megatron-rl", words[1:]
    if program not in ("megatron-rl", "python") or f"{program} {' '.join(words)}".startswith(tuple(NOT_RUN)):
        return
    if program == "megatron-rl":
        words = readers_words(words, folder)
        status = main(words)
        if words[0] == "sft":  # a later command of the page reads the model that this one would make
            config = load_config(words[words.index("--config") + 1], [word for word in words if "=" in word])
            shutil.copytree(config.policy.path, config.sft.output_path)
        elif words[0] == "train" and "policy.path=model" in words:
            assert main([word.replace("=model", "=nowhere") for word in words]) == 2
            assert "policy.path: nowhere has no config.json" in capsys.readouterr().err
    else:
        monkeypatch.setattr(sys, "argv", words)
        try:
            runpy.run_path(words[0], run_name="__main__")
            status = 0
        except SystemExit as ended:
            status = ended.code or 0
    assert status == 0, f"{code}: {program} {' '.join(words)}"


PAGES = [
    page
    for page in COMMAND_PAGES
    if str(page.relative_to(ROOT)) not in ELSEWHERE and any(code.language == "bash" for code in fences(page))
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_on_a_page_do_their_work_for_a_reader(page, reader, monkeypatch, capsys):
    monkeypatch.chdir(reader)
    monkeypatch.setenv("SGLANG_KEY", "key")
    for code in fences(page):
        if code.language == "bash":
            for call in called(reader, code.text):
                run(call, code, reader, monkeypatch, capsys)


def test_commands_that_are_not_run_still_appear_on_pages():
    blocks = [code.text for page in COMMAND_PAGES for code in fences(page) if code.language == "bash"]
    text = re.sub(r"\s*\\\n\s*", " ", "\n".join(blocks))
    assert [start for start in NOT_RUN if start not in text] == []
