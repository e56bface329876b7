"""Validation of a server's replies. Pure.

A gateway, another server on the same port or a broken device can send anything with status 200. No reply is trained
on before its types, counts, ids and signs have been checked here; ``InvalidReply`` names the field and the value
received. The checks run in C over whole lists, or over arrays (``batch_call.py``).

Experts that SGLang routed each token to (R3, arXiv 2510.11370): a server started with ``--enable-return-routed-experts``
reports the experts of every token of a request except the last, including the prefix, which the same weights computed (or
had cached). The routes of a trajectory's newest request are therefore the routes of all its tokens, and replace the
previous record. Requests ask for the routes of all tokens, not only of the new ones (``routed_experts_start_len``): after a
publish the new weights recompute the prefix, so routes of an earlier request no longer match its keys and values.
"""

import binascii
import itertools
import reprlib
from pathlib import Path
from typing import Any

import numpy as np
import pybase64

from megatron_rl.config.schema import Config, RoutingReplay
from megatron_rl.errors import ModelError, UserError
from megatron_rl.families.model_facts import as_config, num_experts, read_model_json
from megatron_rl.rollout.requests import RouteShape

_MAX_POSITIVE = 1.0e-3
"""Log-probs above 0 by at most this much are rounding errors."""

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 120
SERVER_FLAG = "enable-return-routed-experts"
_ROWS_AT_ONCE = 1 << 15
"""Rows per block: the columns of one block fit into a core's cache."""


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


def returns_routes(config: Config) -> bool:
    """True if the run's servers report the experts of each token."""
    return config.policy.moe.routing_replay is RoutingReplay.R3


def route_shape(model_path: str | Path) -> RouteShape:
    """Route shape of the model in a Hugging Face folder. Raises ModelError if the model has no experts."""
    model = as_config(read_model_json(model_path))
    experts = num_experts(model)
    if not experts:
        raise ModelError(
            "policy.moe.routing_replay needs a mixture-of-experts model, but "
            f"{Path(model_path) / 'config.json'} has no experts; set it to none"
        )
    return RouteShape(model.num_hidden_layers, model.num_experts_per_tok, experts)


def decode_routes(encoded: str, num_tokens: int, shape: RouteShape) -> np.ndarray:
    """SGLang's base64 of int32 ids [num_tokens, layers, k] -> routes of the same shape: expert id + 1, or 0 for no
    record.

    SGLang returns 0 for all entries of dense layers and of tokens without a record, so an expert listed twice means
    no record. Raises InvalidReply for a wrong size or an unknown expert.
    """
    try:
        ids = np.frombuffer(pybase64.b64decode(encoded, validate=True), dtype=np.int32)
    except (binascii.Error, ValueError) as error:
        raise InvalidReply(f"routed experts are not base64 of int32: {error}") from error
    full_shape = (num_tokens, shape.num_layers, shape.top_k)
    if ids.size != num_tokens * shape.num_layers * shape.top_k:
        raise InvalidReply(
            f"expected routed experts of {full_shape[0]} tokens x {full_shape[1]} layers x {full_shape[2]}, got {ids.size} values"
        )
    if ids.size and not (ids.min() >= -1 and ids.max() < shape.num_experts):
        raise InvalidReply(f"routed experts are ids below {shape.num_experts}, got {ids.min()} to {ids.max()}")
    # One byte per entry if possible: routes are most of the data that trajectories carry.
    dtype = np.uint8 if shape.num_experts <= np.iinfo(np.uint8).max else np.int16
    routes = np.add(ids.reshape(full_shape), 1, dtype=dtype, casting="unsafe")
    _drop_incomplete(routes.reshape(-1, shape.top_k))
    return routes


def _drop_incomplete(rows: np.ndarray) -> None:
    """Zero the rows of ``rows`` [n, k] that do not contain k different experts.

    Compares every pair of columns, because sorting n short rows takes ten times as long.
    """
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        block = rows[start : start + _ROWS_AT_ONCE]
        columns = np.ascontiguousarray(block.T)
        incomplete = (columns == 0).any(0)
        for first, second in itertools.combinations(columns, 2):
            incomplete |= first == second
        block[incomplete] = 0
