from pathlib import Path

import pytest

from tests.unit.config.recipes import MODEL, write_recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path, MODEL)
