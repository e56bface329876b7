"""Generation requests, their results and their failures, independent of the server software."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron_rl.data.trajectory import TokenParts, read_only
from megatron_rl.errors import UserError
from megatron_rl.system.http.json_http import ApiKey


@dataclass(frozen=True)
class RouteShape:
    num_layers: int
    """Number of all layers, dense layers included."""
    top_k: int
    num_experts: int


@dataclass(frozen=True)
class RequestImages:
    """Images of a request to a vision-language model; empty for a text prompt."""

    token_id: int
    """Image token: appears once per image in the request, and the server expands it to the image's tokens."""
    data: Sequence[str] = ()
    """Base64 of the image files, in the order of their tokens."""
    num_tokens: int = 0
    """Number of image tokens over all images, as counted by the trainer's processor."""


@dataclass(frozen=True)
class GenerationRequest:
    rid: str
    """Request id, unique among the requests in progress."""
    input_ids: Sequence[int] | np.ndarray | TokenParts
    max_new_tokens: int
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy, with log-probs computed at temperature 1."""
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: Sequence[int] = ()
    """All ids that end a response, including the end-of-text token."""
    stop_strings: Sequence[str] = ()
    """Texts that also end a response, if the server was started with a tokenizer; their tokens are returned."""
    banned_token_ids: Sequence[int] = ()
    """Tokens that are never sampled; log-probs are normalized over the other tokens."""
    logprobs_after_top_k: bool = False
    """Return log-probs of the distribution after top-k, renormalized over the top_k tokens; needs 1 <= top_k <= 4096."""
    seed: int | None = None
    """Sampling seed; used only by a server started with ``deterministic``. Such a server needs a distinct seed per
    sample: samples without a seed share SGLang's default seed and come out equal."""
    routes: RouteShape | None = None
    """Shape of the expert routes to return for each token, or None."""
    images: RequestImages | None = None
    """Images; set for every request to a vision-language model, also without images."""
    weight_version: str = ""
    """Weight version that must have sampled the response; empty accepts any version."""
    newest_version: str = ""
    """A second accepted weight version, if not empty."""
    adapter: str = ""
    """Adapter (``families.adapters.served_name``) that computes the response; empty: the model's own weights."""
    needs_spans: bool = False
    """The reply must report which weights sampled which tokens, because new weights may arrive during the request."""
    prompt_name: str = ""
    """Source of the prompt, for error messages."""
    response_name: str = ""
    """Requests with the same name continue one response: each input starts with the previous request's tokens."""
    group_name: str = ""
    """Requests with the same name start with the same prompt."""

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens as the server counts them, with every image expanded to its tokens."""
        if self.images is None:
            return len(self.input_ids)
        return len(self.input_ids) - len(self.images.data) + self.images.num_tokens


@dataclass(frozen=True, eq=False)
class Generation:
    token_ids: np.ndarray
    """[n] int32, including the stop token."""
    logprobs: np.ndarray
    """[n] float32: log-softmax of logits / temperature, before top-p and top-k unless ``logprobs_after_top_k`` was set."""
    finish_reason: str
    """stop, length, or abort (interrupted: continue from the last token)."""
    weight_version: str
    """Weight version that sampled the last token."""
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    stop_string: str = ""
    """Stop string that ended the response, if any."""
    routes: np.ndarray | None = None
    """[prompt + new tokens - 1, layers, k] uint8 or int16 (``wire/routes.py``), if requested."""
    seconds: float = 0.0
    """Seconds from the request's arrival at the server to its last token, as reported by the server; 0 if not reported."""
    versions: tuple[tuple[str, int, int], ...] = ()
    """(weight version, start, end) of each span sampled by one version; empty if one version sampled all tokens."""

    @property
    def spans(self) -> tuple[tuple[str, int, int], ...]:
        """``versions``, or a single span of all tokens if ``versions`` is empty."""
        return self.versions or ((self.weight_version, 0, len(self.token_ids)),)

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", read_only(self.token_ids, np.int32))
        object.__setattr__(self, "logprobs", read_only(self.logprobs, np.float32))


NOTHING_GENERATED = Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), "abort", "", 0)
"""Result of a request that was aborted before it was sent."""


class RequestRejected(UserError, ValueError):
    """The request itself is invalid; a retry cannot succeed."""


class PromptMismatch(UserError, RuntimeError):
    """The server counts a different number of prompt tokens: it splits the images differently."""


class RetryableRequestError(Exception):
    """One attempt failed; a retry may succeed."""


class ServerBusy(RetryableRequestError):
    """The server, or a gateway in front of it, is busy (429, 503)."""

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class ServerError(UserError, RuntimeError):
    """A server did not start, did not answer in time, or cannot be restarted; the message names the remedy."""


class ServerLost(UserError, RuntimeError):
    """No running server answered. ``url``: the last server tried; ``waited_s``: total time that the caller waited."""

    def __init__(self, url: str, waited_s: float, num_attempts: int, reason: str) -> None:
        self.url = url
        self.waited_s = waited_s
        self.num_attempts = num_attempts
        self.reason = reason
        super().__init__(
            f"SGLang server {url} is lost: {reason}. The caller waited {waited_s:.1f} s over {num_attempts} "
            "attempt(s). Check the server's log, restart the server (SglangServer.restart), send it the current weights "
            "and call the client's restore(); if the server is only slow, raise rollout.request_timeout_s."
        )


@dataclass(frozen=True)
class BatchCall:
    """One HTTP call for several ``requests``, which have been validated; ``rids`` are the ids sent."""

    url: str
    """URL of the server."""
    requests: Sequence[GenerationRequest]
    rids: Sequence[str]
    timeout_s: float | None
    """Timeout of the HTTP call in seconds; None if the caller ends the wait."""
    vocab_size: int
    api_key: ApiKey


@dataclass(frozen=True)
class BatchReply:
    status: int
    samples: Sequence[Generation | Exception] = ()
    """Results with status 200, one per request: a Generation, or InvalidReply, RequestRejected, PromptMismatch or
    RetryableRequestError."""
    text: str = ""
    """Start of the reply's text for any other status."""
    retry_after_s: float | None = None


class BatchCaller(Protocol):
    """Makes concurrent calls to any number of servers."""

    async def call(self, batch: BatchCall) -> BatchReply:
        """Send the batch. Raises HttpError or NoHttpReply, and InvalidReply for a reply that does not match the batch."""
        ...

    async def close(self) -> None: ...


class WorkerLost(UserError, RuntimeError):
    """The worker that made the call is gone; the server is not the cause. Retry with other request ids."""
