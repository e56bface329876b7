"""The supported releases of Megatron Core: a third one is refused with the file to extend, and no other module asks for the release."""

import logging
import re
from pathlib import Path

import pytest

import megatron_rl
from megatron_rl.errors import UserError
from megatron_rl.system import megatron_core

PACKAGE = Path(megatron_rl.__file__).parent


@pytest.fixture
def installed(monkeypatch):
    """Sets the version of Megatron Core that is found."""
    megatron_core.release.cache_clear()
    yield lambda found: monkeypatch.setattr(megatron_core, "version", lambda name: found)
    megatron_core.release.cache_clear()


@pytest.mark.parametrize("found", ["0.15.3", "0.17.1", "0.18.2", "0.20.0", "1.0"])
def test_an_unsupported_release_is_refused_with_the_file_that_has_the_differences(found, installed):
    installed(found)
    with pytest.raises(UserError) as refused:
        megatron_core.prepare_import()
    assert all(
        word in str(refused.value)
        for word in (found, "0.16 (Python 3.11)", "0.19 (Python 3.12)", "system/megatron_core.py")
    )


@pytest.mark.parametrize("found", ["0.16.1", "0.16.2", "0.19.2"])
def test_a_patch_of_a_supported_release_is_accepted(found, installed):
    installed(found)
    assert found.startswith(megatron_core.release())


def test_no_other_module_asks_for_the_release():
    asking = r"""megatron_core.*\brelease\b|version\(["']megatron.core["']\)|megatron\.core\.package_info"""
    paths = [path for path in PACKAGE.rglob("*.py") if re.search(asking, path.read_text())]
    assert [path.relative_to(PACKAGE).as_posix() for path in paths] == ["system/megatron_core.py"]


def test_warnings_about_the_trainers_own_code_are_silent_and_no_others(installed, caplog):
    installed("0.19.2")
    megatron_core.prepare_import()
    logger = logging.getLogger("megatron.core.models.gpt.gpt_model")
    logger.warning("GPTModel IS DEPRECATED. GPTModel is only accepting critical bug fixes")
    logger.warning("another warning")
    assert [record.getMessage() for record in caplog.records] == ["another warning"]
