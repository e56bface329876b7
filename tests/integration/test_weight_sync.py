"""Weight sync into two real SGLang servers: right values, right version, clear failures, recovery from each."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests
import torch
from safetensors.torch import load_file

from megatron_rl.config.derived import WeightMethod
from megatron_rl.rollout.sglang.process.options import ServerOptions
from megatron_rl.rollout.sglang.process.server import SglangServer, free_port
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops
from megatron_rl.weights.bucket_plan import CoverageError
from megatron_rl.weights.buckets import exhaust
from megatron_rl.weights.publish import WeightPublisher, WeightSyncError
from megatron_rl.weights.verify import compare_checksums
from tests.integration.preloaded import preloading
from tests.tiny_models import make_tiny_model

TIMEOUT_S = 60.0
SHORT_TIMEOUT_S = 4.0
BUCKET_BYTES = 40_000
"""Makes about ten buckets of the tiny model's weights."""
MAX_LOGPROB_ERROR = 1e-4
PROMPT = [3 + i % 60 for i in range(48)]

pytestmark = pytest.mark.timeout(400)


class Setup:
    """Two servers, and the transformers model whose weights they should hold."""

    def __init__(self, model_path, servers: list[SglangServer]):
        declare_torchvision_ops()
        from transformers import AutoModelForCausalLM

        self.model_path = model_path
        self.servers = servers
        self.model = AutoModelForCausalLM.from_pretrained(model_path)
        self.expected = {name: tuple(weight.shape) for name, weight in load_file(model_path / "model.safetensors").items()}
        self.version = 0

    @property
    def addresses(self) -> list[tuple[str, int, int]]:
        return [(server.url, 1, server.incarnation) for server in self.servers]

    def train(self) -> int:
        """Change every weight noticeably; returns the new version."""
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * parameter.std().clamp(min=1e-3) * 0.5)
        return self.version

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def generate(self, server: SglangServer, num_tokens: int = 8) -> dict:
        sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
        return requests.post(f"{server.url}/generate", json=body, timeout=120).json()

    def logprob_error(self, answer: dict, start: int = 0, end: int | None = None) -> float:
        """Largest difference to the transformers model over tokens [start, end) of a server's answer."""
        ids = torch.tensor([PROMPT + answer["output_ids"]])
        with torch.no_grad():
            logprobs = torch.log_softmax(self.model(ids).logits[0].float(), dim=-1)
        reference = logprobs[len(PROMPT) - 1 : -1].gather(1, ids[0, len(PROMPT) :, None])[:, 0]
        served = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
        return (served - reference)[start:end].abs().max().item()

    def assert_in_sync(self) -> None:
        for server in self.servers:
            answer = self.generate(server)
            assert self.logprob_error(answer) < MAX_LOGPROB_ERROR
            assert answer["meta_info"]["weight_version"] == str(self.version)


@pytest.fixture(scope="module")
def setup(tmp_path_factory) -> Iterator[Setup]:
    folder = tmp_path_factory.mktemp("weight_sync")
    # Sizes that SGLang pads on a CPU.
    model_path = make_tiny_model(folder / "model", vocab_size=100, intermediate_size=80)
    options = ServerOptions(model_path=str(model_path), server_args={"max-total-tokens": 20000})
    servers = [SglangServer(options, folder / f"server{i}.log") for i in range(2)]
    try:
        with preloading():
            for server in servers:
                server.spawn()
        for server in servers:
            server.wait_ready()
        yield Setup(model_path, servers)
    finally:
        for server in servers:
            server.stop(grace_s=0.0)


@pytest.fixture(scope="module")
def shared_publisher() -> Iterator[WeightPublisher]:
    publisher = WeightPublisher(BUCKET_BYTES, TIMEOUT_S, backend="gloo")
    yield publisher
    publisher.close()


@pytest.fixture
def publisher(setup: Setup, shared_publisher: WeightPublisher) -> WeightPublisher:
    """The shared publisher, with all servers in sync."""
    shared_publisher.publish(setup.weights().items(), setup.addresses, setup.version, expected=setup.expected)
    return shared_publisher


