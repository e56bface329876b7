"""Bodies and replies of SGLang's ``/generate``, as pure functions.

Invariants: no request has a token id outside the vocabulary (one such id crashes the server's scheduler) or an
image token without its image (which hangs the server). Every id, count and sign of a reply has been checked
(``response_validation.py``), and the server counts as many prompt tokens as the trainer. A response whose last
token is a stop token has finish reason ``stop``.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_rl.data.trajectory import TokenParts
from megatron_rl.rollout.requests import (
    Generation,
    GenerationRequest,
    PromptMismatch,
    RequestRejected,
    RetryableRequestError,
    ServerBusy,
)
from megatron_rl.rollout.sglang.wire.response_validation import (
    SERVER_FLAG,
    InvalidReply,
    abbreviate,
    as_list,
    as_object,
    as_text,
    as_token_ids,
    as_token_logprobs,
    decode_routes,
    expected_error,
    parse_count,
    parse_logprobs,
)

_BAN = -1.0e9
"""Added to a banned token's logit; too low for any practical temperature to sample the token."""
_MAX_RENORMALISED_TOP_K = 4096
"""SGLang's limit for log-probs after top-k."""
_MAX_ID = 1 << 31
BUSY_STATUSES = frozenset((429, 503))


def sent_rid(rid: str) -> str:
    """Append an end mark to the id: without it "r-1" would be a prefix of "r-10"."""
    return f"{rid};"


def validate(request: GenerationRequest, vocab_size: int, *, needs_adapter: bool = False) -> None:
    """Check a request. Raises RequestRejected if the server would reject the request or crash on it.

    ``needs_adapter``: also refuse a request that would run the model without its adapters.
    """
    problem = None
    if len(request.input_ids) == 0:
        problem = "input_ids is empty: expected at least one token"
    elif _greatest_id(request.input_ids) >= vocab_size:
        ids = np.asarray(request.input_ids)
        position = int(np.argmax((ids < 0) | (ids >= vocab_size)))
        problem = (
            f"input_ids[{position}] is {ids[position]}, outside the vocabulary of {vocab_size}: it would crash the server. "
            "Check that the tokenizer belongs to the model"
        )
    elif request.max_new_tokens < 1:
        problem = f"max_new_tokens is {request.max_new_tokens}: expected at least 1"
    elif not (math.isfinite(request.temperature) and request.temperature >= 0):
        problem = f"temperature is {request.temperature}: expected a number of at least 0"
    elif any(not 0 <= token < vocab_size for token in request.banned_token_ids):
        problem = f"banned_token_ids {list(request.banned_token_ids)}: expected ids below the vocabulary's {vocab_size}"
    elif request.logprobs_after_top_k and not 1 <= request.top_k <= _MAX_RENORMALISED_TOP_K:
        problem = f"log-probs after top-k need 1 <= top_k <= {_MAX_RENORMALISED_TOP_K}, got top_k={request.top_k}"
    elif request.images is not None and (count := _num_image_tokens(request)) != len(request.images.data):
        problem = f"{count} image tokens for {len(request.images.data)} images: the server would wait for the missing images forever"
    elif needs_adapter and not request.adapter:
        problem = "it names no adapter, so the server would run the model without policy.lora"
    if problem is not None:
        raise RequestRejected(f"request {request.rid!r}: {problem}")


def _greatest_id(ids: Sequence[int] | np.ndarray | TokenParts) -> int:
    """Greatest of ``ids`` (not empty); a negative id counts as greater than all others."""
    arrays = ids.parts if isinstance(ids, TokenParts) else [np.asarray(ids)]
    # View the ids as unsigned, so that one pass finds both negative and too large ids.
    return max(int(array.view(f"u{array.itemsize}").max()) for array in arrays if len(array))


def _num_image_tokens(request: GenerationRequest) -> int:
    return 0 if request.images is None else int((np.asarray(request.input_ids) == request.images.token_id).sum())


def generate_body(requests: Sequence[GenerationRequest], rids: Sequence[str]) -> dict[str, Any]:
    """Body of one ``/generate`` call for all ``requests``: JSON, except for ids that are arrays."""
    body: dict[str, Any] = {
        "rid": list(rids),
        "input_ids": [_one_array(request.input_ids) for request in requests],
        "sampling_params": [_sampling_params(request) for request in requests],
        "return_logprob": True,
    }
    if any(request.logprobs_after_top_k for request in requests):
        body["return_sampling_mask"] = [request.logprobs_after_top_k for request in requests]
    if any(request.routes is not None for request in requests):
        body["return_routed_experts"] = True  # SGLang's switch for the whole call
    if any(request.adapter for request in requests):
        body["lora_path"] = [request.adapter or None for request in requests]
    if any(request.images is not None and request.images.data for request in requests):
        body["image_data"] = [list(request.images.data) if request.images is not None else [] for request in requests]
    return body


