"""Real Megatron models against transformers: the same numbers, on one rank and on every layout of four."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.config.schema import ParallelConfig, Recompute
from megatron_rl.data.batch import PackedBatch
from megatron_rl.families.model_facts import vision_token_ids
from megatron_rl.families.parameters import VALUE_HEAD
from megatron_rl.models import critic, policy
from megatron_rl.models.hf.model_config import load_hf_config
from megatron_rl.models.hf.tensor_sources import RandomSource, WeightsError
from megatron_rl.models.hf.weights import expected_names, export_weights, load_weights, save_hf
from megatron_rl.parallel import topology
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops
from tests.integration.models_worker import INIT_SEED, LAYOUTS, pack
from tests.integration.torchrun import run_ranks
from tests.tiny_models import DEFAULT_CONFIG, make_tiny_model

declare_torchvision_ops()  # before any model of transformers is imported

LAUNCH_TIMEOUT_S = 240
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=3.0,
    original_max_position_embeddings=16,
)
SHAPES: dict[str, dict[str, Any]] = {
    # two tokens that responses never contain, as models with vision have
    "qwen2_tied_odd_vocab_gqa7": dict(
        image_token_id=99,
        video_token_id=7,
        family="qwen2",
        tie_word_embeddings=True,
        vocab_size=101,
        hidden_size=112,
        num_attention_heads=14,
        num_key_value_heads=2,
    ),
    "qwen3_wide_heads": dict(family="qwen3", hidden_size=48, head_dim=24, vocab_size=97),
    "llama3_rope": dict(family="llama", head_dim=32, rope_parameters=LLAMA3_ROPE, num_key_value_heads=4),
}
LENGTHS = [9, 1, 33, 12, 6, 40, 21, 8]
TEMPERATURE = 0.7

Reference = dict[str, Any]


def make_sequences(vocab_size: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(8, min(vocab_size, 99), (length,), generator=generator) for length in LENGTHS]
    return sequences, [torch.randn(length, generator=generator) for length in LENGTHS]


def hf_outputs(model: Any, sequences: list[Tensor], temperature: float) -> tuple[list[Tensor], list[Tensor]]:
    """Per sequence (logprobs, entropy) in the alignment of data/batch.py, by full logits, one sequence at a time."""
    logprobs, entropies = [], []
    excluded = torch.tensor(vision_token_ids(model.config), dtype=torch.int64)
    for tokens in sequences:
        logits = model(tokens[None]).logits[0].index_fill(-1, excluded, -1e9)
        log_p = (logits / temperature).log_softmax(-1)[:-1]
        start = torch.zeros(1)
        logprobs.append(torch.cat([start, log_p.gather(1, tokens[1:, None])[:, 0]]))
        entropies.append(torch.cat([start, -(log_p.exp() * log_p).sum(-1)]))
    return logprobs, entropies


def hf_values(model: Any, head: Tensor, sequences: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Per sequence V(s_t) in the alignment of data/batch.py, and the value after each sequence's last token."""
    after = [model.model(tokens[None]).last_hidden_state[0] @ head[0] for tokens in sequences]
    return [torch.cat([torch.zeros(1), v[:-1]]) for v in after], torch.stack([v[-1] for v in after])


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def load_hf(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_tiny_model(tmp_path_factory.mktemp(name), **shape) for name, shape in SHAPES.items()}


@pytest.fixture(scope="session")
def references(models: dict[str, Path]) -> dict[str, Reference]:
    """Results of transformers: outputs and gradients per token, of a policy and of a critic with a given head."""
    found: dict[str, Reference] = {}
    for name, path in models.items():
        model, config = load_hf(path), load_hf_config(path)
        sequences, weights = make_sequences(config.vocab_size)
        tokens = sum(LENGTHS)
        logprobs, entropies = hf_outputs(model, sequences, TEMPERATURE)
        total = sum((w * lp).sum() for w, lp in zip(weights, logprobs)) + 0.1 * sum(e.sum() for e in entropies)
        policy_gradients = gradients(model, total / tokens)
        head = RandomSource(INIT_SEED, config.initializer_range).read(VALUE_HEAD, (1, config.hidden_size))
        head.requires_grad_()
        values, final = hf_values(model, head, sequences)
        total = sum((w * v).sum() for w, v in zip(weights, values)) + final.square().sum()
        critic_gradients = gradients(model, total / tokens)
        critic_gradients[VALUE_HEAD] = head.grad
        critic_gradients.pop("lm_head.weight", None)
        found[name] = dict(
            sequences=sequences,
            weights=weights,
            logprobs=[t.detach() for t in logprobs],
            entropies=[t.detach() for t in entropies],
            values=[t.detach() for t in values],
            final=final.detach(),
            policy_gradients=policy_gradients,
            critic_gradients=critic_gradients,
        )
    return found


