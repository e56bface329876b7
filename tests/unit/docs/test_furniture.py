"""What stands next to the code agrees with it: licence, version, citation, changelog, package data."""

import hashlib
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[3]
SETUP = (ROOT / "setup.py").read_text()
VERSION = re.search(r'version="(.+?)"', SETUP)[1]


def test_the_licence_is_the_text_that_setup_names():
    """The digest of https://www.apache.org/licenses/LICENSE-2.0.txt."""
    digest = hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    assert 'license="Apache-2.0"' in SETUP


def test_the_citation_has_what_its_format_asks_for_and_the_current_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and {"message", "title", "authors"} <= citation.keys()
    assert citation["version"] == VERSION and citation["license"] == "Apache-2.0"
    for reference in citation["references"]:
        assert {"type", "title", "authors"} <= reference.keys()


def test_the_changelog_has_the_current_version():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"\n## {VERSION} - " in changelog and "\n## Unreleased\n" in changelog


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "megatron_rl" / "py.typed").is_file() and '"megatron_rl": ["py.typed"]' in SETUP


def test_the_readme_is_short_and_says_why_on_its_first_screen():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 200
    first_screen = "\n".join(lines[:20])
    assert "Why T-PPO" in first_screen and "examples/long_tail/comparison.svg" in first_screen
