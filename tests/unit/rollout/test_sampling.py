"""Laws of requests and seeds: a seed depends only on the sample's identity, so a resumed run samples the same tokens."""

import asyncio
import hashlib

import pytest

from megatron_rl.data.trajectory import Prompt
from megatron_rl.rollout.generation import Sampling, named_seed, sample_seed, text_digest, trajectory_seed

SAMPLING = Sampling(temperature=0.7, top_p=0.9, top_k=5, stop_token_ids=(2, 3), seed=11)


def test_seeds_match_saved_runs():
    assert trajectory_seed(7, 12) == 7 * 1_000_003 + 12 * 7_919
    assert trajectory_seed(10**6, 0) == 10**6 * 1_000_003 % (2**31 - 1)
    digest = hashlib.blake2b(b"3/4/p\xc3\xa4", digest_size=12).digest()
    assert sample_seed(3, "pä", 4) == int.from_bytes(digest, "big") % (2**31 - 1)
    digest = hashlib.sha256(b"3 label-x-1-0-").digest()
    assert named_seed(3, "label-x-1-0-") == int.from_bytes(digest[:4], "big") % (2**31 - 1)


def test_seeds_are_none_without_a_base_seed():
    assert trajectory_seed(None, 1) is sample_seed(None, "p", 1) is named_seed(None, "n") is None


def test_different_texts_have_different_digests():
    texts = ["", "a", "ä", "\ud800", "a" * 1000]
    assert len({text_digest(text) for text in texts}) == len(texts)


@pytest.mark.parametrize(("prompt", "name"), [(Prompt("p", (5, 6), source="f:3"), "f:3"), (Prompt("p", (5, 6)), "p")])
def test_request_carries_all_sampling_parameters_and_the_prompt_source(prompt, name):
    request = asyncio.run(SAMPLING.request(prompt, (5, 6, 9), rid="r", max_new_tokens=4, seed=1))
    assert (request.rid, tuple(request.input_ids), request.max_new_tokens, request.seed) == ("r", (5, 6, 9), 4, 1)
    assert (request.temperature, request.top_p, request.top_k) == (0.7, 0.9, 5)
    assert tuple(request.stop_token_ids) == (2, 3) and request.prompt_name == name
    assert request.images is None and tuple(request.banned_token_ids) == ()