@pytest.fixture
def single_rank() -> Iterator[ParallelConfig]:
    parallel = ParallelConfig()
    topology.initialize(parallel, seed=1)
    try:
        yield parallel
    finally:
        topology.destroy()


def build_loaded(path: Path, parallel: ParallelConfig, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Any:
    config = load_hf_config(path)
    chunks = policy.build_policy(config, parallel, dtype=dtype, seed=None, **kwargs)
    load_weights(chunks, config, path)
    return chunks, config


# One rank ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("recompute", [Recompute.none, Recompute.full])
def test_logprobs_and_entropy_equal_transformers(
    shape: str, recompute: Recompute, models: Any, references: Any, single_rank: ParallelConfig
) -> None:
    reference = references[shape]
    (chunk,), _ = build_loaded(models[shape], single_rank, recompute=recompute)
    batch = pack(reference["sequences"])
    logprobs, entropy = policy.token_logprobs(chunk, policy.forward(chunk, batch), batch, temperature=TEMPERATURE)
    torch.testing.assert_close(logprobs, torch.cat(reference["logprobs"]), atol=2e-5, rtol=0)
    torch.testing.assert_close(entropy, torch.cat(reference["entropies"]), atol=2e-5, rtol=0)
    assert (logprobs[1:8] < 0).all()


@pytest.mark.parametrize("recompute", Recompute)
def test_recomputation_does_not_change_gradients(
    recompute: Recompute, models: Any, references: Any, single_rank: ParallelConfig
) -> None:
    shape = "qwen3_wide_heads"
    reference = references[shape]
    (chunk,), config = build_loaded(models[shape], single_rank, recompute=recompute)
    batch, weights = pack(reference["sequences"]), torch.cat(reference["weights"])
    logprobs, entropy = policy.token_logprobs(chunk, policy.forward(chunk, batch), batch, temperature=TEMPERATURE)
    (((weights * logprobs).sum() + 0.1 * entropy.sum()) / sum(LENGTHS)).backward()
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.copy_(parameter.grad)
    for name, gradient in export_weights([chunk], config):
        expected = reference["policy_gradients"][name]
        torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-4, msg=f"{name}: {{}}".format)


def test_masked_tokens_get_no_logprob_and_give_no_gradient(models: Any, single_rank: ParallelConfig) -> None:
    (chunk,), config = build_loaded(models["llama3_rope"], single_rank)
    sequences, _ = make_sequences(config.vocab_size)
    batch = pack(sequences)
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(len(batch.tokens), generator=generator) < 0.3
    output = policy.forward(chunk, batch)
    everything, _ = policy.token_logprobs(chunk, output, batch)
    logprobs, entropy = policy.token_logprobs(chunk, output, batch, mask=mask)
    torch.testing.assert_close(logprobs, everything * mask, atol=1e-6, rtol=0)
    assert (entropy[~mask] == 0).all() and (entropy[mask & (everything != 0)] > 0).all()
    (gradient,) = torch.autograd.grad(logprobs.sum(), output)
    reached = gradient[0].abs().sum(-1) > 0
    predicts_masked_in = torch.zeros_like(mask)
    predicts_masked_in[:-1] = (mask & (everything != 0))[1:]
    assert torch.equal(reached, predicts_masked_in)


def test_a_mask_without_any_token_still_gives_a_gradient_of_zero(models: Any, single_rank: ParallelConfig) -> None:
    (chunk,), config = build_loaded(models["llama3_rope"], single_rank)
    batch = pack(make_sequences(config.vocab_size)[0])
    output = policy.forward(chunk, batch)
    logprobs, _ = policy.token_logprobs(chunk, output, batch, mask=torch.zeros_like(batch.tokens, dtype=torch.bool))
    assert (logprobs == 0).all()
    logprobs.sum().backward()
    assert all(p.grad is None or (p.grad == 0).all() for p in chunk.parameters())


def test_packing_and_order_do_not_change_logprobs(models: Any, single_rank: ParallelConfig) -> None:
    (chunk,), config = build_loaded(models["qwen3_wide_heads"], single_rank)
    batch = pack(make_sequences(config.vocab_size)[0])
    together, _ = policy.token_logprobs(chunk, policy.forward(chunk, batch), batch)
    order = [5, 0, 7, 3, 1, 2, 6, 4]
    shuffled = batch.select(order)
    reordered, _ = policy.token_logprobs(chunk, policy.forward(chunk, shuffled), shuffled)
    expected = PackedBatch(batch.tokens, batch.cu_seqlens, {"logprobs": together}).select(order).fields["logprobs"]
    torch.testing.assert_close(reordered, expected, atol=1e-5, rtol=0)