def _one_array(ids: Sequence[int] | np.ndarray | TokenParts) -> Sequence[int] | np.ndarray:
    return np.asarray(ids) if isinstance(ids, TokenParts) else ids


def _sampling_params(request: GenerationRequest) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_new_tokens": request.max_new_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop_token_ids": list(request.stop_token_ids),
    }
    if request.stop_strings:
        params["stop"] = list(request.stop_strings)
    if request.banned_token_ids:
        params["logit_bias"] = {str(token): _BAN for token in request.banned_token_ids}
    if request.seed is not None:
        params["sampling_seed"] = request.seed
    return params


def max_answer_bytes(requests: Sequence[GenerationRequest]) -> int:
    """Upper bound for the size of a valid reply to ``generate_body(requests)``."""
    num_bytes = 1 << 20
    for request in requests:
        # Per token: id, log-prob and, with a tokenizer, text; for a hot token also all top-k ids.
        num_bytes += request.max_new_tokens * (256 + (16 * request.top_k if request.logprobs_after_top_k else 0))
        if request.routes is not None:
            num_tokens = request.num_prompt_tokens + request.max_new_tokens
            num_bytes += 6 * num_tokens * request.routes.num_layers * request.routes.top_k  # base64 of int32
    return num_bytes


def parse_generation(request: GenerationRequest, answer: Any, vocab_size: int = _MAX_ID) -> Generation:
    """Parse one sample of a reply. Raises only RequestRejected, PromptMismatch, InvalidReply or RetryableRequestError."""
    sample = as_object(answer, "the sample")
    meta = as_object(sample.get("meta_info"), "meta_info")
    finish = as_object(meta.get("finish_reason"), "finish_reason")
    reason = as_text(finish.get("type"), "finish_reason.type")
    if reason == "abort" and finish.get("status_code") is not None:
        raise _refusal(request, finish)
    token_ids = as_token_ids(
        sample.get("output_ids"), "output_ids", most=request.max_new_tokens, vocab_size=vocab_size
    )
    _check_counts(request, meta, len(token_ids))
    return Generation(
        token_ids=token_ids,
        logprobs=_logprobs(request, meta, token_ids),
        finish_reason=_finish_reason(request, finish, reason, token_ids),
        weight_version=_weight_version(request, meta, len(token_ids)),
        cached_tokens=parse_count(meta.get("cached_tokens", 0), "cached_tokens", most=request.num_prompt_tokens + request.max_new_tokens),
        stop_string=_stop_string(request, finish) if reason == "stop" else "",
        routes=_routes(request, meta, len(token_ids)),
        seconds=_seconds(meta.get("e2e_latency")),
        versions=_versions(request, meta, len(token_ids)),
    )


def _seconds(latency: object) -> float:
    """Latency in seconds; 0 for invalid values, because it is only displayed and fitted."""
    return float(latency) if isinstance(latency, (int, float)) and 0 < latency < math.inf else 0.0


def _refusal(request: GenerationRequest, finish: dict[str, Any]) -> Exception:
    status, message = finish["status_code"], abbreviate(finish.get("message"))
    if type(status) is not int:
        return expected_error("finish_reason.status_code", "a whole number", status)
    text = f"request {request.rid!r} was refused with {status}: {message}"
    if status == 400:
        return RequestRejected(text)
    return ServerBusy(text) if status in BUSY_STATUSES else RetryableRequestError(text)


def _check_counts(request: GenerationRequest, meta: dict[str, Any], num_new: int) -> None:
    if meta.get("completion_tokens", num_new) != num_new:
        raise expected_error("completion_tokens", f"{num_new}, the number of output_ids", meta["completion_tokens"])
    # The reply to a request that was aborted in the queue has no prompt length.
    got = meta.get("prompt_tokens", request.num_prompt_tokens)
    if got == request.num_prompt_tokens and type(got) is int:
        return
    if request.images is None or type(got) is not int or got < 0:
        raise expected_error("prompt_tokens", f"{request.num_prompt_tokens}", got)
    raise PromptMismatch(
        f"prompt {request.prompt_name or request.rid}: {request.num_prompt_tokens} tokens here, but {got} on the "
        "server. Both must count the same image tokens: check that the server's model folder has the "
        "preprocessor_config.json and tokenizer of policy.path, and that rollout.server_args do not change image sizes"
    )


