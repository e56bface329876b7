"""`megatron-rl config` explains sections and keys, and docs/configuration.md is what it prints."""

from pathlib import Path

import pytest

from megatron_rl.cli import main
from megatron_rl.commands.config import markdown
from megatron_rl.config.keys import sections

DOCUMENT = Path(__file__).parents[3] / "docs" / "configuration.md"


def shown(capsys, *words: str) -> str:
    assert main(["config", *words]) == 0
    return capsys.readouterr().out


def test_the_document_is_the_schemas():
    remedy = "docs/configuration.md is stale; run: megatron-rl config --markdown > docs/configuration.md"
    assert DOCUMENT.read_text() == markdown(), remedy


def test_the_markdown_option_prints_the_document(capsys):
    assert shown(capsys, "--markdown") == markdown()


def test_the_document_shows_every_key_of_every_kind_of_section():
    text = markdown()
    for section in sections():
        assert section.meaning in text
        assert all(f"| `{key.name.rsplit('.', 1)[-1]}` |" in text for key in section.keys)


def test_links_of_the_document_lead_to_its_headings():
    headings = {line.strip("#` ") for line in markdown().splitlines() if line.startswith("##")}
    assert {section.name for section in sections() if section.name} <= headings


def test_without_a_name_every_key_is_printed_in_full(capsys):
    text = shown(capsys)
    for section in sections():
        assert all(f"{key.name} " in text for key in section.keys)


def test_a_section_prints_its_keys_and_those_inside_it(capsys):
    text = shown(capsys, "rollout")
    assert "rollout.num_servers" in text and "rollout.fire.top_k" in text and "batch.window_tokens" not in text


def test_a_key_prints_type_default_bound_and_choices(capsys):
    text = shown(capsys, "rollout.fire.top_k")
    assert "int" in text and "16" in text and "-1 (off) or 1 to 4096" in text and "temperature" not in text
    text = shown(capsys, "schedule.mode")
    assert "tppo" in text and "sync: Full responses" in text


@pytest.mark.parametrize(("name", "meant"), [("window_tokens", "batch.window_tokens"), ("rollout.fyre", "rollout.fire")])
def test_an_unknown_name_is_an_error_with_near_misses(capsys, name, meant):
    assert main(["config", name]) == 2
    error = capsys.readouterr().err
    assert repr(name) in error and meant in error


def test_a_name_like_no_other_is_told_where_to_look(capsys):
    assert main(["config", "qqqq"]) == 2
    assert "lists all of them" in capsys.readouterr().err
