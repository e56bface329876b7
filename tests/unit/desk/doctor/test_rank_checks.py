"""Results of ``megatron-rl doctor`` for ranks, judged without starting any."""

from typing import Any

import pytest

from megatron_rl.desk.doctor.machine_checks import FAIL
from megatron_rl.desk.doctor.rank_checks import difference_lines


def rank(host: str = "a", device: str = "GPU 0", nccl: str = "0", torch: str = "2.14.1") -> dict[str, Any]:
    return {"host": host, "device": device, "nccl": {"NCCL_CUMEM_ENABLE": nccl}, "versions": {"torch": torch}}


def test_difference_lines_are_empty_for_equal_ranks_on_separate_devices() -> None:
    assert difference_lines([rank(), rank(device="GPU 1"), rank(host="b")]) == []
    assert difference_lines([rank(device="CPU"), rank(device="CPU")]) == []


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([rank(), rank()], "2 ranks use GPU 0 of a"),
        ([rank(), rank(host="b", device="CPU")], "ranks 1 have no GPU"),
        ([rank(), rank(host="b", nccl="1")], "1 (rank 1, b), 0 (rank 0, a)"),
        ([rank(), rank(host="b"), rank(host="c", torch="2.13.0")], "2.13.0 (rank 2, c)"),
    ],
)
def test_difference_lines_report_shared_devices_and_other_versions(ranks: list[dict[str, Any]], words: str) -> None:
    (line,) = difference_lines(ranks)
    assert line.state == FAIL and words in line.found and line.remedy
