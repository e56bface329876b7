"""The memory tables of `train --dry-run`: readable in 80 columns, complete in 160."""

import io

import pytest
from rich.console import Console

from megatron_rl.desk.plan.memory_table import print_memory
from tests.unit.desk.costs.test_run_memory import COLOCATED, DENSE, configured, layout


def printed(config, width: int, world_size: int = 8) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_memory(console, config, world_size)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 160])
def test_no_number_is_cut_off(width):
    config = configured(
        "qwen3-30b-a3b", *layout(tp=4, ep=8), *COLOCATED, "algorithm.kl.place=loss", "policy.moe.routing_replay=R2"
    )
    text = printed(config, width)
    assert "…" not in text
    tables = [line for line in text.splitlines() if not line.startswith(("to fit", "on the rank", "servers that"))]
    assert max(map(len, tables)) <= 80
    for word in ("policy: gradients", "critic: optimizer", "activations", "logits", "routes", "NCCL", "server: KV cache"):
        assert word in text
    assert text.count("to fit") >= 1


def test_components_add_up():
    lines = [line.split() for line in printed(DENSE, 80).splitlines()]
    start = next(index for index, line in enumerate(lines) if line[:2] == ["GB", "of"])
    stages = len(lines[start]) - 4
    rows = []
    for line in lines[start + 1 :]:
        rows.append([0.0 if cell == "-" else float(cell) for cell in line[-stages:]])
        if line[0] == "all":
            break
    for *parts, total in zip(*rows, strict=True):
        assert sum(parts) == pytest.approx(total, abs=0.05 * len(parts))


def test_memory_table_names_the_missing_number_of_ranks():
    assert printed(DENSE, 80, world_size=1) == "set parallel.num_ranks to the number of trainer ranks to see their memory\n"
