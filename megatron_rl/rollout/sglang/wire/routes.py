"""Decodes the experts that SGLang routed each token to (R3, arXiv 2510.11370). Pure.

A server started with ``--enable-return-routed-experts`` reports the experts of every token of a request except the
last, including the prefix, which the same weights computed (or had cached). The routes of a trajectory's newest
request are therefore the routes of all its tokens, and replace the previous record.

Requests ask for the routes of all tokens, not only of the new ones (``routed_experts_start_len``): after a publish
the new weights recompute the prefix, so routes of an earlier request no longer match its keys and values.
"""

import binascii
import itertools
from pathlib import Path

import numpy as np
import pybase64

from megatron_rl.config.schema import Config, RoutingReplay
from megatron_rl.errors import ModelError
from megatron_rl.families.model_facts import as_config, num_experts, read_model_json
from megatron_rl.rollout.requests import RouteShape
from megatron_rl.rollout.sglang.wire.response_validation import InvalidReply

SERVER_FLAG = "enable-return-routed-experts"
_ROWS_AT_ONCE = 1 << 15
"""Rows per block: the columns of one block fit into a core's cache."""


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
