"""An object reaches all ranks along a tree, and no rank sends it more than log2(ranks) times."""

import queue
import threading
from collections import Counter, defaultdict
from unittest.mock import patch

import pytest

from megatron_rl.parallel import collectives


@pytest.mark.parametrize(("num_ranks", "src"), [(1, 0), (2, 1), (3, 1), (8, 0), (13, 5), (64, 0), (100, 99)])
def test_every_rank_gets_the_object_after_few_hops(num_ranks: int, src: int) -> None:
    here = threading.local()
    wires: dict[tuple[int, int], queue.Queue] = defaultdict(queue.Queue)
    found: dict[int, object] = {}
    sent: Counter[int] = Counter()
    hops = {src: 0}

    def send(data, peer, what, timeout_s) -> None:
        sent[here.rank] += 1
        hops[peer] = hops[here.rank] + 1
        wires[here.rank, peer].put(data)

    def receive(peer, what, timeout_s):
        return wires[peer, here.rank].get(timeout=30)

    def run(rank: int) -> None:
        here.rank = rank
        found[rank] = collectives.broadcast_object(("step", 7) if rank == src else None, src=src)

    with (
        patch.object(collectives, "_send_bytes", send),
        patch.object(collectives, "_receive_bytes", receive),
        patch.object(collectives.dist, "get_rank", lambda: here.rank),
        patch.object(collectives.dist, "get_world_size", lambda: num_ranks),
    ):
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert found == dict.fromkeys(range(num_ranks), ("step", 7))
    assert sum(sent.values()) == num_ranks - 1
    log2 = (num_ranks - 1).bit_length()
    assert max(sent.values(), default=0) <= log2 and max(hops.values()) <= log2
