"""Registry lookups and rejected options, on plug-ins defined here (algorithms, rewards and environments use it)."""

from pathlib import Path
from typing import Any, Literal

import pytest

from megatron_rl.errors import ConfigError
from megatron_rl.system.plugins import Plugin, PluginError, Registry, path_of

SELF = f"{__name__}:"


def shout(text: str, *, times: int = 1, mark: Literal["!", "?"] = "!", ending: str | None = None) -> str:
    """Return the text in upper case with marks."""
    return text.upper() + mark * times + (ending or "")


def anything(**options: Any) -> dict[str, Any]:
    return options


class Shouter:
    def __init__(self, times: int, factor: float = 1.0) -> None:
        self.times = times


def make_registry() -> Registry[Plugin]:
    registry = Registry("voice", Plugin, packages=[], options_key="voice.options", inputs=["text"])
    registry.register("shout")(shout)
    return registry


def test_name_and_import_path_give_the_same_plugin() -> None:
    registry = make_registry()
    assert registry.find("shout") is registry.find(SELF + "shout")
    assert registry.find(SELF + "anything") == Plugin(SELF + "anything", anything)
    assert registry.summaries() == {"shout": "Return the text in upper case with marks."}


def test_decorator_without_a_name_adds_no_name() -> None:
    registry = make_registry()
    registry.register()(anything)
    assert registry.names() == ["shout"] and registry.find(SELF + "anything").name == SELF + "anything"


def test_names_have_the_same_order_for_any_import_order() -> None:
    def of_module(module: str) -> Any:
        def voice(text: str) -> str:
            return text

        voice.__module__ = module
        return voice

    entries = [("b2", "rooms.b"), ("a2", "rooms.a"), ("b1", "rooms.b"), ("a1", "rooms.a")]
    for order in (entries, [entries[1], entries[3], entries[0], entries[2]]):
        registry = Registry("voice", Plugin, packages=[], options_key="voice.options", inputs=["text"])
        for name, module in order:
            registry.register(name)(of_module(module))
        assert registry.names() == ["a2", "a1", "b2", "b1"]


def test_bound_plugin_gets_the_inputs_that_it_declares() -> None:
    registry = make_registry()
    assert registry.bind("shout", {"times": 2})(text="hear", voice="unread") == "HEAR!!"
    assert registry.bind(SELF + "anything", {"free": 1})(text="unread") == {"free": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"times": True}, "voice 'shout': option times must be an integer, got True"),
        ({"times": 1.5}, "times must be an integer, got 1.5"),
        ({"mark": "."}, "mark must be one of '!', '\\?', got '.'"),
        ({"ending": 3}, "ending must be a string or null, got 3"),
        ({"text": "a"}, "text is set by the caller, it is not an option of voice.options"),
        ({"tims": 2}, "has no option 'tims'; its options: times, mark, ending; did you mean 'times'"),
    ],
)
def test_options_are_checked_against_the_signature(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        make_registry().bind("shout", options)
    make_registry().bind("shout", {"times": 2, "mark": "?", "ending": None})


def test_class_options_are_checked_against_its_constructor() -> None:
    registry = make_registry()
    shouter = registry.find(SELF + "Shouter")
    registry.check_options(shouter, {"times": 1, "factor": 2})
    with pytest.raises(PluginError, match="needs times; set it under voice.options"):
        registry.check_options(shouter, {})
    with pytest.raises(PluginError, match="factor must be a number, got 'much'"):
        registry.check_options(shouter, {"times": 1, "factor": "much"})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shot", "unknown voice 'shot': expected one of shout, or an import path .*did you mean 'shout'"),
        ("no_such_package:shout", "'no_such_package' does not import .*ModuleNotFoundError.* PYTHONPATH"),
        (SELF + "shot", "has no 'shot'; it has .*'shout'.*did you mean 'shout'"),
        (SELF + "SELF", "expected a plain function or a class, got"),
    ],
)
def test_unknown_plugin_is_rejected_with_the_available_names(name: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        make_registry().find(name)


def test_a_plugin_may_be_named_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.voices.py").write_text("def whisper(text, *, times: int = 1):\n    return text.lower() * times\n")
    Path("broken.py").write_text("import no_such_module\n")
    registry = make_registry()
    whisper = registry.find("my.voices.py:whisper").function
    assert registry.bind("my.voices.py:whisper", {"times": 2})(text="A") == "aa"
    assert path_of(whisper) == f"{tmp_path}/my.voices.py:whisper"
    assert registry.find(path_of(whisper)).function is whisper
    for name, message in (
        ("my.voices.py:whisp", "has no 'whisp'; it has .*did you mean 'whisper'"),
        ("nowhere.py:whisper", "FileNotFoundError.*path/file.py:name"),
        ("broken.py:whisper", "ModuleNotFoundError.*no_such_module"),
    ):
        with pytest.raises(PluginError, match=message):
            registry.find(name)


def test_name_belongs_to_one_plugin_and_the_error_class_is_configurable() -> None:
    registry = Registry("voice", Plugin, packages=[], options_key="voice.options", error=ConfigError)
    registry.register("one")(shout)
    registry.register("one")(shout)
    with pytest.raises(ConfigError, match="voice 'one' is .*shout already; give .*anything another name"):
        registry.register("one")(anything)
