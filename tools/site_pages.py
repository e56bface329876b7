"""Hooks of mkdocs (mkdocs.yml): the repository as a site, every file at its own path, so that links hold as GitHub has them.

mkdocs knows the pages of one folder. Here each page keeps its path from the repository's root, ``docs/data.md``, and
three kinds of files join: the pages outside docs/, the pictures, and what pages link to besides, as a page that shows
the file's text. A link to a folder leads to its README.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/**/*.md")
"""Pages that are not in docs/."""
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".json": "json"}
_LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[\w.-]+)?\))")
_PICTURE = re.compile(r'<picture>\s*<source[^>]*srcset="(.*?)">\s*<img alt="(.*?)" src="(.*?)">\s*</picture>')
_NAMED_FENCE = re.compile(r"^( *```\w+) ([\w./]+)$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    inside = [file for file in files if file.src_dir == config.docs_dir]
    found = Files([file for file in files if file.src_dir != config.docs_dir])
    paths = [f"docs/{file.src_uri}" for file in inside]
    for pattern in OUTSIDE:
        paths += sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))
    for path in paths:
        found.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    for path in sorted({target for page in paths if page.endswith(".md") for target in _targets(page)} - set(paths)):
        if Path(path).suffix in (".svg", ".png"):
            found.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
        else:
            found.append(File.generated(config, f"{path}.md", content=_shown(path), inclusion=InclusionLevel.NOT_IN_NAV))
    return found


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    def link(match: re.Match[str]) -> str:
        path = _target(page.file.src_uri, match[2])
        if files.get_file_from_path(f"{path}.md"):
            return f"{match[1]}{match[2]}.md{match[3]}"
        if path and (ROOT / path / "README.md").is_file():
            return f"{match[1]}{match[2].rstrip('/')}/README.md{match[3]}"
        return match[0]

    # GitHub's way to have a picture for each background, and Material's.
    markdown = _PICTURE.sub(r"![\2](\3#only-light)\n![\2](\1#only-dark)", markdown)
    return _NAMED_FENCE.sub(r'\1 title="\2"', _LINK.sub(link, markdown))


def _targets(page: str) -> Iterator[str]:
    """Files of the repository that a page links to or shows."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in [match[2] for match in _LINK.finditer(text)] + re.findall(r'(?:src|srcset)="(.*?)"', text):
        path = _target(page, target)
        if path and (ROOT / path).is_file():
            yield path


def _target(page: str, link: str) -> str:
    """Path of a link from the repository's root; "" for one that leaves it."""
    path = "" if "://" in link else posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return "" if path.startswith("..") else path


def _shown(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    return f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n````{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}\n````\n"
