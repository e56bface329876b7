"""What a registry finds, and which options it refuses, on plug-ins made here (algorithms, rewards and environments use it)."""

from typing import Any, Literal

import pytest

from megatron_rl.errors import ConfigError
from megatron_rl.system.plugins import Plugin, PluginError, Registry

SELF = f"{__name__}:"


def shout(text: str, *, times: int = 1, mark: Literal["!", "?"] = "!", ending: str | None = None) -> str:
    """Says it louder."""
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


def test_a_name_and_its_import_path_are_one_plug_in() -> None:
    registry = make_registry()
    assert registry.find("shout") is registry.find(SELF + "shout")
    assert registry.find(SELF + "anything") == Plugin(SELF + "anything", anything)
    assert registry.summaries() == {"shout": "Says it louder."}


def test_without_a_name_a_decorator_leaves_the_list_of_names_alone() -> None:
    registry = make_registry()
    registry.register()(anything)
    assert registry.names() == ["shout"] and registry.find(SELF + "anything").name == SELF + "anything"


def test_the_names_are_in_the_same_order_whichever_module_was_imported_first() -> None:
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


def test_a_bound_plug_in_is_given_the_inputs_that_it_names() -> None:
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
        ({"text": "a"}, "text is given by the caller, it is no option of voice.options"),
        ({"tims": 2}, "has no option 'tims'; its options: times, mark, ending; did you mean 'times'"),
    ],
)
def test_options_are_checked_against_the_signature(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        make_registry().bind("shout", options)
    make_registry().bind("shout", {"times": 2, "mark": "?", "ending": None})


def test_a_class_is_checked_by_its_constructor() -> None:
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
def test_what_is_not_there_is_refused_with_what_is(name: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        make_registry().find(name)


def test_a_name_belongs_to_one_plug_in_and_a_room_may_raise_its_own_error() -> None:
    registry = Registry("voice", Plugin, packages=[], options_key="voice.options", error=ConfigError)
    registry.register("one")(shout)
    registry.register("one")(shout)
    with pytest.raises(ConfigError, match="voice 'one' is .*shout already; give .*anything another name"):
        registry.register("one")(anything)
