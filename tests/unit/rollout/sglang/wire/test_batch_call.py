"""Laws of the fast reader: it returns the same values as orjson and numpy, or leaves the reply to them."""

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.rollout.requests import GenerationRequest
from megatron_rl.rollout.sglang.wire import batch_call
from megatron_rl.rollout.sglang.wire.batch_call import compiled_loops, with_arrays
from megatron_rl.rollout.sglang.wire.protocol import parse_generation
from megatron_rl.rollout.sglang.wire.response_validation import InvalidReply


def read(content):
    return with_arrays(content, *compiled_loops())


def float32s(numbers):
    with np.errstate(over="ignore"):
        return np.array(numbers, np.float64).astype(np.float32)


def same_as_orjson(found, content):
    """Return whether arrays and all other values equal orjson's, bit for bit."""
    expected = orjson.loads(content)
    for sample, other in zip(found, expected, strict=True):
        ids, pairs = sample["output_ids"], sample["meta_info"]["output_token_logprobs"]
        entries = other["meta_info"]["output_token_logprobs"]
        assert isinstance(ids, np.ndarray) and isinstance(pairs, tuple)
        assert ids.tolist() == other["output_ids"] and pairs[0].tolist() == [entry[1] for entry in entries]
        logprobs = float32s([entry[0] for entry in entries])
        assert np.array_equal(pairs[1].view(np.int32), logprobs.view(np.int32))
        sample["output_ids"], sample["meta_info"]["output_token_logprobs"] = other["output_ids"], entries
    assert found == expected


def answer(pairs, text=""):
    meta = {"id": "r", "finish_reason": {"type": "length"}, "output_token_logprobs": [[p, token, None] for p, token in pairs]}
    return {"text": text, "output_ids": [token for _, token in pairs], "meta_info": meta}


TOKENS = st.integers(0, 2**31 - 1)
FROM_FLOAT32 = st.floats(-60, 0, width=32)
PAIRS = st.lists(st.tuples(FROM_FLOAT32 | st.floats(-1e4, 1e-4) | st.integers(-5, 0), TOKENS), min_size=1, max_size=6)
TEXTS = st.sampled_from(["", '"output_ids":[1,2]', '"output_token_logprobs":[[1,2,null]]', "]]", '\\"output_ids":['])


@settings(max_examples=300)
@given(st.lists(st.tuples(PAIRS, TEXTS), min_size=1, max_size=3))
def test_fast_reader_returns_the_same_as_orjson(samples):
    content = orjson.dumps([answer(pairs, text) for pairs, text in samples])
    found = read(content)
    if found is not None:
        same_as_orjson(found, content)


@given(st.lists(FROM_FLOAT32.filter(lambda x: x == 0 or abs(x) > 1e-20), min_size=1, max_size=20))
def test_fast_reader_handles_all_log_probs_of_a_server(logprobs):
    content = orjson.dumps([answer([(p, 5) for p in logprobs])])
    same_as_orjson(read(content), content)


@settings(max_examples=300)
@given(PAIRS, st.integers(0, 400), st.sampled_from([b"", b"]", b"[", b",", b"null", b"-", b"1e5", b'"', b"0.1", b"9" * 20, b" "]))
def test_damaged_text_is_left_to_orjson_or_read_identically(pairs, place, junk):
    content = orjson.dumps([answer(pairs)])
    place %= len(content)
    content = content[:place] + junk + content[place + 1 :]
    found = read(content)
    if found is None:
        return
    try:
        same_as_orjson(found, content)
    except orjson.JSONDecodeError:
        # The fast reader accepts some numbers that JSON forbids, such as 01 or 1.; their value is unambiguous.
        assert len(found) == 1


@pytest.mark.parametrize("samples", [[{"output_ids": []}], {"error": "no"}, "no", [answer([(-0.5, 3)]), {}]])
def test_replies_in_other_formats_go_to_orjson(samples):
    assert read(orjson.dumps(samples)) is None


def test_entry_with_text_goes_to_orjson():
    sample = answer([(-0.5, 3)])
    sample["meta_info"]["output_token_logprobs"][0][2] = "]]"
    assert read(orjson.dumps([sample])) is None


def test_long_replies_are_checked_like_short_ones(monkeypatch):
    monkeypatch.setattr(batch_call, "SHORTEST", 1)
    batch_call.loops_in_background().result()
    request = GenerationRequest("r", (3, 4), 4)

    def parsed(pairs, **changes):
        sample = answer(pairs) | changes
        sample["meta_info"] |= {"weight_version": "7"}
        (read_sample,) = batch_call.read_json(orjson.dumps([sample]))
        assert isinstance(read_sample["meta_info"]["output_token_logprobs"], tuple)
        return parse_generation(request, read_sample, 100)

    good = parsed([(-0.5, 3), (-0.25, 4)])
    assert (good.token_ids.tolist(), good.logprobs.tolist()) == ([3, 4], [-0.5, -0.25])
    for pairs, changes, words in (
        ([(-0.5, 100)], {}, "vocabulary"),
        ([(-0.5, 3)] * 5, {}, "at most the 4 requested tokens"),
        ([(0.5, 3)], {}, "at most 0"),
        ([(-0.5, 3)], {"output_ids": [4]}, "log-prob of token 4"),
        ([(-0.5, 3)], {"output_ids": [3, 3]}, "2 tokens and 1 log-probs"),
    ):
        with pytest.raises(InvalidReply, match=words):
            parsed(pairs, **changes)
