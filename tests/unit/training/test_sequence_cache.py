"""Over random calls micro-batches equal those of the whole batch, and no replica receives anything twice."""

import random
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from megatron_rl.data.batch import Images, PackedBatch, cu_seqlens_of
from megatron_rl.data.images import ImageFile, ImageRef, digest_of
from megatron_rl.data.rows import Rows
from megatron_rl.parallel import collectives
from megatron_rl.system.files.shared_file import SharedArrays
from megatron_rl.training.sequence_cache import CacheDirectory, SequenceCache
from tests.token_indices import token_indices

NUM_REPLICAS = 3


def make_batch(rng: random.Random, ids: list[int], with_images: bool) -> PackedBatch:
    lengths = torch.tensor([rng.randint(1, 9) for _ in ids], dtype=torch.int64)
    total = int(lengths.sum())
    generator = torch.Generator().manual_seed(rng.randrange(1000))
    images = None
    if with_images:
        sequences = torch.tensor(sorted(rng.choices(range(len(ids)), k=4)))
        grids = torch.tensor([[1, rng.randint(1, 3), 2] for _ in range(4)])
        images = Images([make_file(rng, grid) for grid in grids.tolist()], grids, sequences)
        # One image on two sequences, as of the samples of a group.
        images.sources[3], grids[3] = images.sources[0], grids[0]
    return PackedBatch(
        torch.randint(0, 2**31 - 1, (total,), generator=generator),
        cu_seqlens_of(lengths),
        {
            "mask": torch.rand(total, generator=generator) > 0.5,
            "advantages": torch.randn(total, generator=generator),
            "routes": torch.randint(-5, 5, (total, 2, 3), generator=generator, dtype=torch.int16),
        },
        images,
        tuple(ids),
    )


def make_file(rng: random.Random, grid: list[int]) -> ImageFile:
    """Image file whose bytes are its patches."""
    data = np.frombuffer(rng.randbytes(20 * grid[1] * grid[2]), np.uint8)
    return ImageFile(ImageRef("a.png", digest_of(data.tobytes()), tuple(grid)), data)


def cut(file: ImageFile) -> torch.Tensor:
    return torch.frombuffer(bytearray(file.data.tobytes()), dtype=torch.int32).view(file.ref.num_patches, 5)


def random_plan(rng: random.Random, rows: list[int]) -> list[list[list[int]]]:
    """Plan with two micro-batches per replica, some of them empty."""
    plan: list[list[list[int]]] = [[[], []] for _ in range(NUM_REPLICAS)]
    for row in rows:
        plan[rng.randrange(NUM_REPLICAS)][rng.randrange(2)].append(row)
    return plan


class Ranks:
    """A directory and the caches of two ranks of each replica: the first and the last stage."""

    def __init__(self) -> None:
        self.directory = CacheDirectory(NUM_REPLICAS)
        self.cut: list[list[str]] = [[] for _ in range(NUM_REPLICAS)]
        """Digests of the images that the first stage of each replica started to cut."""
        self.caches = [(SequenceCache(partial(self.begin, replica)), SequenceCache()) for replica in range(NUM_REPLICAS)]
        self.received: list[list[dict]] = [[] for _ in range(NUM_REPLICAS)]

    def begin(self, replica: int, number: int, file: ImageFile) -> Future:
        self.cut[replica].append(file.ref.digest)
        future: Future = Future()
        future.set_result(cut(file))
        return future

    def call(self, batch: PackedBatch, plan, answer=None):
        """Micro-batches on each replica's last stage, with the first stage's images. ``answer``: a column that the last stage keeps."""
        fields = {name: self.directory.column(values) for name, values in batch.fields.items()}
        kept = self.directory.column() if answer is not None else None
        payloads = self.directory.payloads(batch, plan, list(fields.values()))
        found = []
        for replica, payload in enumerate(payloads):
            self.received[replica].append(payload)
            payload = arrived(payload)
            of_first, of_last = self.caches[replica]
            first, last = of_first.take(payload, fields), of_last.take(payload, fields)
            if kept is not None:
                of_last.keep(kept, last, [answer[token_indices(batch, indices)] for indices in plan[replica]])
                of_first.keep(kept, first, [])
            assert all(torch.equal(one.tokens, other.tokens) for one, other in zip(first, last))
            own = [microbatch.joined() for microbatch in last]
            found.append([replace(one, images=of.images) for one, of in zip(own, first, strict=True)])
        if kept is not None:
            self.directory.answered(kept, batch, plan, answer)
        return found


def arrived(payload: collectives.Payload) -> dict:
    return collectives.unflatten(collectives.flatten(payload))