def test_published_weights_give_transformers_logprobs_and_carry_their_version(setup, publisher):
    for _ in range(2):  # the second one uses the same group again
        version = setup.train()
        before = setup.generate(setup.servers[0])
        assert setup.logprob_error(before) > 100 * MAX_LOGPROB_ERROR  # the change is large enough to be seen
        result = publisher.publish(setup.weights().items(), setup.addresses, version, expected=setup.expected)
        assert result.num_bytes == sum(weight.nbytes for weight in setup.weights().values())
        assert result.num_buckets > 5
        setup.assert_in_sync()


def test_prefixes_cached_under_old_weights_are_not_used(setup, publisher):
    for server in setup.servers:
        setup.generate(server)
        assert setup.generate(server)["meta_info"]["cached_tokens"] > 0  # there is a cache to be stale
    publisher.publish(setup.weights().items(), setup.addresses, setup.train())
    for server in setup.servers:
        answer = setup.generate(server)
        assert answer["meta_info"]["cached_tokens"] == 0
        assert setup.logprob_error(answer) < MAX_LOGPROB_ERROR


@pytest.mark.parametrize("bucket_bytes", [1_000, 1 << 26])
def test_the_bucket_size_does_not_change_the_received_weights(setup, bucket_bytes):
    publisher = WeightPublisher(bucket_bytes, TIMEOUT_S, backend="gloo")
    version = setup.train()
    try:
        # Transposed storage and an iterator that reuses its memory are fine: each tensor is copied as it comes.
        stream = ((name, weight.t().contiguous().t() if weight.dim() == 2 else weight)
                  for name, weight in setup.weights().items())
        result = publisher.publish(stream, setup.addresses, version)
    finally:
        publisher.close()
    assert (result.num_buckets == 1) == (bucket_bytes > result.num_bytes)
    report = compare_checksums(setup.addresses, setup.weights().items())
    assert (report.reference, report.differing, report.uncompared) == ("trainer", {}, ())
    assert report.num_compared == 2 * (3 + 2 * 7)  # embedding, norm, head; 7 fused parameters a layer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights | {"model.layers.9.mlp.up_proj.weight": torch.zeros(3)}, "unexpected: model.layers.9"),
        (lambda weights: weights | {"model.norm.weight": torch.zeros(7)}, r"wrong shape: model.norm.weight \[7\]"),
        (lambda weights: {n: w for n, w in weights.items() if n != "lm_head.weight"}, "missing: lm_head.weight"),
    ],
)
def test_wrong_tensors_are_refused_before_anything_is_sent(setup, publisher, change, message):
    one_bucket = WeightPublisher(1 << 26, TIMEOUT_S, backend="gloo")
    wrong = {name: weight + 1 for name, weight in change(setup.weights()).items()}
    with pytest.raises(WeightSyncError, match=message) as caught:
        one_bucket.publish(wrong.items(), setup.addresses, 999, expected=setup.expected)
    one_bucket.close()
    assert isinstance(caught.value.__cause__, CoverageError)
    assert "keep their old weights" in str(caught.value)
    setup.assert_in_sync()


def test_a_stream_that_fails_between_buckets_is_reported_and_the_next_publish_succeeds(setup, publisher):
    def broken():
        for i, item in enumerate(setup.weights().items()):
            if i == 12:
                raise RuntimeError("gather timed out")
            yield item

    version = setup.train()
    with pytest.raises(WeightSyncError, match="failed after 12 tensors with RuntimeError: gather timed out") as caught:
        publisher.publish(broken(), setup.addresses, version)
    assert "mix of old and new weights" in str(caught.value)
    publisher.publish(setup.weights().items(), setup.addresses, version)
    setup.assert_in_sync()


def test_a_corrupted_parameter_is_detected_by_its_checksum(setup, publisher):
    corrupted = {name: weight.clone() for name, weight in setup.weights().items()}
    corrupted["model.layers.1.self_attn.k_proj.weight"][0, 0] += 1e-6
    first, second = setup.addresses
    alone = WeightPublisher(BUCKET_BYTES, TIMEOUT_S, backend="gloo")
    try:
        alone.publish(corrupted.items(), [second], setup.version)
    finally:
        alone.close()
    name = "model.layers.1.self_attn.qkv_proj.weight"
    report = compare_checksums(setup.addresses, setup.weights().items())
    assert report.differing == {second[0]: (name,)}
    among_servers = compare_checksums(setup.addresses)
    assert (among_servers.reference, among_servers.differing) == ("servers", {second[0]: (name,)})
    assert compare_checksums([first]).reference == "nothing"


