"""Laws of low-rank adapters (``policy.lora``) on real Megatron Core, in every layout of one and two ranks, and against peft."""

import json
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.families.adapters import PEFT_PREFIX
from megatron_rl.models.conversion import convert
from megatron_rl.models.hf.adapter_folder import adapter_config, adapter_shapes, write_adapter
from megatron_rl.models.hf.model_config import load_hf_config
from megatron_rl.models.lora import merged_weight, scale_of
from tests.integration.engine_worker import LENGTHS, make_batch
from tests.integration.lora_worker import CASES, LORA, OPTIMIZER, Case
from tests.integration.torchrun import run_ranks
from tests.tiny_families import LINEAR_SHAPES, SHAPES, make_family_model
from tests.tiny_models import make_tiny_model

ALL = [(world_size, case) for world_size, cases in CASES.items() for case in cases]
REFERENCES = {case.name: case for case in CASES[1]}
SAME_IN_EVERY_LAYOUT = [case for case in CASES[2] if "bfloat16" not in case.name and "dropout" not in case.name]
PEFTS = [case for case in CASES[1] if case.name in ("all", "partial", "tied", "scaled", "shared")]
NO_PEFT = "peft is not installed: bash launch/setup.sh"
NAMES = {"ids": lambda value: getattr(value, "name", value)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    make_tiny_model(folder / "models" / "qwen3", "qwen3", num_hidden_layers=4)
    make_tiny_model(folder / "models" / "experts", "qwen3_moe")
    for name, shape in (("latent", "deepseek_v3_yarn"), ("tied", "qwen2_gqa7_tied"), ("scaled", "llama3_scaled")):
        make_family_model(folder / "models" / name, shape, vocab_size=128)
    make_family_model(folder / "models" / "sinks", "gpt_oss", vocab_size=128, num_hidden_layers=4)
    return folder


@pytest.fixture(scope="module")
def results(folder):
    """World size -> results by case of its launch, which happens when first asked for."""

    @cache
    def of(world_size: int) -> dict:
        out = folder / f"ranks{world_size}"
        out.mkdir()
        run_ranks(
            world_size, "tests.integration.lora_worker", folder / "models", out, log=out / "log.txt", timeout_s=900
        )
        return torch.load(out / "results.pt", weights_only=False)

    return of


def tensor_of(adapters: dict, name: str, part: str) -> torch.Tensor | None:
    return adapters.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{part}.weight")


@pytest.mark.parametrize(("world_size", "case"), [pair for pair in ALL if pair[1].dtype.value == "float32"], **NAMES)
def test_merged_weights_are_the_model_plus_scale_times_b_a(results, world_size, case):
    found = results(world_size)[case.name]
    for name, before in found["before"].items():
        b, a = (tensor_of(found["after 3"], name, part) for part in "BA")
        merged = found["merged 3"][name].double()
        if b is None:
            assert torch.equal(found["merged 3"][name], before) or name == "value_head.weight", name
            continue
        torch.testing.assert_close(
            merged, before.double() + scale_of(case.lora) * (b.double() @ a.double()), rtol=1e-6, atol=1e-6
        )
        assert b.abs().max() > 0


@pytest.mark.parametrize(("world_size", "case"), ALL, **NAMES)
def test_training_starts_from_the_model_and_every_adapter_moves(results, world_size, case):
    found = results(world_size)[case.name]
    start, after = found["start"], found["after 3"]
    assert all(start[name].abs().max() == 0 for name in start if "lora_B" in name)
    assert [name for name in start if torch.equal(start[name], after[name])] == []


@pytest.mark.parametrize(("world_size", "case"), ALL, **NAMES)
def test_a_resumed_run_with_adapters_is_bit_equal_to_one_that_never_stopped(results, world_size, case):
    found = results(world_size)[case.name]
    assert found["resumed norms"] == found["norms"][3:5]
    assert all(torch.equal(found["resumed"][name], value) for name, value in found["kept"].items())


@pytest.mark.parametrize(("world_size", "case"), [pair for pair in ALL if pair[1].shares], **NAMES)
def test_a_critic_on_the_policys_weights_equals_one_with_weights_of_its_own(results, world_size, case):
    found, own = (results(world_size)[name] for name in (case.name, case.name.replace("-shared", "")))
    assert found["norms"] == own["norms"]
    for part in ("before", "start", "after 3", "merged 3", "kept"):
        assert found[part].keys() == own[part].keys()
        assert [name for name, value in own[part].items() if not torch.equal(found[part][name], value)] == [], part
    # The adapters and the value head, which are all that trains, in Megatron's padded buffers.
    assert 4 * found["state"] <= found["own bytes"] < 4 * found["state"] + 2**14 < own["own bytes"] / 3


@pytest.mark.parametrize("case", SAME_IN_EVERY_LAYOUT, **NAMES)
def test_updates_of_adapters_do_not_depend_on_the_layout(results, case):
    reference = next(name for name in sorted(REFERENCES, key=len, reverse=True) if case.name.startswith(name))
    found, expected = results(2)[case.name], results(1)[reference]
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    for name, value in expected["kept"].items():
        torch.testing.assert_close(found["kept"][name], value, rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize(("world_size", "case"), [pair for pair in ALL if pair[1].role == "policy"], **NAMES)
def test_a_saved_adapter_is_the_start_of_another_run(results, world_size, case):
    found = results(world_size)[case.name]
    assert found["started"].keys() == found["kept"].keys()
    assert all(torch.equal(found["started"][name], value) for name, value in found["kept"].items())


def test_a_checkpoint_holds_adapters_and_their_optimizer_state_alone(results):
    found = results(1)["all"]
    model_bytes = 4 * sum(value.numel() for value in found["before"].values())
    # Float32 weights and two moments, some files' headers, and 64-fold padding of Adam's buffers.
    assert found["checkpoint bytes"] < 12 * found["state"] + 4e5 < 3 * model_bytes


# Against peft ------------------------------------------------------------------------------------------------------------


def sequences() -> list[torch.Tensor]:
    return list(make_batch().tokens.split(LENGTHS))


def logprobs_of(model, mask: torch.Tensor) -> torch.Tensor:
    """Log-probs of all tokens where the mask is set, else 0, with a padded forward pass for each sequence."""
    parts = []
    for tokens in sequences():
        logits = model(tokens[None]).logits[0, :-1].float().log_softmax(-1)
        parts += [torch.zeros(1), logits.gather(1, tokens[1:, None])[:, 0]]
    return torch.cat(parts) * mask


def peft_model(folder, case: Case, adapters: dict, *, trains: bool = False):
    peft = pytest.importorskip("peft", reason=NO_PEFT)
    from transformers import AutoModelForCausalLM

    source = folder / "models" / case.model
    target = folder / f"peft-{case.name}-{trains}"
    write_adapter(target, adapter_config(load_hf_config(source), case.lora, str(source)), adapters)
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, target, is_trainable=trains)


@pytest.mark.parametrize("case", PEFTS, **NAMES)
def test_logprobs_and_merged_weights_equal_pefts(results, folder, case):
    found, mask = results(1)[case.name], (make_batch().fields["mask"] != 0).float()
    model = peft_model(folder, case, found["after 3"])
    with torch.no_grad():
        # The engine also computes what the language-model loss wants, outside the mask.
        torch.testing.assert_close(logprobs_of(model, mask), torch.cat(found["logprobs"]) * mask, rtol=2e-6, atol=1e-5)
        with model.disable_adapter():
            torch.testing.assert_close(
                logprobs_of(model, mask), torch.cat(found["reference"]) * mask, rtol=2e-6, atol=1e-5
            )
        merged = model.merge_and_unload().state_dict()
    for name, value in found["merged 3"].items():
        if ".experts." not in name:  # stacked in transformers 5, and without adapters here
            torch.testing.assert_close(merged[name], value, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("case", PEFTS, **NAMES)
def test_five_updates_equal_pefts_with_adamw(results, folder, case):
    found, mask = results(1)[case.name], (make_batch().fields["mask"] != 0).float()
    model = peft_model(folder, case, found["start"], trains=True)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == len(found["start"])
    settings = {name: getattr(OPTIMIZER, name) for name in ("lr", "eps", "weight_decay")}
    adam = torch.optim.AdamW(trained.values(), betas=(0.9, OPTIMIZER.beta2), **settings)
    norms = []
    for _ in range(5):
        adam.zero_grad()
        (-logprobs_of(model, mask).sum() / mask.sum()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), OPTIMIZER.max_grad_norm)))
        adam.step()
    assert norms == pytest.approx(found["norms"], rel=1e-5)
    for name, parameter in trained.items():
        ours = found["kept"][name.replace(".default.weight", ".weight")]
        torch.testing.assert_close(parameter.detach(), ours, rtol=1e-4, atol=1e-5, msg=name)


