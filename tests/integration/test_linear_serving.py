"""Models with linear attention on real SGLang servers: log-probs, windows, weights and routes as in transformers."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from megatron_rl.config.schema import Dtype, MoeConfig, ParallelConfig, RoutingReplay
from megatron_rl.data.batch import ROUTES
from megatron_rl.families.model_facts import read_model_json
from megatron_rl.families.sglang_limits import engine_problems
from megatron_rl.models.hf.model_config import load_hf_config
from megatron_rl.models.hf.weights import expected_names
from megatron_rl.parallel import topology
from megatron_rl.rollout.sglang.process.options import ServerOptions
from megatron_rl.rollout.sglang.process.server import SglangServer
from megatron_rl.rollout.sglang.wire.response_validation import decode_routes, route_shape
from megatron_rl.system.megatron_core import linear_attention_problem
from megatron_rl.training.engine import Engine
from megatron_rl.weights.publish import WeightPublisher
from megatron_rl.weights.verify import compare_checksums
from tests.integration.models_worker import pack
from tests.integration.preloaded import serving
from tests.tiny_families import load_with_transformers, make_family_model
from tests.tiny_models import make_tokenizer

TOLERANCE = 1e-4
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": dict(layer_types=None, full_attention_interval=2, mlp_only_layers=[], norm_topk_prob=True, num_experts=8),
    "qwen3_5": dict(layer_types=None, full_attention_interval=4),
    "qwen3_5_moe": dict(layer_types=None, full_attention_interval=2, num_experts=8),
}
"""Sizes of MLPs and experts are no multiples of 32, to which SGLang pads them on a CPU."""
ROUTED = ("qwen3_next", "qwen3_5_moe")
pytestmark = pytest.mark.skipif(bool(linear_attention_problem()), reason=linear_attention_problem())


class Served:
    """A server, and the same model in transformers."""

    def __init__(self, path: Path, server: SglangServer) -> None:
        self.path, self.server, self.model = path, server, load_with_transformers(path)

    def generate(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        sampling = {"max_new_tokens": num_tokens, "ignore_eos": True, "sampling_seed": len(prompt)}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "return_routed_experts": True}
        return requests.post(f"{self.server.url}/generate", json=body, timeout=60).json()

    def error(self, prompt: list[int], reply: dict[str, Any]) -> float:
        """Largest difference of the reply's log-probs to transformers."""
        tokens = torch.tensor([*prompt, *reply["output_ids"]])
        with torch.no_grad():
            logprobs = self.model(tokens[None]).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        expected = logprobs.gather(1, tokens[len(prompt) :, None])[:, 0]
        found = torch.tensor([entry[0] for entry in reply["meta_info"]["output_token_logprobs"]])
        return (found - expected).abs().max().item()


def make_served_model(folder: Path, name: str, dtype: str = "float32") -> Path:
    path = make_family_model(folder, name, eos_token_id=None, dtype=dtype, **MODELS[name])
    fields = json.loads((path / "config.json").read_text())
    # Fields that SGLang reads from another place than transformers.
    fields["full_attention_interval"] = MODELS[name]["full_attention_interval"]
    fields["partial_rotary_factor"] = fields["rope_parameters"]["partial_rotary_factor"]
    (path / "config.json").write_text(json.dumps(fields))
    make_tokenizer(path)
    assert not list(engine_problems(read_model_json(path), path))
    return path


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = make_served_model(tmp_path_factory.mktemp("model"), request.param)
    options = ServerOptions(str(path), deterministic=True, returns_routes=request.param in ROUTED)
    with serving(SglangServer(options, path / "sglang.log", start_timeout_s=300.0)) as server:
        yield Served(path, server)


def prompt_of(length: int, start: int = 3) -> list[int]:
    return [3 + (start + 7 * i) % 90 for i in range(length)]


