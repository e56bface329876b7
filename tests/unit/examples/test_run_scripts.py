"""Laws of the examples' run.sh: every command that a script runs is one that the program accepts."""

import json
import os
import subprocess
import sys
from itertools import pairwise

import pytest

from megatron_rl.config.checks import check_config
from megatron_rl.config.load import load_config
from megatron_rl.errors import ConfigError
from tests.unit.examples.test_examples import ROOT

ARMS = (ROOT / "examples" / "long_tail" / "arms.txt").read_text().splitlines()
NUM_ARMS = sum(bool(line.strip()) and not line.startswith("#") for line in ARMS)
SCRIPTS = {
    "agents/repair/run.sh": 1 + 1,
    "arithmetic/warm_start.sh outputs/arithmetic": 2,
    "fire/run.sh": 1 + 3,
    "line_rewards/run.sh": 1 + 2 + 1 + 4,
    "long_tail/compare.sh --seeds 1 2 --minutes 0.5 --tail 1.5": 2 + 2 * NUM_ARMS,
    "prompt_selection/run.sh": 1 + 2 + 4,
    "recipes/run.sh all": 2 + len(list((ROOT / "examples" / "recipes").glob("*.yaml"))) - 1,
}
"""A script with its arguments -> how many commands with a recipe it runs for one seed."""
STUB = f"#!{sys.executable}\nimport json, sys\nopen('commands.jsonl', 'a').write(json.dumps(sys.argv[1:]) + '\\n')\n"


def commands_of(script, folder, *, seeds="1"):
    """The arguments of each `megatron-rl` that the script calls, with every program replaced by one that notes them."""
    (folder / "examples").symlink_to(ROOT / "examples")
    for name, text in (("megatron-rl", STUB), ("python", "#!/bin/sh\n")):
        program = folder / ".venv" / "bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
    name, *arguments = script.split()
    environment = {**os.environ, "SEEDS": seeds}
    subprocess.run(["bash", folder / "examples" / name, *arguments], cwd=folder, env=environment, check=True, timeout=60)
    return [json.loads(line) for line in (folder / "commands.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("script", "number"), SCRIPTS.items())
def test_a_script_runs_commands_that_lack_nothing_but_their_files(script, number, tmp_path, monkeypatch):
    commands = commands_of(script, tmp_path)
    assert len(commands) == number
    monkeypatch.chdir(tmp_path)
    for command, *arguments in commands:
        recipes = [path for flag, path in pairwise(arguments) if flag == "--config"]
        overrides = [one for one in arguments if "=" in one]
        assert len(arguments) == 2 * len(recipes) + len(overrides) and recipes
        config = load_config(recipes, overrides)
        with pytest.raises(ConfigError) as error:
            check_config(config, command=command, world_size=config.parallel.num_ranks or 1)
        for problem in str(error.value).splitlines():
            assert "does not exist" in problem or "config.json" in problem, (command, overrides, problem)


def test_every_arm_trains_once_per_seed_in_a_folder_of_its_own(tmp_path):
    commands = commands_of("fire/run.sh", tmp_path, seeds="1 2 3")
    trained = [arguments for command, *arguments in commands if command == "train"]
    folders = [next(one for one in arguments if one.startswith("run.output_dir=")) for arguments in trained]
    assert len(set(folders)) == len(folders) == 3 * 3
    for folder, arguments in zip(folders, trained, strict=True):
        assert f"run.seed={folder[-1]}" in arguments
