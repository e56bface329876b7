"""The program's objects as the tests see them.

Calls, attributes, texts and ``with`` are requests to the program. Other operators whose result the tests can check (length, items,
arithmetic) are requests only for an instance that the tests have made, by calling a name like ``Stack``. An object is true if its class
decides no truth. Every other use (comparing, hashing, isinstance, ...) raises a violation, because the program would decide the test.
"""

import builtins
from collections.abc import Callable
from typing import Any


class Handle:
    __slots__ = ("_made_by", "_reference", "_requests")

    def __init__(self, requests: Any, reference: list[Any]) -> None:
        # object.__setattr__ bypasses __setattr__ below, which would send a request
        object.__setattr__(self, "_requests", requests)
        object.__setattr__(self, "_reference", reference)
        object.__setattr__(self, "_made_by", "")

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        kind, name = reference_of(self)
        makes = kind == "name" and name.lstrip("_")[:1].isupper()
        result = _requests(self).ask("make" if makes else "call", self, arguments, tuple(keywords.items()))
        return _made(result, "name") if makes else result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__"):
            raise _undecided(self, name)
        value = _requests(self).ask("get", self, name)
        stands_for_array = name in _requests(self).array_methods and is_object(value) and not _made_by(self)
        return _judgment(self, name, value) if name in _JUDGMENTS or stands_for_array else value

    def __setattr__(self, name: str, value: Any) -> None:
        _requests(self).ask("set", self, name, value)

    @property
    def __doc__(self) -> Any:  # type: ignore[override]
        return _requests(self).ask("get", self, "__doc__")

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """``isinstance`` reads this attribute if the handle's own type does not match."""
        raise _undecided(self, "class")

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if error is None:
            _operate(self, "exit", object, self)
        elif isinstance(error, Exception) and not isinstance(error, AssertionError):
            is_meant = traceback.tb_next is None and traceback.tb_lineno in _requests(self).raising_lines
            if not is_meant or getattr(builtins, type(error).__name__, None) is not kind:
                raise _undecided(self, "exit")
            handles = _operate(self, "exit", object, self, type(error).__name__, error.args)
            if type(handles) not in (bool, type(None)):
                raise _undecided(self, "exit")
            return bool(handles)
        return False

    def __bool__(self) -> bool:
        if _requests(self).ask("operate", "bool", self) is not True:
            raise _undecided(self, "bool")
        return True


class Iterator(Handle):
    """An iterator of the program; items are requested one at a time."""

    __slots__ = ()

    def __iter__(self) -> Any:
        return _operate(self, "iter", Iterator, self) if _made_by(self) else self

    def __len__(self) -> Any:
        if _made_by(self):
            return _operate(self, "len", int, self)
        raise TypeError("an iterator has no len()")  # list() calls len() and ignores this error

    def __next__(self) -> Any:
        return _requests(self).ask("next", self)


def is_object(value: Any) -> bool:
    """True for an object that stays with the program."""
    return type(value) in (Handle, Iterator)


def reference_of(handle: Handle) -> list[Any]:
    return object.__getattribute__(handle, "_reference")


def _requests(handle: Handle) -> Any:
    return object.__getattribute__(handle, "_requests")


def _made_by(handle: Handle) -> str:
    """How the tests have made an instance: "name" by a call of its class, "operator" from another instance, "" if they have not."""
    return object.__getattribute__(handle, "_made_by")


def _made(value: Any, how: str = "operator") -> Any:
    """``value``, marked as an instance of a class that the tests name, or made from one by an operator."""
    if isinstance(value, Handle):
        object.__setattr__(value, "_made_by", how)
    return value


def _judgment(handle: Handle, name: str, method: Any) -> Callable[..., Any]:
    """A method with a name that judges, if it does not: ``query.all()`` may give a list."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        result = method(*arguments, **keywords)
        if type(result) not in (list, dict, str, Handle):
            raise _undecided(handle, name)
        return result

    if not is_object(method):
        raise _undecided(handle, name)
    return call


def _undecided(handle: Handle, name: str, *others: object) -> BaseException:
    """The violation of tests that need an answer of the object itself. A plain value is never equal to an object that a
    function has returned, so the program fails there."""
    name = name.strip("_")
    is_plain = name in ("eq", "ne") and all(type(other).__module__ == "builtins" for other in others)
    is_iterator = type(handle) is Iterator and name != "class"
    has_failed = (is_plain or is_iterator) and reference_of(handle)[0] == "object" and not _made_by(handle)
    violation = _requests(handle).failed if has_failed else _requests(handle).unscored
    return violation(f"the program gave an object where the tests need a plain value ({name})")


def _operate(handle: Handle, name: str, result: type, *operands: Any) -> Any:
    """The result of an operator, of the exact type ``result``; a Handle may be an Iterator, object is any type."""
    if not _made_by(handle) and name not in ("str", "repr", "enter", "exit"):
        raise _undecided(handle, name)
    value = _requests(handle).ask("operate", name, *operands)
    if name == "abs" and type(value) in (int, float) and _made_by(handle) == "name":  # abs(f(x) - 4) would decide a test
        return value
    if type(value) is not result and not (result in (object, Handle) and issubclass(type(value), result)):
        raise _undecided(handle, name)
    return _made(value) if result is Handle else value


def _operator(name: str, result: type, *, is_swapped: bool = False) -> Callable[..., Any]:
    def operate(handle: Handle, *others: Any) -> Any:
        return _operate(handle, name, result, *((*others, handle) if is_swapped else (handle, *others)))

    return operate


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(handle: Handle, *others: Any, **__: Any) -> Any:
        raise _undecided(handle, name, *others)

    return refuse


_JUDGMENTS = frozenset(
    "equals equal eq isequal is_equal almost_equal almost_equals allclose isclose identical compare issubset issuperset "
    "isdisjoint startswith endswith all any is_integer".split()
) | {name for name in dir(str) if name.startswith("is")}
"""Methods that judge a value, many of them of plain types: the program would judge itself."""
_REFUSED = (
    "eq ne lt le gt ge hash contains divmod rdivmod round trunc floor ceil index int float complex bytes dir aenter "
    "aexit await aiter anext instancecheck subclasscheck reduce_ex copy deepcopy fspath delattr array array_ufunc "
    "array_function next"
).split()
_OPERATORS: dict[str, type] = {
    "len": int, "str": str, "repr": str, "format": str, "iter": Iterator, "reversed": Iterator, "getitem": object,
    "setitem": type(None), "delitem": type(None), "enter": object, **dict.fromkeys("neg pos abs invert".split(), Handle),
}  # fmt: skip
"""Maps the operator to the type of its result. Arithmetic gives objects only: ``x - 4`` that gives 0 would decide a test."""


def _install() -> None:
    methods = {name: _refusal(name) for name in _REFUSED}
    methods |= {name: _operator(name, result) for name, result in _OPERATORS.items()}
    for name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split():
        function = f"{name}_" if name in ("and", "or") else name
        methods[name] = _operator(function, Handle)
        methods[f"i{name}"] = _operator(f"i{name}", Handle)
        methods[f"r{name}"] = _operator(function, Handle, is_swapped=True)
    for name, method in methods.items():
        setattr(Handle, f"__{name}__", method)


_install()