def test_sampled_logprobs_of_a_batch_equal_transformers(served: Served) -> None:
    prompts = [prompt_of(length, length) for length in (1, 5, 64, 70, 130, 2, 33)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        replies = list(threads.map(lambda prompt: served.generate(prompt, 30), prompts))
    errors = [served.error(prompt, reply) for prompt, reply in zip(prompts, replies, strict=True)]
    assert max(errors) < TOLERANCE, errors


def test_a_window_resumes_the_state_at_the_end_of_the_one_before(served: Served) -> None:
    """The state of every ended request is cached with its prefix, so only the last sampled token is computed again."""
    prompt = prompt_of(75, 11)
    for _ in range(3):
        reply = served.generate(prompt, 12)
        assert served.error(prompt, reply) < TOLERANCE
        assert reply["meta_info"]["cached_tokens"] in (0, len(prompt) - 1)
        prompt = [*prompt, *reply["output_ids"]]
    assert reply["meta_info"]["cached_tokens"] == len(prompt) - 13
    # Inside a window there is no state: the server computes again from the one at its beginning.
    reply = served.generate(prompt[:-4], 5)
    assert served.error(prompt[:-4], reply) < TOLERANCE and reply["meta_info"]["cached_tokens"] == len(prompt) - 12


def test_replaying_the_servers_routes_gives_its_logprobs(served: Served) -> None:
    if not served.server.options.returns_routes:
        pytest.skip("a dense model has no routes")
    prompt, parallel = prompt_of(70, 23), ParallelConfig()
    reply = served.generate(prompt, 20)
    tokens = torch.tensor([*prompt, *reply["output_ids"]])
    # The last token has no record, and no log-prob depends on it.
    routes = decode_routes(reply["meta_info"]["routed_experts"], len(tokens) - 1, route_shape(served.path))
    padded = torch.cat([torch.from_numpy(routes), torch.zeros(1, *routes.shape[1:], dtype=torch.uint8)])
    mask = torch.arange(len(tokens)) >= len(prompt)
    batch = pack([tokens]).with_fields(mask=mask, **{ROUTES: padded})
    expected = torch.tensor([entry[0] for entry in reply["meta_info"]["output_token_logprobs"]])
    moe = MoeConfig(routing_replay=RoutingReplay.R3)
    place = topology.initialize(parallel, seed=1)
    try:
        engine = Engine("policy", served.path, parallel=parallel, topology=place, optimizer=None, moe=moe)
        (found,) = engine.logprobs([batch])
        shuffled = batch.fields[ROUTES][torch.randperm(len(tokens), generator=torch.Generator().manual_seed(1))]
        (other,) = engine.logprobs([batch.with_fields(**{ROUTES: shuffled})])
    finally:
        topology.destroy()
    assert (found[mask] - expected).abs().max() < TOLERANCE < (other[mask] - expected).abs().mean()


def test_servers_hold_published_weights_bit_by_bit(served: Served) -> None:
    expected = expected_names(load_hf_config(served.path), "policy")
    parallel = ParallelConfig()
    engine = Engine("policy", served.path, parallel=parallel, topology=topology.initialize(parallel, seed=1), optimizer=None)
    try:
        with torch.no_grad():
            for chunk in engine.chunks:
                for parameter in chunk.parameters():
                    parameter.mul_(1.05)
        engine.save_hf(served.path / "changed")
        weights = dict(engine.export_weights())
    finally:
        topology.destroy()
    served.model = load_with_transformers(served.path / "changed")
    publisher = WeightPublisher(40_000, 60.0, backend="gloo")
    try:
        servers = [(served.server.url, 1, served.server.incarnation)]
        publisher.publish(weights.items(), servers, 1, expected=expected)
        report = compare_checksums(servers, weights.items(), 60.0)
    finally:
        publisher.close()
    assert (report.reference, report.differing, report.uncompared) == ("trainer", {}, ())
    prompt = prompt_of(40, 5)
    assert served.error(prompt, served.generate(prompt, 12)) < TOLERANCE


def test_checksums_of_a_bfloat16_server_include_what_it_keeps_in_float32(tmp_path: Path) -> None:
    path, parallel = make_served_model(tmp_path, "qwen3_5", "bfloat16"), ParallelConfig()
    place = topology.initialize(parallel, seed=1)
    try:
        engine = Engine("policy", path, parallel=parallel, topology=place, optimizer=None, dtype=Dtype.bfloat16)
        weights = dict(engine.export_weights())
    finally:
        topology.destroy()
    decays = [name for name in weights if name.endswith("A_log")]
    assert {weights[name].dtype for name in decays} == {torch.bfloat16}
    with serving(SglangServer(ServerOptions(str(path), dtype="bfloat16"), path / "sglang.log", start_timeout_s=300.0)) as server:
        servers = [(server.url, 1, server.incarnation)]
        report = compare_checksums(servers, weights.items(), 60.0)
        assert (report.reference, report.differing, report.uncompared) == ("trainer", {}, ())
        weights[decays[0]] = weights[decays[0]] + 0.5
        assert compare_checksums(servers, weights.items(), 60.0).differing == {server.url: (decays[0],)}
