"""A release has one version everywhere, and the changelog is cut where it was unreleased."""

import re
import shutil

from tests.unit.docs.test_furniture import ROOT
from tools import release


def test_a_release_writes_its_version_everywhere_and_cuts_the_changelog(tmp_path):
    for name in (*release.PLACES, "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    release.cut(tmp_path, "9.8.7", "2031-01-02")
    for name, pattern in release.PLACES.items():
        assert re.search(pattern, (tmp_path / name).read_text())[1] == "9.8.7"
    changelog = (tmp_path / "CHANGELOG.md").read_text()
    assert "\n## Unreleased\n\n## 9.8.7 - 2031-01-02\n" in changelog
    assert changelog.replace("\n\n## 9.8.7 - 2031-01-02", "") == (ROOT / "CHANGELOG.md").read_text()
    assert 'date-released: "2031-01-02"' in (tmp_path / "CITATION.cff").read_text()