def test_weights_use_a_shared_folder_if_no_group_can_be_formed(setup, publisher, tmp_path):
    through_disk = WeightPublisher(BUCKET_BYTES, TIMEOUT_S, method=WeightMethod.disk, folder=tmp_path)
    for _ in range(2):
        version = setup.train()
        through_disk.publish(setup.weights().items(), setup.addresses, version, expected=setup.expected)
        setup.assert_in_sync()
    assert [path.name for path in tmp_path.iterdir()] == [f"weights-{version}"]
    with pytest.raises(WeightSyncError, match="wrong shape"):
        wrong = setup.weights() | {"model.norm.weight": torch.zeros(7)}
        through_disk.publish(wrong.items(), setup.addresses, version + 1, expected=setup.expected)
    setup.assert_in_sync()


def test_a_publish_waits_for_running_requests(setup, publisher):
    num_tokens = 120
    server = setup.servers[0]
    impatient = WeightPublisher(BUCKET_BYTES, 2.0, backend="gloo")
    old = {name: weight.clone() for name, weight in setup.weights().items()}

    def slow_down(seconds_per_token: float | None) -> None:
        requests.post(f"{server.url}/slow_down", json={"forward_sleep_time": seconds_per_token}, timeout=30)

    slow_down(0.05)
    try:
        with ThreadPoolExecutor() as threads:
            running = threads.submit(setup.generate, server, num_tokens)
            time.sleep(0.5)
            with pytest.raises(WeightSyncError, match="finishes its running requests first"):
                impatient.publish(setup.weights().items(), setup.addresses, setup.version)
            assert not running.done()
            requests.post(f"{server.url}/abort_request", json={"abort_all": True}, timeout=30)
            running.result()

            slow_down(0.01)
            running = threads.submit(setup.generate, server, num_tokens)
            time.sleep(0.5)
            assert not running.done()
            publisher.publish(setup.weights().items(), setup.addresses, setup.train())
            answer = running.result()
    finally:
        slow_down(None)
        impatient.close()
    setup.assert_in_sync()
    assert len(answer["output_ids"]) == num_tokens
    assert answer["meta_info"]["weight_version"] == str(setup.version - 1)
    setup.model.load_state_dict(old, strict=False)
    assert setup.logprob_error(answer) < MAX_LOGPROB_ERROR


