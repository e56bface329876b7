"""Laws of the messages from which full tensors are assembled; no process group."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.families.parameters import Entry
from megatron_rl.families.transforms import Replicated
from megatron_rl.models.hf import gather
from megatron_rl.models.hf.gather import GatherTarget, ShardedParameter, collect, messages
from tests.fake_world import fake_rank

LIMIT = 100
RANKS_PER_STAGE = 4


@pytest.fixture(autouse=True, scope="module")
def small_world():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "first_rank_of", lambda stage: stage * RANKS_PER_STAGE)
        patch.setattr(gather, "MESSAGE_BYTES", LIMIT)
        yield


def held(index: int, stage: int, rank: int, dtype: torch.dtype, size: int) -> ShardedParameter:
    entry = Entry(f"parameter{index}", {f"tensor{index}": (size,)}, Replicated())
    return ShardedParameter(entry, stage, dtype, stage * RANKS_PER_STAGE + rank, None, is_here=False)


PARAMETERS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 2), st.sampled_from([torch.bfloat16, torch.float32]), st.integers(1, 40)),
    max_size=30,
).map(lambda found: [held(i, *one) for i, one in enumerate(found)])


@given(PARAMETERS, st.sampled_from(GatherTarget))
def test_messages_have_one_sender_and_at_most_the_byte_limit(parameters: list[ShardedParameter], to: GatherTarget):
    found = list(messages(parameters, to))
    assert [one for message in found for one in message] == parameters

    def travels(one: ShardedParameter) -> bool:
        target = one.stage * RANKS_PER_STAGE if to is GatherTarget.stage else 0
        return to is GatherTarget.everywhere or one.first != target

    def kind(one: ShardedParameter) -> tuple:
        return one.first, one.dtype

    for message in found:
        assert len({kind(one) for one in message}) == 1
        assert len(message) == 1 or (all(map(travels, message)) and sum(one.num_bytes for one in message) <= LIMIT)
    for message, following in itertools.pairwise(found):
        size = sum(one.num_bytes for one in [*message, following[0]])
        assert kind(message[0]) != kind(following[0]) or not travels(message[0]) or size > LIMIT


def test_experts_of_a_layer_are_one_message_per_owning_rank():
    """128 experts on four ranks, two parameters each; the first rank is the destination."""
    experts = [held(2 * e + i, 0, e // 32, torch.bfloat16, 1) for e in range(128) for i in range(2)]
    found = list(messages(experts, GatherTarget.stage))
    assert [len(message) for message in found if message[0].first > 0] == [50, 14] * 3


@pytest.mark.parametrize("rank", range(3))
def test_messages_between_two_ranks_create_no_communicator(rank: int, monkeypatch: pytest.MonkeyPatch):
    """NCCL creates a communicator for every pair of ranks that sends outside a batch."""
    sent = []
    message = [held(i, 0, 1, torch.bfloat16, 3) for i in range(2)]
    if rank == 1:
        message = [replace(one, is_here=True) for one in message]
    parameters = {one.entry.megatron: torch.full((3,), float(i), dtype=torch.bfloat16) for i, one in enumerate(message)}
    with fake_rank(rank, 4, ParallelConfig()):
        monkeypatch.setattr(gather.dist, "batch_isend_irecv", lambda batch: sent.extend(batch) or [])
        for alone in ("send", "recv"):
            monkeypatch.delattr(gather.dist, alone)
        found = list(collect(message, parameters, {}, 0))
    assert [(op.op.__name__, op.peer, len(op.tensor)) for op in sent] == [[("irecv", 1, 6)], [("isend", 0, 6)], []][rank]
    assert [[part is not None for part in parts] for _, parts in found] == [[rank == 0]] * 2
    if rank == 1:
        assert sent[0].tensor.tolist() == [0.0] * 3 + [1.0] * 3
