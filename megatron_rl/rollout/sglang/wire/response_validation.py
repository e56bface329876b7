"""Validation of a server's replies. Pure.

A gateway, another server on the same port or a broken device can send anything with status 200. No reply is trained
on before its types, counts, ids and signs have been checked here; ``InvalidReply`` names the field and the value
received. The checks run in C over whole lists, or over arrays (``batch_call.py``).
"""

import reprlib
from typing import Any

import numpy as np

from megatron_rl.errors import UserError

_MAX_POSITIVE = 1.0e-3
"""Log-probs above 0 by at most this much are rounding errors."""

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 120


class InvalidReply(UserError, RuntimeError):
    """The server's reply is invalid and must not be trained on."""

    server_at_fault = True
    """True if a retry, here or on another server, may give a valid reply."""


class NonFiniteLogprob(InvalidReply):
    """A log-prob is not finite. The cause is the weights, which all servers have from the trainer."""

    server_at_fault = False


class ApiKeyRejected(UserError):
    """A server replied 401 or 403."""

    def __init__(self, url: str, status: int, *, has_key: bool) -> None:
        sent = "this run's API key is not the server's" if has_key else "it requires an API key, and this run has none"
        super().__init__(
            f"the SGLang server at {url} answered {status}: {sent}. Set rollout.api_key_env to the name of an environment "
            "variable with the key that the server was started with"
        )


def abbreviate(value: Any) -> str:
    """Shortened repr of ``value`` for a message."""
    return _short.repr(value)


def expected_error(field: str, expected: str, got: Any) -> InvalidReply:
    return InvalidReply(f"{field}: expected {expected}, got {abbreviate(got)}")


def as_object(value: Any, field: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise expected_error(field, "a JSON object", value)
    return value


def as_text(value: Any, field: str) -> str:
    if type(value) is not str:
        raise expected_error(field, "a text", value)
    return value


def parse_count(value: Any, field: str, *, most: int) -> int:
    """A whole number from 0 to ``most``; booleans are rejected."""
    if type(value) is not int or not 0 <= value <= most:
        raise expected_error(field, f"a whole number from 0 to {most}", value)
    return value


def as_list(value: Any, field: str) -> list[Any]:
    if type(value) is not list:
        raise expected_error(field, "a list", value)
    return value


def as_token_ids(value: Any, field: str, *, most: int, vocab_size: int) -> np.ndarray:
    """[n] int32: at most ``most`` ids, each below ``vocab_size``."""
    ids = value if isinstance(value, np.ndarray) else as_list(value, field)
    if len(ids) > most:
        raise expected_error(field, f"at most the {most} requested tokens", f"{len(ids)} tokens")
    if isinstance(ids, list) and not set(map(type, ids)) <= {int}:
        raise expected_error(field, "whole numbers", next(token for token in ids if type(token) is not int))
    if len(ids) and _outside(ids, vocab_size):
        outside = next(int(token) for token in ids if not 0 <= token < vocab_size)
        raise expected_error(field, f"token ids of the vocabulary (0 to {vocab_size - 1})", outside)
    return np.asarray(ids, dtype=np.int32)


def _outside(ids: list[int] | np.ndarray, vocab_size: int) -> bool:
    lowest, highest = (ids.min(), ids.max()) if isinstance(ids, np.ndarray) else (min(ids), max(ids))
    return bool(lowest < 0 or highest >= vocab_size)


def parse_logprobs(value: Any, field: str, token_ids: np.ndarray) -> np.ndarray:
    """[n] float32: one log-prob per token, finite and not above 0. Raises NonFiniteLogprob for null, NaN and infinities."""
    logprobs = as_list(value, field)
    _check_numbers(field, len(token_ids), len(logprobs))
    kinds = set(map(type, logprobs))
    if not kinds <= {float, int, type(None)}:
        raise expected_error(field, "numbers", next(x for x in logprobs if type(x) not in (float, int, type(None))))
    with np.errstate(over="ignore"):  # an overflow to infinity is reported below
        array = np.array(logprobs, dtype=np.float64).astype(np.float32)
    if not np.isfinite(array).all():
        raise NonFiniteLogprob(
            f"{field}: the server returned a log-prob that is not finite. Its weights contain NaN or infinity: check the "
            "loss and gradient norm of the last steps"
        )
    return _not_above_0(array, field)


def _not_above_0(logprobs: np.ndarray, field: str) -> np.ndarray:
    if len(logprobs) and logprobs.max() > _MAX_POSITIVE:
        raise expected_error(field, "log-probs of at most 0", float(logprobs.max()))
    return logprobs


def _check_numbers(field: str, num_tokens: int, num_logprobs: int) -> None:
    if num_logprobs != num_tokens:
        raise InvalidReply(f"{field}: the server returned {num_tokens} tokens and {num_logprobs} log-probs")


def as_token_logprobs(value: Any, field: str, token_ids: np.ndarray) -> np.ndarray:
    """Same as ``parse_logprobs``, but from SGLang's entries [log-prob, token id, text]; each entry must belong to
    its token."""
    if isinstance(value, tuple):  # from ``read_json``
        ids, logprobs = value
        _check_numbers(field, len(token_ids), len(ids))
        _check_same_tokens(field, token_ids, ids)
        return _not_above_0(logprobs, field)
    entries = as_list(value, field)
    if len(entries) != len(token_ids) or not entries:
        return parse_logprobs(entries, field, token_ids)
    if set(map(type, entries)) != {list} or set(map(len, entries)) != {3}:
        broken = next(entry for entry in entries if type(entry) is not list or len(entry) != 3)
        raise expected_error(field, "entries [log-prob, token id, text]", broken)
    _check_same_tokens(field, token_ids, [entry[1] for entry in entries])
    return parse_logprobs([entry[0] for entry in entries], field, token_ids)


def _check_same_tokens(field: str, token_ids: np.ndarray, theirs: list[Any] | np.ndarray) -> None:
    if isinstance(theirs, np.ndarray):
        if np.array_equal(token_ids, theirs):
            return
        theirs = theirs.tolist()
    expected = token_ids.tolist()
    if theirs == expected:
        return
    other, ours = next((a, b) for a, b in zip(theirs, expected, strict=True) if a != b)
    raise expected_error(field, f"the log-prob of token {ours}", f"the log-prob of token {abbreviate(other)}")