def test_bfloat16_logprobs_stay_near_float32(models: Any, references: Any, single_rank: ParallelConfig) -> None:
    shape = "qwen3_wide_heads"
    (chunk,), _ = build_loaded(models[shape], single_rank, dtype=torch.bfloat16)
    batch = pack(references[shape]["sequences"])
    logprobs, _ = policy.token_logprobs(chunk, policy.forward(chunk, batch), batch, temperature=TEMPERATURE)
    assert logprobs.dtype == torch.float32
    assert (logprobs - torch.cat(references[shape]["logprobs"])).abs().mean() < 0.1


def test_random_weights_have_the_configured_spread(models: Any, single_rank: ParallelConfig) -> None:
    config = load_hf_config(models["qwen2_tied_odd_vocab_gqa7"])
    chunks = policy.build_policy(config, single_rank, dtype=torch.float32, seed=4)
    exported = dict(export_weights(chunks, config))
    assert exported["model.layers.1.mlp.down_proj.weight"].std() == pytest.approx(config.initializer_range, rel=0.05)
    assert (exported["model.norm.weight"] == 1).all()
    assert (exported["model.layers.0.self_attn.q_proj.bias"] == 0).all()


def test_a_saved_critic_is_loaded_with_its_head(models: Any, single_rank: ParallelConfig, tmp_path: Path) -> None:
    path = models["qwen3_wide_heads"]
    config = load_hf_config(path)
    first = critic.build_critic(config, single_rank, dtype=torch.float32, seed=2)
    assert load_weights(first, config, path, role="critic") == [VALUE_HEAD]
    save_hf(first, config, path, tmp_path / "critic", role="critic")
    second = critic.build_critic(config, single_rank, dtype=torch.float32, seed=3)
    assert load_weights(second, config, tmp_path / "critic", role="critic") == []
    expected = dict(export_weights(first, config, role="critic"))
    for name, tensor in export_weights(second, config, role="critic"):
        assert torch.equal(tensor, expected[name]), name
    actor = policy.build_policy(config, single_rank, dtype=torch.float32, seed=None)
    with pytest.raises(WeightsError, match=VALUE_HEAD):
        load_weights(actor, config, tmp_path / "critic")


def test_saving_replaces_a_folder_and_leaves_no_other_files(
    models: Any, single_rank: ParallelConfig, tmp_path: Path
) -> None:
    path = models["llama3_rope"]
    chunks, config = build_loaded(path, single_rank)
    target = tmp_path / "saved"
    target.mkdir()
    (target / "stale.safetensors").write_text("old")
    save_hf(chunks, config, path, target)
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]
    assert not (target / "stale.safetensors").exists()
    assert (target / "tokenizer.json").read_text() == (path / "tokenizer.json").read_text()
    original, saved = load_file(path / "model.safetensors"), load_file(target / "model.safetensors")
    assert original.keys() == saved.keys() and all(torch.equal(original[n], saved[n]) for n in original)
    assert load_hf_config(target).rope_parameters == config.rope_parameters


def break_folder(source: Path, target: Path, edit: Any) -> Path:
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def test_mismatched_checkpoints_are_refused_by_tensor_name(
    models: Any, single_rank: ParallelConfig, tmp_path: Path
) -> None:
    path = models["qwen3_wide_heads"]
    chunks, config = build_loaded(path, single_rank)
    name = "model.layers.1.self_attn.k_norm.weight"
    broken = break_folder(path, tmp_path / "missing", lambda tensors: tensors.pop(name))
    with pytest.raises(WeightsError, match=name):
        load_weights(chunks, config, broken)
    extra = break_folder(
        path, tmp_path / "extra", lambda tensors: tensors.update({"model.layers.2.x.weight": torch.zeros(1)})
    )
    with pytest.raises(WeightsError, match="model.layers.2.x.weight"):
        load_weights(chunks, config, extra)
    vocab = break_folder(
        path,
        tmp_path / "vocab",
        lambda tensors: tensors.update({"model.embed_tokens.weight": torch.zeros(96, config.hidden_size)}),
    )
    with pytest.raises(WeightsError, match=r"embed_tokens.*\(96, 48\).*\(97, 48\).*vocab_size"):
        load_weights(chunks, config, vocab)
    data = (path / "model.safetensors").read_bytes()
    (vocab / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(WeightsError, match="model.safetensors is not a complete safetensors file"):
        load_weights(chunks, config, vocab)


@pytest.mark.parametrize(
    "fields",
    [
        dict(model_type="qwen3_moe", num_experts=4, moe_intermediate_size=48, head_dim=16, norm_topk_prob=True),
        dict(model_type="mixtral", num_local_experts=4),
    ],
    ids=["qwen3_moe", "mixtral"],
)
def test_mixtures_of_experts_equal_transformers_and_keep_every_bit(
    fields: dict[str, Any], single_rank: ParallelConfig, tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**{**DEFAULT_CONFIG, "num_experts_per_tok": 2, **fields})
    )
    with torch.no_grad():
        for parameter in model.parameters():
            # Apart from zeros and ones, so that swapped tensors show.
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path)
    (chunk,), config = build_loaded(tmp_path, single_rank)
    sequences, _ = make_sequences(config.vocab_size)
    batch = pack(sequences)
    logprobs, _ = policy.token_logprobs(chunk, policy.forward(chunk, batch), batch)
    torch.testing.assert_close(logprobs, torch.cat(hf_outputs(model, sequences, 1.0)[0]), atol=2e-5, rtol=0)
    original = load_file(tmp_path / "model.safetensors")
    exported = dict(export_weights([chunk], config))
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], original[name]) for name in original)


