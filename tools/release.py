"""Cut a release: one version in all files, the changelog's unreleased part under it, and both packages in dist/.

    python tools/release.py 0.2.0

It commits and uploads nothing: look at ``git diff``, commit, tag, and upload dist/ where you publish.
"""

import argparse
import datetime
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = "import sys; from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"
PLACES = {
    "pyproject.toml": r'(?m)^version = "(.+)"$',
    "megatron_rl/__init__.py": r'(?m)^__version__ = "(.+)"$',
    "CITATION.cff": r"(?m)^version: (.+)$",
}
"""Where the version stands, by file."""


def cut(root: Path, version: str, day: str) -> None:
    """Write the version into its files, and head the changelog's unreleased part with it. Raises ValueError if a place is not found."""
    for name, pattern in PLACES.items():
        _replace(root / name, pattern, version)
    _replace(root / "CITATION.cff", r'(?m)^date-released: "(.+)"$', day)
    _replace(root / "CHANGELOG.md", r"(?m)^(## Unreleased)$", f"## Unreleased\n\n## {version} - {day}")


def _replace(path: Path, pattern: str, value: str) -> None:
    text = path.read_text()
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"{path} has no line like {pattern}")
    path.write_text(text[: found.start(1)] + value + text[found.end(1) :])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="the new version, such as 0.2.0")
    version = parser.parse_args().version
    if not re.fullmatch(r"\d+\.\d+\.\d+", version) or f"\n## {version} - " in (ROOT / "CHANGELOG.md").read_text():
        parser.error(f"expected a new version of three numbers, got {version}")
    cut(ROOT, version, datetime.datetime.now(datetime.UTC).date().isoformat())
    subprocess.run([sys.executable, "-c", BUILD], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    print("\n".join(str(path.relative_to(ROOT)) for path in sorted((ROOT / "dist").glob(f"*-{version}*"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