def assert_same(found: PackedBatch, expected: PackedBatch) -> None:
    assert torch.equal(found.tokens, expected.tokens) and found.tokens.dtype == torch.int64
    assert torch.equal(found.cu_seqlens, expected.cu_seqlens)
    assert found.fields.keys() == expected.fields.keys()
    for name, values in expected.fields.items():
        assert found.fields[name].dtype == values.dtype and torch.equal(found.fields[name], values), name
    assert (found.images is None) == (expected.images is None)
    if expected.images is not None:
        assert torch.equal(found.images.grids, expected.images.grids)
        assert torch.equal(found.images.sequences, expected.images.sequences)
        assert len(found.images.sources) == len(expected.images.sources)
        for image, file in enumerate(expected.images.sources):
            assert torch.equal(found.images.patches(image), cut(file))


@pytest.mark.parametrize("seed", range(30))
def test_microbatches_are_those_of_the_whole_batch_and_nothing_is_sent_twice(seed: int) -> None:
    rng = random.Random(seed)
    ranks = Ranks()
    ids = rng.sample(range(100), 12)
    window = make_batch(rng, ids, with_images=seed % 2 == 0)
    files = {} if window.images is None else {file.ref.digest: file for file in window.images.sources}
    home = random_plan(rng, list(range(12)))
    answer = torch.randn(len(window.tokens))
    # A critic's batch: some of the same sequences in another order, with fields of its own.
    some = rng.sample(range(12), 7)
    critic = replace(window.select(some), fields={"returns": torch.randn(int(window.lengths[some].sum()))})
    for _ in range(4):
        kind = rng.choice(["logprobs", "values", "policy", "critic"])
        if kind == "logprobs":
            batch, plan = window.only("mask", "routes"), home
            found = ranks.call(batch, plan, answer)
        elif kind == "values":
            batch, plan = window.only(), home
            found = ranks.call(batch, plan)
        elif kind == "policy":
            batch = window.with_fields(old_logprobs=answer)
            plan = random_plan(rng, rng.sample(range(12), 6)) if rng.random() < 0.5 else home
            found = ranks.call(batch, plan)
        else:
            batch, plan = critic, random_plan(rng, list(range(7)))
            found = ranks.call(batch, plan)
        for microbatches, of in zip(found, plan, strict=True):
            for microbatch, indices in zip(microbatches, of, strict=True):
                assert_same(microbatch, replace(batch.select(indices), ids=()))
    for payloads, digests in zip(ranks.received, ranks.cut, strict=True):
        assert len(digests) == len(set(digests)), "an image is cut once"
        num_bytes = sum(of["image_files"].num_bytes for of in payloads if "images" in of)
        assert num_bytes == sum(len(files[digest].data) for digest in digests), "and sent once"
        new = [number for payload in payloads if "new" in payload for number in payload["new"].tolist()]
        assert len(new) == len(set(new))
        for name in {name for payload in payloads for name in payload if name.startswith("of/")}:
            rows = [number for payload in payloads if name in payload for number in payload[name].tolist()]
            assert len(rows) == len(set(rows)), name


def test_an_update_on_cached_sequences_sends_only_new_columns() -> None:
    """Log-probs stay on the ranks: 4 + 1 bytes per token for the pass, then only advantages and the update's mask."""
    rng, ranks = random.Random(1), Ranks()
    batch = make_batch(rng, list(range(9)), with_images=False)
    plan = [[[0, 1, 2]], [[3, 4, 5]], [[6, 7, 8]]]
    logprobs = torch.randn(len(batch.tokens))
    ranks.call(batch.only("mask"), plan, logprobs)
    ranks.call(batch.only("mask"), plan, torch.randn(len(batch.tokens)))  # a reference's, of the same tokens
    trained = {"mask": ~batch.fields["mask"], "advantages": batch.fields["advantages"], "old_logprobs": logprobs}
    ranks.call(replace(batch, fields=trained), plan)
    num_tokens = len(batch.tokens)

    def sent(call: int) -> int:
        """Number of sent bytes that grows with the tokens."""
        return sum(
            values.num_bytes
            for payloads in ranks.received
            for name, values in payloads[call].items()
            if name == "tokens" or name.startswith("column/")
        )

    assert [sent(call) for call in range(3)] == [(4 + 1) * num_tokens, 0, (1 + 4) * num_tokens]


