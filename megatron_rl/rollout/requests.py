"""Requests to an engine, their answers and their failures, whichever engine it is."""

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
    """All of them, dense ones too."""
    top_k: int
    num_experts: int


@dataclass(frozen=True)
class RequestImages:
    """The images of a request to a vision-language model; a prompt of text has none of them."""

    token_id: int
    """The image token: it stands once for each image, and the server puts as many there as the image takes."""
    data: Sequence[str] = ()
    """Base64 of the image files, in the order of their tokens."""
    num_tokens: int = 0
    """Image tokens of all of them, as the trainer's processor counts."""


@dataclass(frozen=True)
class GenerationRequest:
    rid: str
    """Unique among the requests in progress."""
    input_ids: Sequence[int] | np.ndarray | TokenParts
    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy; its log-probs are those of temperature 1."""
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: Sequence[int] = ()
    """All ids that end a response, the end-of-text token among them."""
    stop_strings: Sequence[str] = ()
    """Texts that end it too, where the server was started with a tokenizer; their tokens come back with the others."""
    banned_token_ids: Sequence[int] = ()
    """Never sampled; log-probs are those over the other tokens."""
    logprobs_after_top_k: bool = False
    """Log-probs of the distribution that is sampled from, renormalised over the top_k; needs 1 <= top_k <= 4096."""
    seed: int | None = None
    """Counts only on a server started with ``deterministic``. There, give every sample its own: all samples without
    one share SGLang's default seed and come out equal."""
    routes: RouteShape | None = None
    """Ask which experts each token went to, in a model of this shape."""
    images: RequestImages | None = None
    """Of requests to a vision-language model, also without images."""
    weight_version: str = ""
    """The answer must have been sampled by this one; empty: by any."""
    newest_version: str = ""
    """Where there is one, it may also have been sampled by this one."""
    needs_spans: bool = False
    """The answer has to say which weights sampled which tokens: new ones may come while it is generated."""
    prompt_name: str = ""
    """For messages: where the prompt comes from."""
    response_name: str = ""
    """Requests of one name continue one response: each begins with what the one before held."""
    group_name: str = ""
    """Requests of one name begin with the same prompt."""

    @property
    def num_prompt_tokens(self) -> int:
        """As the server counts them, every image as all its tokens."""
        if self.images is None:
            return len(self.input_ids)
        return len(self.input_ids) - len(self.images.data) + self.images.num_tokens


@dataclass(frozen=True, eq=False)
class Generation:
    token_ids: np.ndarray
    """[n] int32, the stop token included."""
    logprobs: np.ndarray
    """[n] float32: log-softmax of logits / temperature, before top-p and top-k unless the request says otherwise."""
    finish_reason: str
    """stop, length, or abort (cut from outside: continue from the last token)."""
    weight_version: str
    """That sampled the last token."""
    cached_tokens: int
    """Prompt tokens that the prefix cache held."""
    stop_string: str = ""
    """The text that ended it, if one of stop_strings did."""
    routes: np.ndarray | None = None
    """[prompt + new tokens - 1, layers, k] int16 (``rollout.routing``), if the request asked."""
    seconds: float = 0.0
    """From the request's arrival at the server to its last token, as the server says; 0: it does not."""
    versions: tuple[tuple[str, int, int], ...] = ()
    """(weight version, start, end) of the stretches of tokens that one version sampled; empty: one sampled all of them."""

    @property
    def spans(self) -> tuple[tuple[str, int, int], ...]:
        """As ``versions``, which one that is empty stands for."""
        return self.versions or ((self.weight_version, 0, len(self.token_ids)),)

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", read_only(self.token_ids, np.int32))
        object.__setattr__(self, "logprobs", read_only(self.logprobs, np.float32))


NOTHING_GENERATED = Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), "abort", "", 0)
"""The answer to a request that was aborted before it was sent."""


class RequestRejected(UserError, ValueError):
    """The request itself is at fault: sending it again cannot help."""


class PromptMismatch(UserError, RuntimeError):
    """The server's prompt has another number of tokens than ours: its images are cut in another way."""


class RetryableRequestError(Exception):
    """One attempt failed in a way that the next one may not."""


class ServerBusy(RetryableRequestError):
    """The server, or a gateway before it, asks for patience."""

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class ServerError(UserError, RuntimeError):
    """A server did not start, did not come up in time, or cannot be restarted; the message names the remedy."""


class ServerLost(UserError, RuntimeError):
    """No live server answered. ``url`` is the last one tried, ``waited_s`` how long the caller waited in all."""

    def __init__(self, url: str, waited_s: float, num_attempts: int, reason: str) -> None:
        self.url = url
        self.waited_s = waited_s
        self.num_attempts = num_attempts
        self.reason = reason
        super().__init__(
            f"SGLang server {url} is lost: {reason}. The caller waited {waited_s:.1f} s over {num_attempts} "
            "attempt(s). Look at the server's log, restart it (SglangServer.restart), send it the current weights "
            "and name it to the client's restore(); if it is only slow, raise rollout.request_timeout_s."
        )


@dataclass(frozen=True)
class BatchCall:
    """``requests`` have been validated; ``rids`` are those that they are sent with."""

    url: str
    """Of the server."""
    requests: Sequence[GenerationRequest]
    rids: Sequence[str]
    timeout_s: float | None
    """None: the caller ends the wait."""
    vocab_size: int
    api_key: ApiKey


@dataclass(frozen=True)
class BatchReply:
    status: int
    samples: Sequence[Generation | Exception] = ()
    """With status 200, one per request: BadAnswer, RequestRejected, PromptMismatch or AttemptFailed where it has none."""
    text: str = ""
    """With another status, how the answer begins."""
    retry_after_s: float | None = None


class BatchCaller(Protocol):
    """Makes calls to any number of servers at once."""

    async def call(self, batch: BatchCall) -> BatchReply:
        """Raises HttpError or NoAnswer, and BadAnswer for an answer that is not one of this batch."""
        ...

    async def close(self) -> None: ...


class WorkerLost(UserError, RuntimeError):
    """The worker that made the call is gone; the server is not at fault. Worth another try, under other request ids."""
