"""Names that a pickle may import before a library loads it: megatron_rl/system/files/probes.py."""

import enum
import operator
import os
import pickle

import pytest

from megatron_rl.system.files.probes import UnsafePickle, check_pickle

NAME = f"{__name__}.Format"


class Format(enum.Enum):
    ROWS = 0
    COLUMNS = 1


class Call:
    """Pickled as a call of ``function``."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def check(tmp_path, thing, allowed=(NAME,), enums=(NAME,)):
    (tmp_path / "it").write_bytes(pickle.dumps(thing))
    check_pickle(tmp_path / "it", allowed, enums)


def test_enum_members_are_read_in_every_python_versions_form(tmp_path):
    check(tmp_path, [Format.ROWS, Call(Format, 1)])
    by_name = [Call(getattr, Format, "ROWS"), Call(getattr, Format, "COLUMNS")]
    assert pickle.loads(pickle.dumps(by_name)) == [Format.ROWS, Format.COLUMNS]
    check(tmp_path, by_name)


@pytest.mark.parametrize(
    "thing",
    [
        Call(getattr, Format, "__init__"),
        Call(getattr, Format, "mro"),
        Call(getattr, Call(getattr, Format, "ROWS"), "VALUE"),
        Call(getattr, Format.ROWS, "name"),
        Call(getattr, "text", "FORMAT"),
        Call(os.system, "true"),
        Call(operator.attrgetter, "x"),
        Call(operator.methodcaller, "x"),
    ],
)
def test_other_attributes_and_functions_are_rejected(tmp_path, thing):
    with pytest.raises(UnsafePickle, match="which no checkpoint needs"):
        check(tmp_path, thing)


def test_no_attribute_is_looked_up_without_enumerations(tmp_path):
    with pytest.raises(UnsafePickle, match=r"builtins\.getattr"):
        check(tmp_path, Call(getattr, Format, "ROWS"), enums=())


def test_enum_member_is_not_called(tmp_path):
    # pickle itself cannot write this, so it is assembled: GLOBAL, GLOBAL, name, TUPLE2, REDUCE, EMPTY_TUPLE, REDUCE
    raw = b"cbuiltins\ngetattr\nc" + f"{__name__}\nFormat\n".encode() + b"VROWS\n\x86R)R."
    (tmp_path / "it").write_bytes(raw)
    with pytest.raises(UnsafePickle, match="is damaged: TypeError"):
        check_pickle(tmp_path / "it", [NAME], [NAME])