# Transformers has no class for kimi_k2, whose tensors are those of deepseek_v3.
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape not in ("kimi_k2", *LINEAR_SHAPES)])
def test_peft_reads_and_merges_a_folder_of_every_family(tmp_path, shape):
    peft = pytest.importorskip("peft", reason=NO_PEFT)
    from transformers import AutoModelForCausalLM

    source = make_family_model(tmp_path / "base", shape, vocab_size=128)
    config, generator = load_hf_config(source), torch.Generator().manual_seed(5)
    shapes = adapter_shapes(config, LORA.targets, LORA.rank)
    adapters = {name: torch.randn(size, generator=generator) / 10 for name, size in shapes.items()}
    write_adapter(tmp_path / "adapter", adapter_config(config, LORA, str(source)), adapters)
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    after = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    changed = {name for name, value in before.items() if not torch.equal(after[name], value)}
    assert changed == {name.split(".lora_")[0].removeprefix(PEFT_PREFIX) + ".weight" for name in shapes}
    for name in changed:
        b, a = (tensor_of(adapters, name, part) for part in "BA")
        torch.testing.assert_close(after[name], merged_weight(before[name], [a], [b], scale_of(LORA)), rtol=0, atol=1e-5, msg=name)


def test_the_saved_folder_holds_merged_weights_and_the_adapter(results, folder):
    found, saved = results(1)["all"], folder / "ranks1" / "all-hf"
    settings = json.loads((saved / "adapter" / "adapter_config.json").read_text())
    assert settings["r"] == LORA.rank and "q_proj" in settings["target_modules"]
    adapters, merged = (
        load_file(saved / "adapter" / "adapter_model.safetensors"),
        load_file(saved / "model.safetensors"),
    )
    assert all(torch.equal(adapters[name], value) for name, value in found["kept"].items())
    assert all(torch.equal(merged[name], value) for name, value in found["final"].items())


@pytest.mark.parametrize(
    "case", [case for case in CASES[1] if case.role == "policy" and case.model != "latent"], **NAMES
)
def test_convert_makes_the_saved_folder_of_a_checkpoint_and_of_pefts_folder(results, folder, tmp_path, case):
    found, base = results(1)[case.name], folder / "models" / case.model
    kept = found["after 3"]
    convert(folder / "ranks1" / case.name, tmp_path / "merged", to="hf", config_folder=base, max_shard_bytes=10**9)
    adapters = load_file(tmp_path / "merged" / "adapter" / "adapter_model.safetensors")
    assert adapters.keys() == kept.keys() and all(torch.equal(adapters[name], value) for name, value in kept.items())
    convert(tmp_path / "merged" / "adapter", tmp_path / "again", to="hf", config_folder=base, max_shard_bytes=10**9)
    merged, again = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "again"))
    assert all(torch.equal(again[name], value) for name, value in merged.items())
    for name, value in found["merged 3"].items():
        torch.testing.assert_close(merged[name], value, rtol=0, atol=1e-6, msg=name)
