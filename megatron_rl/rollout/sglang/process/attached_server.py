"""Attached server, started by others: monitored, never stopped. Its /server_info must fit this run's configuration."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megatron_rl.config.checks.servers import RANDOM_DRAFT
from megatron_rl.families.sglang_limits import quantization_problem
from megatron_rl.rollout.requests import ServerError
from megatron_rl.rollout.sglang.process.liveness import generates_token
from megatron_rl.rollout.sglang.process.options import SAID_LABELS, ServerOptions
from megatron_rl.rollout.sglang.process.server import Progress, is_healthy
from megatron_rl.rollout.sglang.wire.response_validation import ApiKeyRejected, InvalidReply, as_object
from megatron_rl.system.gpu.gpu_environment import NCCL_DEFAULTS
from megatron_rl.system.http.json_http import HttpError, HttpThread, bearer, get_once
from megatron_rl.system.http.url_files import named_urls, urls_of_workers

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_TOKEN_TIMEOUT_S = 20.0
_GO_ON_TIMEOUT_S = 30.0
_SIZES = (
    "model_type", "num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "num_experts", "n_routed_experts", "num_local_experts", "num_experts_per_tok",
)  # fmt: skip
_SINGLE = {
    "pp_size": "a pipelined server gives two workers one rank of the weight sync group",
    "dp_size": "SGLang takes no weights from a trainer with data-parallel replicas; start as many servers",
}


class AttachedServer:
    """Same interface as SglangServer, but ``restart`` waits until others have restarted the server, and ``stop``
    does nothing."""

    is_ours = False

    def __init__(self, url: str, *, timeout_s: float = 300.0, api_key: str = "", progress: Progress = logger.info) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self.incarnation = 1
        self.num_restarts = 0
        self._api_key = api_key
        self._progress = progress
        self._abandoned = threading.Event()
        behind = workers_behind(self.url, api_key)
        if behind is not None:
            raise ServerError(
                f"{self.url} is a router (sglang-router, SGLang Model Gateway), not a server. A run uses the servers behind a router "
                f"if it is the only entry of rollout.urls; next to other entries list them: {','.join(behind) or 'it has none'}"
            )
        self._identity = self._read_identity()

    def is_same(self, other: object) -> bool:
        """True if ``other`` is the same process under another address (a name, 127.0.0.1, another network)."""
        if not isinstance(other, AttachedServer) or all(part is None for part in self._identity):
            return False
        return self._identity == other._identity

    def healthy(self, timeout_s: float = 5.0) -> bool:
        """True if the server and its scheduler answer. Counts a new incarnation if another process answers."""
        try:
            if not is_healthy(self.url, timeout_s):
                return False
            identity = self._read_identity(timeout_s)
        except ServerError:
            return False
        # Another process under the same URL has neither the process group nor the weights of the previous one.
        if identity != self._identity:
            self._identity = identity
            self.incarnation += 1
        return True

    def restart(self, while_waiting: Callable[[], None] = lambda: None) -> None:
        """Wait until the server's owner has restarted it and it generates a token.

        Raises ServerError after ``timeout_s``, or once the run ends.
        """
        deadline = time.monotonic() + self.timeout_s
        self._progress(f"waiting up to {self.timeout_s:.0f} s for server {self.url}, which this run did not start")
        while not (self.healthy() and generates_token(self.url, api_key=self._api_key, timeout_s=_TOKEN_TIMEOUT_S)):
            if time.monotonic() > deadline:
                raise ServerError(
                    f"server {self.url} did not come back within {self.timeout_s:.0f} s; this run attached to it and "
                    "cannot start it. Restart it, or remove it from rollout.urls."
                )
            if self._abandoned.wait(_POLL_S):
                raise ServerError(f"stopped waiting for server {self.url}: the run ends")
            while_waiting()
        self.num_restarts += 1

    def abandon(self) -> None:
        """Stop waiting, because the run ends."""
        self._abandoned.set()

    def stop(self, grace_s: float = 0.0) -> None:
        """Does nothing: others own the server."""

    def go_on(self) -> None:
        """Resume generation if a run killed during a publish has left the server paused. Raises ServerError."""
        headers = bearer(self._api_key)
        try:
            with HttpThread() as http:
                url = self.url + "/continue_generation"
                answer = http.submit(http.session.post(url, {}, timeout_s=_GO_ON_TIMEOUT_S, headers=headers)).result()
        except HttpError as error:
            raise ServerError(f"server {self.url} did not answer /continue_generation ({error}); see its log") from error
        if answer.status != 200:
            raise ServerError(
                f"server {self.url} answered /continue_generation with {answer.status}: {answer.text[:200]}; a run that was killed "
                "may have left it paused: restart it"
            )

    def model_info(self) -> dict[str, Any]:
        """Model information of the server. Raises ServerError if no SGLang server answers."""
        return _ask(self.url, "/model_info", self._api_key)

    def server_info(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """Options of the running server, by SGLang's names. Raises ServerError as ``model_info``."""
        # The scheduler contributes to this reply, so a hung scheduler is noticed.
        return _ask(self.url, "/server_info", self._api_key, timeout_s)

    def _read_identity(self, timeout_s: float = 10.0) -> tuple[Any, ...]:
        info = self.server_info(timeout_s)
        return tuple(info.get(name) for name in _IDENTITY_FIELDS)


