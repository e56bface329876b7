"""Which experts SGLang sent each token to (R3, arXiv 2510.11370): decoding its answers. Pure.

A server started with ``--enable-return-routed-experts`` says for every token of a request but the last where it went:
also for the prefix, which it computed (or had cached) under the weights that sampled the answer. The record of a
trajectory's newest request is therefore the record of all its tokens, and replaces the one before.

So servers are asked for all tokens, not for the new ones alone (``routed_experts_start_len``): after a publish the prefix is
computed again by the new weights, and the routes of an earlier request are no longer those behind its keys and values.
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

SERVER_FLAG = "enable-return-routed-experts"
_ROWS_AT_ONCE = 1 << 15
"""As many columns of them stay in a core's cache."""


class InvalidRoutes(ValueError):
    """Not what a server with this model would say."""


def returns_routes(config: Config) -> bool:
    """The run's servers say which experts tokens went to."""
    return config.policy.moe.routing_replay is RoutingReplay.R3


def route_shape(model_path: str | Path) -> RouteShape:
    """Of the model in a Hugging Face folder; ModelError where it has no experts."""
    model = as_config(read_model_json(model_path))
    experts = num_experts(model)
    if not experts:
        raise ModelError(
            "policy.moe.routing_replay needs a mixture-of-experts model, but "
            f"{Path(model_path) / 'config.json'} names no experts; set it to none"
        )
    return RouteShape(model.num_hidden_layers, model.num_experts_per_tok, experts)


def decode_routes(encoded: str, num_tokens: int, shape: RouteShape) -> np.ndarray:
    """SGLang's base64 of int32 ids [num_tokens, layers, k] -> routes of the same shape: id + 1, 0 no record.

    A dense layer's entries and those of a token that the server did not see routed are all 0 in SGLang's answer: where
    one expert is named twice there is no record. Raises BadRoutes for another size or an unknown expert.
    """
    try:
        ids = np.frombuffer(pybase64.b64decode(encoded, validate=True), dtype=np.int32)
    except (binascii.Error, ValueError) as error:
        raise InvalidRoutes(f"routed experts are not base64 of int32: {error}") from error
    wanted = (num_tokens, shape.num_layers, shape.top_k)
    if ids.size != num_tokens * shape.num_layers * shape.top_k:
        raise InvalidRoutes(
            f"expected routed experts of {wanted[0]} tokens x {wanted[1]} layers x {wanted[2]}, got {ids.size} numbers"
        )
    if ids.size and not (ids.min() >= -1 and ids.max() < shape.num_experts):
        raise InvalidRoutes(f"routed experts are ids below {shape.num_experts}, got {ids.min()} to {ids.max()}")
    dtype = np.uint8 if shape.num_experts <= np.iinfo(np.uint8).max else np.int16
    routes = np.add(ids.reshape(wanted), 1, dtype=dtype, casting="unsafe")
    _drop_incomplete(routes.reshape(-1, shape.top_k))
    return routes


def _drop_incomplete(rows: np.ndarray) -> None:
    """In ``rows`` [n, k], those that are not k different experts become 0.

    Every two columns are compared: sorting n short rows takes ten times as long.
    """
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        block = rows[start : start + _ROWS_AT_ONCE]
        columns = np.ascontiguousarray(block.T)
        incomplete = (columns == 0).any(0)
        for first, second in itertools.combinations(columns, 2):
            incomplete |= first == second
        block[incomplete] = 0
