"""The pages agree with the code: pictures, packages and layers, paths and links.

``tests/test_house.py`` checks that packages import from lower layers only.
"""

import configparser
import re
import sys
from pathlib import Path

import pytest

from tests.unit.docs.fences import PAGES, fences

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "megatron_rl"
ARCHITECTURE = ROOT / "docs" / "architecture.md"


def rooms():
    return {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


def test_table_of_layers_equals_the_import_contract():
    rows = re.findall(r"^\| (\d+) \| ([`\w ]+) \|", ARCHITECTURE.read_text(), re.MULTILINE)
    table = [set(re.findall(r"\w+", names)) for _, names in rows]
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    layers = [set(re.findall(r"\w+", line)) for line in contracts["importlinter:contract:floors"]["layers"].split("\n") if line]
    assert table == [layer & rooms() for layer in layers if layer & rooms()]
    assert [int(floor) for floor, _ in rows] == list(range(len(rows), 0, -1))


def test_readme_names_every_package_once():
    layout = (ROOT / "README.md").read_text().partition("## Layout")[2].partition("\n## ")[0]
    named = [room for row in re.findall(r"^\| `megatron_rl/(.*?) \|", layout, re.MULTILINE) for room in re.findall(r"\w+", row)]
    assert sorted(named) == sorted(rooms())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_on_a_page_exist(page):
    own = {code.file for code in fences(page)}
    for name in re.findall(r"`((?:\w+/)+\w+\.(?:py|sh|yaml))`", page.read_text()):
        assert name in own or any((base / name).exists() for base in (ROOT, PACKAGE, page.parent)), f"{page.name}: {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_have_targets(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_index_lists_every_page_once():
    linked = re.findall(r"^\| \[[\w./]+\]\(((?:design/)?[\w.]+\.md)\)", (ROOT / "docs" / "README.md").read_text(), re.MULTILINE)
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/design/*.md")]
    assert sorted(linked) == sorted(str(path.relative_to(ROOT / "docs")) for path in pages if path.name != "README.md")


def test_architecture_is_a_page_for_newcomers():
    """Reasons and details belong into docs/design."""
    assert len(ARCHITECTURE.read_text().split()) < 1_900
    linked = re.findall(r"\]\(design/([\w.]+\.md)", ARCHITECTURE.read_text())
    assert {path.name for path in ROOT.glob("docs/design/*.md")} - {"pydantic.md"} <= set(linked)


def test_stored_pictures_are_drawn_from_the_code(monkeypatch):
    """Stale? python tools/draw_pictures.py"""
    monkeypatch.syspath_prepend(ROOT / "tools")
    sys.modules.pop("canvas", None)
    from canvas import as_svg
    from draw_pictures import PICTURES

    for name, draw in PICTURES.items():
        stored = ROOT / "docs" / "pictures" / f"{name}.svg"
        assert stored.stat().st_size < 200_000
        assert stored.read_text() == as_svg(draw()), f"{name} is stale: run python tools/draw_pictures.py"


def test_picture_of_windows_keeps_the_laws_of_the_pool(monkeypatch):
    """No token is lost or duplicated, the number of slots is constant, and a response keeps its slot until it finishes."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    from draw_pictures import LENGTHS, NUM_SLOTS, WINDOW, windows_of_tppo

    bars = windows_of_tppo(4)
    assert len(bars) == 4 * NUM_SLOTS and all(bar.length <= WINDOW for bar in bars)
    for response in {bar.response for bar in bars}:
        own = [bar for bar in bars if bar.response == response]
        assert len({bar.slot for bar in own}) == 1
        ended = own[-1].ends
        assert sum(bar.length for bar in own) == LENGTHS[response] if ended else all(b.length == WINDOW for b in own)