_IDENTITY_FIELDS = ("startup_time", "random_seed", "launch_command")
"""Fields of /server_info that differ between two processes under the same URL."""


def workers_behind(url: str, api_key: str, timeout_s: float = 10.0) -> list[str] | None:
    """URLs of the servers behind an sglang-router (SGLang Model Gateway); None if ``url`` is not a router."""
    try:
        answer = get_once(url + "/workers", timeout_s=timeout_s, headers=bearer(api_key))
        content = answer.json() if answer.status == 200 else None
    except (HttpError, ValueError, RecursionError):
        return None
    return urls_of_workers(content) if isinstance(content, dict) else None


def discovery_source(urls: Sequence[str], urls_file: str, api_key: str) -> str:
    """Source that lists a run's servers and is polled (``named_urls``): ``urls_file``, or a router that is the only
    entry of ``urls``.

    Empty if ``urls`` are the servers themselves.
    """
    if urls_file:
        return urls_file
    is_router = len(urls) == 1 and workers_behind(urls[0].rstrip("/"), api_key) is not None
    return urls[0].rstrip("/") if is_router else ""


def attached_urls(urls: Sequence[str], urls_file: str, api_key: str) -> list[str]:
    """URLs of the servers listed so far. Raises UserError and OSError as ``named_urls``."""
    named_by = discovery_source(urls, urls_file, api_key)
    return named_urls(named_by, api_key) if named_by else list(urls)


def _ask(url: str, path: str, api_key: str, timeout_s: float = 10.0) -> dict[str, Any]:
    try:
        answer = get_once(url + path, timeout_s=timeout_s, headers=bearer(api_key))
        if answer.status in (401, 403):
            raise ApiKeyRejected(url, answer.status, has_key=bool(api_key))
        if answer.status == 200:
            return as_object(answer.json(), path)
        problem = f"it answered {answer.status}: {answer.text[:200]}"
    except (HttpError, InvalidReply) as error:
        problem = str(error)
    except (ValueError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise ServerError(
        f"no SGLang server answers at {url} ({problem}). Expected {path} to answer within {timeout_s:.0f} s: check the "
        f"address (rollout.urls, rollout.urls_file or eval.urls) and that the server is up (GET {url}/health)."
    )


def disagreements(info: Mapping[str, Any], ours: ServerOptions, *, broadcasts: bool, model_type: object = None) -> Iterator[str]:
    """Yield the reasons why weight sync would hang or fail, a sleep would free nothing, or drafts would be random.
    A field missing in ``info`` is assumed to match.

    ``ours``: options that this run would start a server with. ``broadcasts``: weights travel over a process group
    of trainer and servers.
    """
    if problem := quantization_problem(info.get("quantization"), info.get("load_format"), model_type):
        yield f"it has {problem}"
    size = info.get("tp_size", ours.tensor_parallel_size)
    if size != ours.tensor_parallel_size:
        yield (
            f"it has tp_size {size}, rollout.tensor_parallel_size is {ours.tensor_parallel_size}; set that to {size}, or start it "
            f"with --tensor-parallel-size {ours.tensor_parallel_size}"
        )
    yield from (f"it has {name} {info[name]}: {reason}" for name, reason in _SINGLE.items() if info.get(name, 1) != 1)
    algorithm = info.get("speculative_algorithm")
    random = info.get("load_format") == "dummy" and not info.get("speculative_draft_load_format")
    if algorithm and algorithm != "NGRAM" and random and not ours.load_weights:
        yield f"its speculative_algorithm {algorithm} drafts at random: {RANDOM_DRAFT}. Start it with --speculative-draft-load-format auto"
    device = info.get("device", ours.device)
    if broadcasts and device != ours.device:
        yield f"it runs on {device} and the trainer on {ours.device}: no process group has both; set rollout.weight_sync=disk"
    # The remaining checks concern GPUs only.
    if ours.device == "cpu":
        return
    if ours.can_sleep and info.get("enable_memory_saver") is False:
        yield "it cannot give its memory to the trainer (rollout.placement=colocated); start it with enable-memory-saver=true"
    if broadcasts:
        theirs = nccl_of(info)
        differing = [name for name, value in ours.nccl.items() if theirs.get(name, value) != value]
        if differing:
            differences = ", ".join(f"{name} is {theirs[name]} there and {ours.nccl[name]} here" for name in differing)
            yield f"NCCL would fail or hang: {differences}; export the same values before both are started"


def model_differences(served: Mapping[str, Any], trained: Mapping[str, Any]) -> str:
    """Differences in size between two model configurations (``read_model_json``), or an empty string.

    A layer that the trainer does not have would silently keep the weights that the server loaded.
    """
    differing = [name for name in _SIZES if name in served and name in trained and served[name] != trained[name]]
    return ", ".join(f"{name} {served[name]} (policy.path: {trained[name]})" for name in differing)


def nccl_of(info: Mapping[str, Any]) -> dict[str, str]:
    """NCCL variables of a server: as reported, or as SGLang sets them for its options. Unreported variables are
    omitted."""
    reported = info.get(SAID_LABELS)
    known = {name: str(reported[name]) for name in NCCL_DEFAULTS if name in reported} if isinstance(reported, Mapping) else {}
    if info.get("enable_symm_mem"):
        known |= dict.fromkeys(NCCL_DEFAULTS, "1")
    if info.get("enable_nccl_nvls"):
        known["NCCL_NVLS_ENABLE"] = "1"
    return known
