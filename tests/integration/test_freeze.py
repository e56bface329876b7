"""Laws of critics with frozen tensors (``critic.freeze``) on real Megatron Core, in every layout of one and two ranks."""

import fnmatch
from functools import cache

import pytest
import torch

from tests.integration.freeze_worker import CASES, NUM_STEPS, Case
from tests.integration.torchrun import run_ranks
from tests.tiny_families import make_family_model
from tests.tiny_models import make_tiny_model

ALL = [(world_size, case) for world_size, cases in CASES.items() for case in cases]
REFERENCES = {case.name: case for case in CASES[1]}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """World size -> results by case of its launch, which happens when first asked for."""
    folder = tmp_path_factory.mktemp("freeze")
    make_tiny_model(folder / "models" / "qwen3", "qwen3", num_hidden_layers=4)
    make_tiny_model(folder / "models" / "experts", "qwen3_moe", num_hidden_layers=4)
    make_family_model(folder / "models" / "sinks", "gpt_oss", vocab_size=128, num_hidden_layers=4)

    @cache
    def of(world_size: int) -> dict:
        out = folder / f"ranks{world_size}"
        out.mkdir()
        run_ranks(world_size, "tests.integration.freeze_worker", folder / "models", out, log=out / "log.txt", timeout_s=600)
        return torch.load(out / "results.pt", weights_only=False)

    return of


def is_frozen(case: Case, name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in case.frozen)


@pytest.mark.parametrize(("world_size", "case"), ALL, ids=lambda value: getattr(value, "name", value))
def test_frozen_tensors_stay_bit_equal_over_many_updates_while_all_others_move(results, world_size, case):
    found = results(world_size)[case.name]
    before, after = found["before"], found["after"]
    frozen = [name for name in before if is_frozen(case, name)]
    assert len(found["norms"]) == NUM_STEPS and 0 < len(frozen) < len(before)
    assert [name for name in frozen if not torch.equal(before[name], after[name])] == []
    assert [name for name in before if name not in frozen and torch.equal(before[name], after[name])] == []


@pytest.mark.parametrize(("world_size", "case"), ALL, ids=lambda value: getattr(value, "name", value))
def test_a_resumed_critic_with_frozen_tensors_is_bit_equal_to_one_that_never_stopped(results, world_size, case):
    found = results(world_size)[case.name]
    assert found["resumed norms"] == found["norms"][3:6]
    for name, value in found["kept"].items():
        assert torch.equal(found["resumed"][name], value), name


@pytest.mark.parametrize("case", [case for case in CASES[2] if "bfloat16" not in case.name], ids=lambda case: case.name)
def test_updates_with_frozen_tensors_do_not_depend_on_the_layout(results, case):
    reference = next(name for name in sorted(REFERENCES, key=len, reverse=True) if case.name.startswith(name))
    found, expected = results(2)[case.name], results(1)[reference]
    assert found["norms"][:3] == pytest.approx(expected["norms"][:3], rel=1e-4)
    for name, value in expected["after 3"].items():
        torch.testing.assert_close(found["after 3"][name], value, rtol=1e-4, atol=2e-6, msg=name)


def test_recomputed_layers_above_frozen_embeddings_get_the_same_gradients(results):
    plain, recomputed = (results(1)[name]["norms"][:3] for name in ("first-layers", "first-layers-recompute"))
    assert recomputed == pytest.approx(plain, rel=1e-5)
