"""`megatron-rl config` explains sections and keys; docs/configuration.md is its output."""

from pathlib import Path

import pytest

from megatron_rl.cli import main
from megatron_rl.commands.config import markdown
from megatron_rl.config.keys import sections

DOCUMENT = Path(__file__).parents[3] / "docs" / "configuration.md"


def shown(capsys, *words: str) -> str:
    assert main(["config", *words]) == 0
    return capsys.readouterr().out


def test_configuration_page_matches_the_schema():
    remedy = "docs/configuration.md is stale; run: megatron-rl config --markdown > docs/configuration.md"
    assert DOCUMENT.read_text() == markdown(), remedy


def test_markdown_option_prints_the_configuration_page(capsys):
    assert shown(capsys, "--markdown") == markdown()


def test_configuration_page_has_every_key_and_section():
    text = markdown()
    for section in sections():
        assert section.meaning in text
        assert all(f"| `{key.name.rsplit('.', 1)[-1]}` |" in text for key in section.keys)


def test_links_of_the_configuration_page_match_its_headings():
    headings = {line.strip("#` ") for line in markdown().splitlines() if line.startswith("##")}
    assert {section.name for section in sections() if section.name} <= headings


def test_config_without_a_name_prints_every_key(capsys):
    text = shown(capsys)
    for section in sections():
        assert all(f"{key.name} " in text for key in section.keys)


def test_config_of_a_section_prints_its_keys_and_subsections(capsys):
    text = shown(capsys, "rollout")
    assert "rollout.num_servers" in text and "rollout.fire.top_k" in text and "batch.window_tokens" not in text


def test_config_of_a_key_prints_type_default_bound_and_choices(capsys):
    text = shown(capsys, "rollout.fire.top_k")
    assert "int" in text and "16" in text and "-1 (off) or 1 to 4096" in text and "temperature" not in text
    text = shown(capsys, "schedule.mode")
    assert "tppo" in text and "sync: Full responses" in text


@pytest.mark.parametrize(("name", "meant"), [("window_tokens", "batch.window_tokens"), ("rollout.fyre", "rollout.fire")])
def test_config_rejects_an_unknown_name_with_near_misses(capsys, name, meant):
    assert main(["config", name]) == 2
    error = capsys.readouterr().err
    assert repr(name) in error and meant in error


def test_config_rejects_a_name_without_near_misses_with_a_hint(capsys):
    assert main(["config", "qqqq"]) == 2
    assert "lists all of them" in capsys.readouterr().err