def test_a_rank_on_this_machine_gets_addresses_of_tokens_and_columns_instead_of_bytes() -> None:
    """Micro-batches are the same with parts in a worker's file, prompts in the driver's memory, and routes with missing rows."""
    rng, shared = np.random.default_rng(4), SharedArrays()

    def made(kind: type, *shape: int) -> np.ndarray:
        return rng.integers(1, 99, shape).astype(kind)

    prompt = made(np.int32, 5)
    tokens = [[prompt, *(shared.put(made(np.int32, n)) for n in lengths)] for lengths in ([3], [4, 2], [7], [])]
    lengths = [sum(map(len, parts)) for parts in tokens]
    # The last token of a sequence has no routes, and those of the third are unknown.
    routes = [[shared.put(made(np.uint8, n - 1, 2, 2))] if n != 12 else [] for n in lengths]
    spans = [(5, 8), (7, 10), (0, 0), (0, 5)]
    mask = np.concatenate([(np.arange(n) >= first) & (np.arange(n) < end) for n, (first, end) in zip(lengths, spans)])
    total, plan = sum(lengths), [[[0, 1]], [[2], [3]]]
    batch = PackedBatch(
        torch.empty(total, dtype=torch.int64, device="meta"),
        cu_seqlens_of(torch.tensor(lengths)),
        {"mask": torch.from_numpy(mask), "advantages": torch.from_numpy(np.float32(rng.random(total) * mask))},
        parts={"tokens": Rows.of(tokens), "routes": Rows.of(routes)},
        spans=torch.tensor(spans),
    )
    for own in (None, shared):
        directory = CacheDirectory(2, own)
        fields = {name: directory.column(values) for name, values in batch.columns().items()}
        for payload, microbatches in zip(directory.payloads(batch, plan, list(fields.values())), plan, strict=True):
            of_rank = SequenceCache().take(arrived(payload), fields)
            for microbatch, indices in zip(of_rank, microbatches, strict=True):
                assert_same(microbatch.joined(), batch.select(indices).joined())
                assert torch.equal(microbatch.spans, batch.spans[indices])
    rows = {name: value for name, value in payload.items() if name == "tokens" or name.startswith("column/")}
    assert len(rows) == 4 and all(value.all_nodes == {0} for value in rows.values()), "addresses alone"
    assert rows["column/0"].lengths.tolist() == [0, 5], "of the window alone"
    again = directory.payloads(batch, plan, list(fields.values()))
    assert not any("new" in payload or "column/0" in payload for payload in again)


@pytest.mark.parametrize("first_with_spans", [True, False])
def test_a_moved_sequence_has_its_columns_on_the_new_replica_for_any_spans(first_with_spans: bool) -> None:
    """A pass covers the window; an update on another replica also covers earlier windows, or the other way round."""
    mask = torch.tensor([0, 0, 1, 1, 0, 0, 0, 0, 1], dtype=torch.bool)
    spans = torch.tensor([(2, 4), (3, 4)])
    window = PackedBatch(torch.arange(9), cu_seqlens_of(torch.tensor([5, 4])), {"mask": mask}, ids=(0, 1), spans=spans)
    batches = (window, replace(window, spans=None))
    ranks = Ranks()
    for batch, plan in zip(batches if first_with_spans else batches[::-1], ([[[0, 1]], [[]], [[]]], [[[0]], [[1]], [[]]]), strict=True):
        for found, microbatches in zip(ranks.call(batch, plan), plan, strict=True):
            for one, indices in zip(found, microbatches, strict=True):
                assert torch.equal(one.fields["mask"], batch.select(indices).fields["mask"]) or not indices


def test_rows_that_ranks_read_in_place_stay_until_the_directory_is_dropped() -> None:
    """Without other references to a batch, a slow rank still reads its tokens and columns; afterwards their memory is freed."""
    shared, rows = SharedArrays(), np.arange(1, 2**19, dtype=np.int32)
    directory = CacheDirectory(1, shared)
    batch = PackedBatch(
        torch.empty(len(rows), dtype=torch.int64, device="meta"),
        cu_seqlens_of(torch.tensor([len(rows)])),
        {"advantages": torch.from_numpy(rows.astype(np.float32))},
        parts={"tokens": Rows.of([[shared.put(rows)]])},
    )
    fields = {name: directory.column(values) for name, values in batch.columns().items()}
    (payload,) = directory.payloads(batch, [[[0]]], list(fields.values()))
    flat = collectives.flatten(payload)
    del batch, payload
    found = collectives.unflatten(flat)
    in_place = found["tokens"], found[f"column/{fields['advantages']}"]
    assert all(np.array_equal(read.packed(), rows) for read in in_place)
    del directory
    assert not any(read.packed().any() for read in in_place)


def test_columns_that_only_ranks_have_are_never_sent() -> None:
    """Experts that a pass chose are replayed on the replica that recorded them; the driver has no such field."""
    rng, ranks = random.Random(2), Ranks()
    batch = make_batch(rng, list(range(6)), with_images=False)
    plan = [[[0, 1]], [[2, 3]], [[4, 5]]]
    directory, routes = ranks.directory, batch.fields["routes"]
    column = directory.column()
    payloads = directory.payloads(batch.only("mask"), plan, [])
    for replica, payload in enumerate(payloads):
        of_rank = ranks.caches[replica][1]
        microbatches = of_rank.take(arrived(payload), {})
        of_rank.keep(column, microbatches, [routes[token_indices(batch, indices)] for indices in plan[replica]])
    directory.answered(column, batch, plan)
    payloads = directory.payloads(batch.only("mask"), plan, [])
    for replica, payload in enumerate(payloads):
        assert not any(name.startswith("column/") for name in payload)
        (microbatch,) = ranks.caches[replica][1].take(arrived(payload), {"routes": column})
        assert torch.equal(microbatch.joined().fields["routes"], routes[token_indices(batch, plan[replica][0])])