def test_requests_paused_by_a_publish_resume_with_the_new_weights_and_no_older_prefix(setup, publisher):
    num_tokens, server = 100, setup.servers[0]
    pausing = WeightPublisher(BUCKET_BYTES, TIMEOUT_S, backend="gloo", pauses=True)
    old = {name: weight.clone() for name, weight in setup.weights().items()}
    assert setup.generate(server)["meta_info"]["cached_tokens"] == 0 < setup.generate(server)["meta_info"]["cached_tokens"]
    requests.post(f"{server.url}/slow_down", json={"forward_sleep_time": 0.04}, timeout=30)
    try:
        with ThreadPoolExecutor() as threads:
            running = threads.submit(setup.generate, server, num_tokens)
            time.sleep(1.0)
            pausing.publish(setup.weights().items(), setup.addresses, setup.train())
            assert not running.done()
            # Sent beside it, with the prefix that both have in common: it may be cached, but by the new weights.
            beside = setup.generate(server)
            answer = running.result()
    finally:
        requests.post(f"{server.url}/slow_down", json={"forward_sleep_time": None}, timeout=30)
        pausing.close()
    assert setup.logprob_error(beside) < MAX_LOGPROB_ERROR and len(answer["output_ids"]) == num_tokens
    spans = answer["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == [str(setup.version - 1), str(setup.version)]
    boundary = spans[1]["start"]
    assert 0 < boundary < num_tokens
    # Tokens after the update come from the new weights alone: their prefix was computed again.
    assert setup.logprob_error(answer, start=boundary) < MAX_LOGPROB_ERROR
    setup.assert_in_sync()
    setup.model.load_state_dict(old, strict=False)
    assert setup.logprob_error(answer, end=boundary) < MAX_LOGPROB_ERROR


def test_a_server_that_hangs_in_a_broadcast_is_an_error_at_the_deadline(setup):
    hasty = WeightPublisher(BUCKET_BYTES, SHORT_TIMEOUT_S, backend="gloo")
    hanging = setup.servers[1]
    version = setup.train()

    def stream():
        for i, item in enumerate(setup.weights().items()):
            if i == 12:
                os.killpg(hanging.pid, signal.SIGSTOP)
            yield item

    started = time.monotonic()
    try:
        with pytest.raises(WeightSyncError, match=f"waited {SHORT_TIMEOUT_S:g} s.*{hanging.url}"):
            hasty.publish(stream(), setup.addresses, version)
        assert time.monotonic() - started < 5 * SHORT_TIMEOUT_S
    finally:
        os.killpg(hanging.pid, signal.SIGCONT)
    patient = WeightPublisher(BUCKET_BYTES, TIMEOUT_S, backend="gloo")
    patient.publish(setup.weights().items(), setup.addresses, version)
    setup.assert_in_sync()
    hasty.close()
    patient.close()


def test_a_server_killed_inside_a_publish_is_named_and_the_next_publish_reaches_its_successor(setup, publisher):
    victim, survivor = setup.servers[1], setup.servers[0]
    version = setup.train()
    walked = []

    def stream():
        for i, (name, weight) in enumerate(setup.weights().items()):
            if i == 12:
                os.killpg(victim.pid, signal.SIGKILL)
            walked.append(name)
            yield name, weight

    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=f"{victim.url} is unreachable or exited"):
        publisher.publish(stream(), setup.addresses, version)
    assert time.monotonic() - started < 20
    assert walked == list(setup.weights())  # other trainer ranks wait inside the stream's collectives
    # The survivor is free again at once, without its dead peer.
    publisher.publish(setup.weights().items(), setup.addresses[:1], version)
    assert setup.logprob_error(setup.generate(survivor)) < MAX_LOGPROB_ERROR

    victim.restart()
    publisher.publish(setup.weights().items(), setup.addresses, version)
    setup.assert_in_sync()


def test_a_group_that_cannot_form_ends_at_the_deadline_and_frees_the_servers(setup):
    publisher = WeightPublisher(BUCKET_BYTES, SHORT_TIMEOUT_S, backend="gloo")
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="3 server workers to join"):
        publisher.publish(setup.weights().items(), [(setup.servers[0].url, 2, 1), (setup.servers[1].url, 1, 1)], 1)
    assert time.monotonic() - started < 5 * SHORT_TIMEOUT_S
    patient = WeightPublisher(BUCKET_BYTES, TIMEOUT_S, backend="gloo")
    patient.publish(setup.weights().items(), setup.addresses, setup.version)
    setup.assert_in_sync()
    patient.close()


def test_an_unreachable_server_is_named_at_once(setup):
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=f"{url} is unreachable"):
        WeightPublisher(BUCKET_BYTES, TIMEOUT_S, backend="gloo").publish(setup.weights().items(), [(url, 1, 0)], 1)
    assert time.monotonic() - started < 5


def test_a_server_with_another_version_after_a_publish_is_an_error(setup, tmp_path):
    with answering_server({"success": True, "weight_version": "41"}) as url:
        publisher = WeightPublisher(BUCKET_BYTES, TIMEOUT_S, method=WeightMethod.disk, folder=tmp_path)
        with pytest.raises(WeightSyncError, match="shows weight version '41' instead of '42'"):
            publisher.publish(setup.weights().items(), [(url, 1, 0)], 42)


def test_other_trainer_ranks_consume_the_whole_stream():
    stream = iter([("a", torch.zeros(1)), ("b", torch.zeros(1))])
    exhaust(stream)
    assert next(stream, None) is None


@contextmanager
def answering_server(body: dict) -> Iterator[str]:
    """An HTTP server that answers everything with ``body``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            content = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
