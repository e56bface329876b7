"""Laws of megatron_rl/rewards/registry.py: imports, names and checked options of rewards."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.rewards import registry, rules
from megatron_rl.rewards.registry import RewardError, check_options, resolve
from megatron_rl.rewards.rules.code import CodeOptions
from megatron_rl.rewards.rules.format import score

NEW_REWARD = """
from megatron_rl.rewards import Score, register

@register("even", range=(0.0, 1.0), answer_required=False)
def score(response, answer):
    return Score(float(len(response) % 2 == 0))
"""


def modules_after(code: str) -> set[str]:
    """Modules of the package that a fresh interpreter has imported after ``code``."""
    code += "\nimport sys; print(*(name for name in sys.modules if name.startswith('megatron_rl.')))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_new_reward_needs_only_a_file_in_a_reward_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "even_length.py").write_text(NEW_REWARD)
    monkeypatch.setattr(rules, "__path__", [*rules.__path__, str(tmp_path)])
    monkeypatch.setattr(registry._registry, "_packages", [rules.__name__])
    try:
        assert "even" in registry.available()
        assert resolve("even").function("ab", "").value == 1.0
        assert resolve(f"{rules.__name__}.even_length:score") is resolve("even")
    finally:
        del registry._registry._by_name["even"]


def test_worker_imports_only_its_own_reward() -> None:
    found = modules_after(
        "from megatron_rl.rewards.registry import resolve\nresolve('megatron_rl.rewards.rules.regex:score')"
    )
    rooms = ("megatron_rl.rewards.rules.", "megatron_rl.rewards.judges.", "megatron_rl.graders.")
    assert {name for name in found if name.startswith(rooms)} == {"megatron_rl.rewards.rules.regex"}


def test_the_sandbox_imports_nothing_of_the_trainer() -> None:
    found = modules_after("import megatron_rl.graders.sandbox.supervisor")
    assert {name for name in found if not name.startswith(("megatron_rl.graders.sandbox", "megatron_rl.graders.analysis"))} <= {
        "megatron_rl.graders",
        "megatron_rl.cpu",
        "megatron_rl.cpu.import_hook",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time_limit": 1.0}, "no option 'time_limit'; its options: .*time_limit_s.*did you mean 'time_limit_s'"),
        ({"process_limit": 1.5}, "option process_limit must be an integer, got 1.5"),
        ({"partial_credit": 1}, "option partial_credit must be true or false, got 1"),
        ({"response": "x"}, "response is set by the caller"),
    ],
)
def test_dataclass_options_are_checked_like_other_options(options: dict, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        check_options(resolve("code"), options)


def test_dataclass_options_are_passed_as_one_value() -> None:
    reward = resolve("code")
    assert reward.arguments({"disk_limit_mb": 3, "setup": "x = 1"}) == {
        "setup": "x = 1",
        "options": CodeOptions(disk_limit_mb=3),
    }


def test_a_registered_reward_is_found_by_name_and_by_path() -> None:
    by_name = registry.resolve("format")
    assert registry.resolve(by_name.path) is by_name
    assert by_name.path == "megatron_rl.rewards.rules.format:score"


def test_reward_name_can_be_registered_only_once() -> None:
    with pytest.raises(registry.RewardError, match="is megatron_rl.rewards.rules.math:score already"):
        registry.register("math")(score)
    assert registry.resolve("math").function.__module__ == "megatron_rl.rewards.rules.math"


def test_reward_that_workers_cannot_import_is_rejected() -> None:
    def local(response: str, answer: str) -> float:
        return 0.0

    registry.check_function(registry.resolve("math"))
    with pytest.raises(registry.RewardError, match="cannot import"):
        registry.check_function(registry.Reward("local", local))
