"""The site of docs/ builds without warnings, all of its links have targets, and it loads nothing from other hosts."""

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest

from tests.unit.docs.fences import PAGES, ROOT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed: bash launch/setup.sh"
)
LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "srcset")}
"""Elements that a browser loads automatically."""
PICTURES_OF = ("only-light", "only-dark")
"""Fragments that select a picture for a background."""


class Html(HTMLParser):
    """Ids, links and loaded resources of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id" and value:
                self.ids.add(value)
            elif (tag, name) == ("a", "href") and value:
                self.links.append(value)
            elif (tag, name) in LOADED and value and ("rel", "canonical") not in attributes:
                self.loaded.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path: Html(path.read_text()) for path in site.rglob("*.html")}


def test_every_page_of_the_repository_is_in_the_site(site):
    for page in PAGES:
        path = page.relative_to(ROOT)
        made = site / (path.with_name("index.html") if path.name == "README.md" else path.with_suffix(".html"))
        assert made.is_file(), path


def leads_nowhere(link: str, path, pages) -> bool:
    parts = urlsplit(link)
    if parts.scheme or parts.fragment in PICTURES_OF:
        return False
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    target = target / "index.html" if target.is_dir() else target
    return not target.is_file() or bool(parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids)


def test_links_and_anchors_have_targets(site, pages):
    wrong = [
        f"{path.relative_to(site)}: {link}"
        for path, page in pages.items()
        if path.name != "404.html"  # its links begin at the server's root
        for link in [*page.links, *page.loaded]
        if leads_nowhere(link, path, pages)
    ]
    assert not wrong


def test_nothing_is_loaded_from_other_hosts(site, pages):
    found = {f"{path.name}: {link}" for path, page in pages.items() for link in page.loaded if urlsplit(link).netloc}
    assert not found
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.findall(r"url\(['\"]?(?:https?:)?//", styles)
    assert not any(re.search(r'class="[^"]*mermaid', path.read_text()) for path in pages)  # its script would come from elsewhere


def test_search_needs_no_web_server(site):
    """A page from a folder can load scripts, but neither the index as JSON nor a worker."""
    assert (site / "search" / "search_index.js").is_file()
    for path in site.rglob("*.html"):
        assert re.search(r'<script src="[^"]*iframe-worker.js"', path.read_text()), path.relative_to(site)


def test_markdown_renders_as_on_github(site, pages):
    """Python-Markdown leaves lists, fences and tables as text if they are not indented by four."""
    for path in pages:
        text = re.sub(r"<(pre|code|script|style)\b.*?</\1>", "", path.read_text(), flags=re.DOTALL)
        text = re.sub(r"<[^>]*>", "", text)
        assert not re.search(r"```|^\s*\|.*\|\s*$|\*\*\w|\]\(|^(?:[-*]|\d+\.) ", text, re.MULTILINE), path.relative_to(site)


def test_the_api_has_the_names_of_its_pages(site):
    for page in ROOT.glob("docs/api/*.md"):
        text = (site / page.relative_to(ROOT).with_suffix(".html")).read_text() if page.name != "README.md" else ""
        for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE):
            assert f'id="{name}' in text, f"{page.name}: {name}"
        for members in re.findall(r"members: \[(.*?)\]", page.read_text()):
            missing = [name for name in members.split(", ") if not re.search(rf'id="[\w.]+\.{name}"', text)]
            assert not missing, f"{page.name}: {missing}"
