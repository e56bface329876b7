"""Results of ``megatron-rl doctor`` for ranks and servers, judged without starting any; tolerances of layouts."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.config.schema import Config, Dtype, ParallelConfig
from megatron_rl.desk.doctor import layout_ranks
from megatron_rl.desk.doctor.engine_checks import checksum_line, random_prompts
from megatron_rl.desk.doctor.layout_comparison import Tolerances, default_dtype, differing, tolerances_for
from megatron_rl.desk.doctor.machine_checks import FAIL, OK, WARN
from megatron_rl.desk.doctor.rank_checks import difference_lines
from megatron_rl.weights.verify import ChecksumReport


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


def report(**fields: Any) -> ChecksumReport:
    defaults: dict[str, Any] = dict(reference="trainer", num_compared=40, differing={}, uncompared=(), note="")
    return ChecksumReport(**{**defaults, **fields})


def test_checksum_line_reports_differing_parameters() -> None:
    equal = checksum_line(report())
    assert equal.state == OK and equal.found == "40 parameters compared with the trainer's: equal."
    wrong = checksum_line(report(differing={"u": tuple(f"layer.{i}" for i in range(9))}))
    assert wrong.state == FAIL and "9 differ: layer.0" in wrong.found and "and more" in wrong.found and wrong.remedy
    assert checksum_line(report(num_compared=0, reference="nothing", note="one server")).state == WARN
    assert "between servers" in checksum_line(report(reference="servers")).found


def test_random_prompts_have_only_ordinary_tokens() -> None:
    tokenizer: Any = SimpleNamespace(special_ids={0, 1}, vocab_size=20, vision=SimpleNamespace(banned_token_ids=(7, 8)))
    prompts = random_prompts(Config(), tokenizer)
    tokens = {token for prompt in prompts for token in prompt.token_ids}
    assert len(prompts) == Config().rollout.num_parity_prompts and tokens == set(range(20)) - {0, 1, 7, 8}
    assert prompts == random_prompts(Config(), tokenizer)


def test_tolerances_grow_with_the_rounding_of_the_dtype() -> None:
    def bounds(dtype: str, **where: bool) -> Tolerances:
        return tolerances_for(dtype, **{"on_gpu": True, "has_engine": True, "has_experts": False, **where})

    exact = bounds("float32", on_gpu=False, has_engine=False, has_experts=True)
    assert exact.loss == exact.grad_norm == exact.weights == 1e-5
    plain, tf32, half = bounds("float32", has_engine=False), bounds("float32"), bounds("bfloat16")
    for name in ("loss", "grad_norm", "weights"):
        values = [getattr(one, name) for one in (exact, plain, tf32, half)]
        assert values == sorted(set(values)), name
    assert half.weights < bounds("bfloat16", has_experts=True).weights < 1
    assert (default_dtype(has_engine=True), default_dtype(has_engine=False)) == ("bfloat16", "float32")


BASE = {"loss": 5.0, "grad_norm": 2.0, "difference": 0.0}
NOISE = {"loss": 5.0 * (1 + 2e-4), "grad_norm": 2.0 * (1 - 2.6e-3), "difference": 0.023}
"""Largest differences measured between layouts of a dense model in bfloat16."""


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (NOISE, []),
        ({**NOISE, "grad_norm": 2.0 * 1.05}, ["gradient norm"]),
        ({**NOISE, "loss": 5.0 * 1.01}, ["loss"]),
        ({**NOISE, "difference": 0.5}, ["weights"]),  # one tensor's gradient halved
        ({**NOISE, "difference": float("nan")}, ["weights"]),
    ],
)
def test_bfloat16_tolerances_pass_noise_and_reject_faults(row: dict[str, float], expected: list[str]) -> None:
    half = tolerances_for("bfloat16", on_gpu=True, has_engine=True, has_experts=False)
    assert differing(row, BASE, half) == expected
    assert differing(NOISE, BASE, tolerances_for("float32", on_gpu=False, has_engine=False, has_experts=False))


@pytest.mark.parametrize("dtype", Dtype)
def test_layouts_are_compared_in_the_requested_dtype(dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 uses a higher learning rate, so that the update exceeds a weight's last bit."""
    built: dict[str, Any] = {}

    class Stop(Exception):
        pass

    def engine(*args: Any, **kwargs: Any) -> None:
        built.update(kwargs)
        raise Stop

    monkeypatch.setattr(layout_ranks, "Engine", engine)
    job = layout_ranks.InvarianceJob("model", "policy", ["tp1"], "", "", is_reference=True, dtype=dtype.value)
    with pytest.raises(Stop):
        layout_ranks._measure(job, "tp1", ParallelConfig(), SimpleNamespace(), is_reference=True)
    assert built["dtype"] is dtype
    assert built["optimizer"].lr == layout_ranks.OPTIMIZER.lr * (100 if dtype is Dtype.bfloat16 else 1)
