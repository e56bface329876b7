"""The split of a pack over context-parallel ranks: an even partition, and a plan with every key exactly once."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.schema import Fp8
from megatron_rl.models.layers.attention import plan_context
from megatron_rl.models.layers.context import NOWHERE, pack_alignment, split_pack, zigzag
from megatron_rl.models.megatron_fields import fp8_kwargs

LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any)
RANKS = st.integers(2, 4)


@given(lengths=LENGTHS, num_ranks=RANKS, multiple=st.integers(1, 3))
def test_context_split_puts_each_token_on_exactly_one_rank(lengths, num_ranks, multiple):
    splits = [split_pack(tuple(lengths), num_ranks, rank, multiple) for rank in range(num_ranks)]
    held = torch.stack([split.row_of_token != NOWHERE for split in splits])
    assert (held.sum(0) == 1).all() and held.shape[1] == sum(lengths)
    num_rows = {len(split.token_of_row) for split in splits}
    assert len(num_rows) == 1 and num_rows.pop() % multiple == 0
    for split in splits:
        assert sum(split.lengths) == num_ranks * len(split.token_of_row)
        mine = (split.row_of_token != NOWHERE).nonzero()[:, 0]
        assert (split.token_of_row[split.row_of_token[mine]] == mine).all()


@given(length=st.integers(1, 10), num_ranks=RANKS)
def test_zigzag_gives_ranks_equal_work_under_a_causal_mask(length, num_ranks):
    length *= 2 * num_ranks
    shares = [zigzag(length, num_ranks, rank) for rank in range(num_ranks)]
    assert torch.cat(shares).sort().values.tolist() == list(range(length))
    assert len({int((share + 1).sum()) for share in shares}) == 1


@given(lengths=LENGTHS, num_ranks=RANKS, data=st.data())
def test_context_plan_aligns_queries_with_keys_of_their_sequence(lengths, num_ranks, data):
    rank = data.draw(st.integers(0, num_ranks - 1))
    splits = [split_pack(tuple(lengths), num_ranks, r) for r in range(num_ranks)]
    plan = plan_context(splits[0].lengths, num_ranks, rank, torch.device("cpu"))
    token = torch.cat([split.token_of_row for split in splits])
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.cat([torch.arange(length) for length in lengths])
    queries, keys = splits[rank].token_of_row[plan.query_rows], token[plan.key_rows]
    at_query, at_key = 0, 0
    for (n, longest), positions in zip(plan.shapes, plan.positions, strict=True):
        for _ in range(n):
            q = queries[at_query : at_query + longest // num_ranks]
            k = keys[at_key : at_key + longest]
            at_query, at_key = at_query + len(q), at_key + len(k)
            real_q, real_k = q != NOWHERE, k != NOWHERE
            assert (position[q[real_q]] == positions[real_q]).all()
            assert position[k[real_k]].tolist() == list(range(int(real_k.sum())))
            assert len({*sequence[q[real_q]].tolist(), *sequence[k[real_k]].tolist()}) <= 1
    assert (at_query, at_key) == (len(queries), len(keys))
    assert (plan.query_rows[plan.unsort] == torch.arange(len(queries))).all()


def megatron(**fields: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    sizes = dict(num_layers=2, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True)
    return TransformerConfig(**sizes, **fields)


def test_packs_are_padded_for_8_bit_products() -> None:
    fp8 = fp8_kwargs(Fp8.hybrid)
    assert pack_alignment(megatron()) == 1
    assert pack_alignment(megatron(**fp8)) == 16
    split = dict(tensor_model_parallel_size=4, sequence_parallel=True)
    assert pack_alignment(megatron(**split)) == 4
    assert pack_alignment(megatron(**split, **fp8)) == 64