def test_an_empty_batch_is_refused(models: Any, single_rank: ParallelConfig) -> None:
    (chunk,), _ = build_loaded(models["llama3_rope"], single_rank)
    with pytest.raises(ValueError, match="empty batch"):
        policy.forward(chunk, PackedBatch(torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)))


# Four ranks ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def four_ranks(
    models: dict[str, Path], references: dict[str, Reference], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[tuple[str, str], Any], Path]:
    """Results of ``models_worker.py`` by (layout, model), and its folder; one launch for all tests."""
    folder = tmp_path_factory.mktemp("four_ranks")
    jobs = {
        name: dict(path=str(path), sequences=references[name]["sequences"], weights=references[name]["weights"])
        for name, path in models.items()
    }
    torch.save(jobs, folder / "jobs.pt")
    run_ranks(4, "tests.integration.models_worker", folder, log=folder / "log.txt", timeout_s=LAUNCH_TIMEOUT_S)
    return torch.load(folder / "results.pt"), folder


by_layout = pytest.mark.parametrize("layout", LAYOUTS)
by_shape = pytest.mark.parametrize("shape", SHAPES)


@by_layout
@by_shape
def test_every_layout_equals_transformers_in_outputs(
    layout: str, shape: str, four_ranks: Any, references: Any
) -> None:
    results, reference = four_ranks[0][layout, shape], references[shape]
    seen = []
    for microbatches, outputs in results["policy"]["outputs"]:
        for indices in microbatches:
            seen += indices
            expected = torch.cat([reference[key][i] for key in ("logprobs", "entropies") for i in indices])
            torch.testing.assert_close(outputs[: len(expected)], expected, atol=2e-5, rtol=0)
            outputs = outputs[len(expected) :]
    assert sorted(seen) == list(range(len(LENGTHS)))
    for microbatches, outputs in results["critic"]["outputs"]:
        for indices in microbatches:
            expected = torch.cat([*(reference["values"][i] for i in indices), reference["final"][indices]])
            torch.testing.assert_close(outputs[: len(expected)], expected, atol=2e-5, rtol=0)
            outputs = outputs[len(expected) :]


@by_layout
@by_shape
@pytest.mark.parametrize("role", ["policy", "critic"])
def test_every_layout_equals_transformers_in_gradients(
    layout: str, shape: str, role: str, four_ranks: Any, references: Any
) -> None:
    found, expected = four_ranks[0][layout, shape][role]["gradients"], references[shape][f"{role}_gradients"]
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        largest, error = expected[name].abs().max().item(), (gradient - expected[name]).abs().max().item()
        assert largest > 0 and error <= 5e-5 * largest, f"{name}: off by {error} of {largest}"


@by_layout
@by_shape
def test_loading_and_exporting_keeps_every_bit(layout: str, shape: str, four_ranks: Any, models: Any) -> None:
    original = load_file(models[shape] / "model.safetensors")
    for role in ("policy", "critic"):
        loaded = four_ranks[0][layout, shape][role]["loaded"]
        assert list(loaded) == list(expected_names(load_hf_config(models[shape]), role))
        for name, tensor in loaded.items():
            if name != VALUE_HEAD:
                assert torch.equal(tensor, original[name]), name


@by_layout
@by_shape
def test_random_weights_do_not_depend_on_the_layout(layout: str, shape: str, four_ranks: Any) -> None:
    for role in ("policy", "critic"):
        expected = four_ranks[0]["dp4", shape][role]["init"]
        found = four_ranks[0][layout, shape][role]["init"]
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), name


@by_layout
@by_shape
def test_transformers_loads_what_every_layout_saved(layout: str, shape: str, four_ranks: Any, models: Any) -> None:
    saved = four_ranks[1] / "saved" / f"{shape}_{layout}"
    assert len(list(saved.glob("model-*-of-*.safetensors"))) > 1
    expected = load_hf(models[shape]).state_dict()
    found = load_hf(saved).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