def _logprobs(request: GenerationRequest, meta: dict[str, Any], token_ids: np.ndarray) -> np.ndarray:
    if request.logprobs_after_top_k and len(token_ids):
        name = "output_token_sampling_logprobs"
        return parse_logprobs(meta.get(name), name, token_ids)
    # The reply to a request that was aborted in the queue has no log-probs and no cache statistics.
    return as_token_logprobs(meta.get("output_token_logprobs", []), "output_token_logprobs", token_ids)


def _weight_version(request: GenerationRequest, meta: dict[str, Any], num_new: int) -> str:
    version = meta.get("weight_version", "") if num_new == 0 else meta.get("weight_version")
    return _expected_version(request, as_text(version, "weight_version"), num_new)


def _versions(request: GenerationRequest, meta: dict[str, Any], num_new: int) -> tuple[tuple[str, int, int], ...]:
    """Validated spans (version, start, end) of SGLang's [{version, start, end}]; they must cover all tokens in order."""
    entries = meta.get("weight_versions")
    if num_new == 0 or (entries is None and not request.needs_spans):
        return ()
    if entries is None:
        raise InvalidReply(
            "weight_versions: the server does not report which weights sampled which tokens; schedule.weight_update=in_flight "
            "needs SGLang 0.5.19 or later: install it, or set schedule.weight_update=between"
        )
    spans, last = [], 0
    for entry in as_list(entries, "weight_versions"):
        span = as_object(entry, "weight_versions")
        version = _expected_version(request, as_text(span.get("version"), "weight_versions.version"), num_new)
        start = parse_count(span.get("start"), "weight_versions.start", most=num_new)
        end = parse_count(span.get("end"), "weight_versions.end", most=num_new)
        if start != last or end <= start:
            raise expected_error("weight_versions", f"a span of tokens that starts at {last}", entry)
        spans.append((version, start, end))
        last = end
    if last != num_new:
        raise expected_error("weight_versions", f"spans up to the last of {num_new} tokens", entries)
    return tuple(spans)


def _expected_version(request: GenerationRequest, version: str, num_new: int) -> str:
    """Return ``version`` if it may have sampled the reply's tokens; raises InvalidReply otherwise."""
    expected = {request.weight_version, request.newest_version or request.weight_version}
    if num_new and expected.isdisjoint({"", version}):
        raise InvalidReply(
            f"weight_version: the server sampled with version {abbreviate(version)}, but version {request.weight_version} "
            "was published; it was restarted, or another trainer is attached to it"
        )
    return version


def _stop_string(request: GenerationRequest, finish: dict[str, Any]) -> str:
    """Stop string of the request that ended the response, or an empty string."""
    matched = finish.get("matched")
    if type(matched) is str and matched in request.stop_strings:
        return matched
    # Whole numbers are stop token ids. SGLang also ends a response with its own text if the sampler met NaN.
    if matched is not None and type(matched) not in (int, list):
        raise expected_error("finish_reason.matched", "a token id or one of the request's stop strings", matched)
    return ""


def _routes(request: GenerationRequest, meta: dict[str, Any], num_new: int) -> np.ndarray | None:
    if request.routes is None or num_new == 0:
        return None
    encoded = meta.get("routed_experts")
    if encoded is None:
        raise InvalidReply(
            f"routed_experts: the server does not report the experts of its tokens; start it with "
            f"--{SERVER_FLAG}, or set policy.moe.routing_replay to R2 or none"
        )
    try:
        return decode_routes(
            as_text(encoded, "routed_experts"), request.num_prompt_tokens + num_new - 1, request.routes
        )
    except InvalidReply as error:
        raise InvalidReply(f"routed_experts: {error}; check that the server runs the same model") from error


def _finish_reason(request: GenerationRequest, finish: dict[str, Any], reason: str, token_ids: np.ndarray) -> str:
    if reason not in ("stop", "length", "abort"):
        raise expected_error("finish_reason.type", "stop, length or abort", reason)
    if reason == "abort":
        return reason
    if not len(token_ids):
        raise expected_error("output_ids", f"at least one token, as it ended by {reason}", [])
    if token_ids[-1] in request.stop_token_ids:
        return "stop"  # SGLang checks the length first, so a stop token at the last position is reported as length
    # A token id in ``matched`` is a stop token of the model's own files.
    if reason == "stop" and not _stop_string(request, finish) and finish.get("matched") != token_ids[-1]:
        raise expected_error("finish_reason", f"a stop at the last token {token_ids[-1]}", finish)
    return reason
