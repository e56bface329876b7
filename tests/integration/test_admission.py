"""A full KV cache: which requests a real SGLang server starts when, and which it retracts, against the simulator's law."""

import json
import random
import urllib.request

import numpy as np
import pytest

from megatron_rl.desk.simulate.decoding import ServerLimits, ServerRequests, served_in_turns
from megatron_rl.desk.simulate.timing import Decode, Timing
from megatron_rl.rollout.sglang.process.options import ServerOptions
from megatron_rl.rollout.sglang.process.server import SglangServer
from tests.integration.preloaded import serving
from tests.tiny_models import make_tiny_model

KV_TOKENS, CONSERVATIVENESS, ROOM, NUM_REQUESTS = 2000, 0.1, 150, 64
ARGUMENTS = {
    "max-total-tokens": KV_TOKENS,
    "schedule-conservativeness": CONSERVATIVENESS,
    # Without overlap the scheduler knows a request's end before the next step, as the simulator does.
    "disable-overlap-schedule": True,
    # In arrival order; otherwise retracted requests, whose prompts may still be cached, could go first.
    "schedule-policy": "fcfs",
    "chunked-prefill-size": 4096,
    # Replies contain the time at which a request started.
    "enable-metrics": True,
    # With other seeds the responses have other lengths, and few or no requests are retracted.
    "random-seed": 1,
}


@pytest.fixture(scope="module")
def replies(tmp_path_factory):
    """Prompts, and the server's replies to all of them in one HTTP request, so that all arrive at once."""
    folder = tmp_path_factory.mktemp("admission")
    options = ServerOptions(str(make_tiny_model(folder / "model")), server_args=ARGUMENTS)
    server = SglangServer(options, folder / "sglang.log", start_timeout_s=400.0)
    rng = random.Random(0)
    prompts = [[20 + i, *(rng.randrange(20, 128) for _ in range(rng.randrange(5, 40)))] for i in range(NUM_REQUESTS)]
    stops = [{"max_new_tokens": ROOM, "stop_token_ids": [3, 4] if i % 2 else []} for i in range(NUM_REQUESTS)]
    with serving(server):
        body = json.dumps({"input_ids": prompts, "sampling_params": stops}).encode()
        call = urllib.request.Request(f"{server.url}/generate", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(call, timeout=120) as answer:
            return prompts, json.load(answer)


def test_a_full_server_admits_and_retracts_request_by_request_as_simulated(replies):
    prompts, answers = replies
    prefix, new = (np.array([len(tokens) for tokens in column]) for column in (prompts, [one["output_ids"] for one in answers]))
    limits = ServerLimits(kv_tokens=KV_TOKENS, prefill_tokens=4096, conservativeness=CONSERVATIVENESS, sent_share=np.inf)
    rooms = np.full(NUM_REQUESTS, ROOM)
    trace, first_pass = served_in_turns(ServerRequests(prefix, new, rooms, rooms), Timing(Decode((1.0,), (1.0,))), limits)
    retractions = [one["meta_info"]["num_retractions"] for one in answers]
    assert trace.retractions.tolist() == retractions
    assert sum(retractions) >= 1
    starts = [one["meta_info"]["forward_entry_time"] for one in answers]
    assert ranks(first_pass) == ranks(starts)


def ranks(values):
    return np.unique(values, return_inverse=True)[1].tolist()
