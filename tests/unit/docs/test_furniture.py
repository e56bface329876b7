"""What stands next to the code agrees with it: licence, version, citation, changelog, package data."""

import hashlib
import re
import tomllib
from pathlib import Path

import yaml

import megatron_rl
from megatron_rl.config.load import preset_names

ROOT = Path(__file__).resolve().parents[3]
METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = METADATA["project"]
VERSION = PROJECT["version"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_the_licence_is_the_text_that_the_metadata_name():
    """The digest of https://www.apache.org/licenses/LICENSE-2.0.txt."""
    digest = hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    assert PROJECT["license"] == "Apache-2.0" and PROJECT["license-files"] == ["LICENSE"]


def test_the_citation_has_what_its_format_asks_for_and_the_current_version():
    assert CITATION["cff-version"] == "1.2.0" and {"message", "title", "authors"} <= CITATION.keys()
    assert CITATION["version"] == VERSION == megatron_rl.__version__ and CITATION["license"] == "Apache-2.0"
    assert PROJECT["authors"] == CITATION["authors"] and PROJECT["keywords"] == CITATION["keywords"]
    for reference in CITATION["references"]:
        assert {"type", "title", "authors"} <= reference.keys()


def test_the_citation_counts_the_presets():
    assert f"T-PPO and {len(preset_names()) - 1} other presets" in CITATION["abstract"]


def test_the_changelog_has_the_current_version():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"\n## {VERSION} - " in changelog and "\n## Unreleased\n" in changelog


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "megatron_rl" / "py.typed").is_file()
    assert METADATA["tool"]["setuptools"]["package-data"]["megatron_rl"] == ["py.typed"]


def test_the_readme_has_one_claim_one_picture_one_command_and_three_points_on_its_first_screen():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 200
    first_screen = lines[:30]
    assert sum(line.startswith("**") for line in first_screen) == 1
    assert sum("<img" in line for line in first_screen) == 1 and "headline.svg" in "\n".join(first_screen)
    assert [line.partition("  ")[0] for line in first_screen if line.startswith("bash ")] == ["bash launch/quickstart.sh"]
    assert sum(line.startswith("- **") for line in first_screen) == 3


def test_the_functions_that_the_estimates_page_names_exist():
    rows = [row for row in (ROOT / "docs/estimates.md").read_text().splitlines() if row.startswith("| `")]
    names = re.findall(r"`(\w+)\.(\w+)`", "\n".join(row.split("|")[1] for row in rows))
    places = {path.stem: path.read_text() for path in (ROOT / "megatron_rl").rglob("*.py")}
    assert len(names) >= 8
    assert [f"{module}.{name}" for module, name in names if f"\ndef {name}(" not in places.get(module, "")] == []
