"""Every layout that passes the check can be built by Megatron, at every rank's coordinates, on the meta device."""

import functools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.config.layout import layout_problems, ranks_needed
from megatron_rl.config.schema import ParallelConfig, Recompute
from megatron_rl.data.batch import select_spans
from megatron_rl.errors import ModelError
from megatron_rl.models import critic, policy
from megatron_rl.models.hf.megatron_config import check_layout
from megatron_rl.models.hf.model_config import load_hf_config
from megatron_rl.parallel import topology
from tests.integration.models_worker import pack
from tests.odd_models import FAMILIES, odd_config
from tests.tiny_families import LINEAR_SHAPES, SHAPES, family_config

NUM_BUILT = 6
"""Number of random layouts per family."""


def random_layout(draw: random.Random, num_layers: int) -> ParallelConfig:
    tp = draw.choice([1, 2, 2, 3])
    pp = draw.choice([1, 1, 2, 3])
    layers = draw.choice([[], [], [max(1, num_layers - pp + 1), *[1] * (pp - 1)]])
    return ParallelConfig(
        tensor_parallel_size=tp,
        sequence_parallel=tp > 1 and draw.random() < 0.8,
        pipeline_parallel_size=pp,
        pipeline_layers=layers,
        virtual_pipeline_size=2 if pp > 1 and not layers and draw.random() < 0.2 else 1,
        context_parallel_size=draw.choice([1, 1, 1, 2]),
        expert_parallel_size=(ep := draw.choice([1, 1, 2, 3])),
        expert_tensor_parallel_size=draw.choice([0, 1, 2]) if ep > 1 else 0,
    )


def build(hf_config: Any, parallel: ParallelConfig, rank: int, world_size: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        topology.add_layout(parallel, seed=0)
        with torch.device("meta"):
            policy.build_policy(hf_config, parallel, dtype=torch.float32, seed=None)
            critic.build_critic(hf_config, parallel, dtype=torch.float32, seed=None)
    finally:
        topology.destroy()


@pytest.mark.parametrize("family", FAMILIES)
def test_accepted_layouts_can_be_built(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Replaced, because groups of gloo would wait for the other ranks.
    groups = functools.partial(parallel_state.initialize_model_parallel, create_gloo_process_groups=False)
    monkeypatch.setattr(parallel_state, "initialize_model_parallel", groups)
    built = refused = 0
    for seed in range(40):
        if built >= NUM_BUILT:
            break
        (tmp_path / "config.json").write_text(json.dumps(odd_config(family, seed)))
        try:
            hf_config = load_hf_config(tmp_path)
        except ModelError:
            continue
        draw = random.Random(f"{family}/{seed}")
        for _ in range(6):
            text = getattr(hf_config, "text_config", hf_config)
            parallel = random_layout(draw, text.num_hidden_layers)
            if list(layout_problems(parallel, None)):
                continue
            try:
                check_layout(hf_config, parallel)
            except ModelError:
                refused += 1
                continue
            world_size = ranks_needed(parallel)
            build(hf_config, parallel, draw.randrange(world_size), world_size)
            built += 1
    assert built >= NUM_BUILT and refused, (built, refused)


class RowByRow(TorchDispatchMode):
    """Shapes of batched products whose left factors have one row: a product of a layer that runs row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.bmm.default and args[0].shape[1] == 1:
            self.shapes.append(tuple(args[0].shape))
        return function(*args, **(kwargs or {}))


# Megatron's linear attention transposes its rows itself.
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape not in LINEAR_SHAPES])
def test_no_layer_multiplies_row_by_row_in_forward_only_passes_and_in_gradients_through_frozen_layers(shape: str) -> None:
    topology.initialize(ParallelConfig(), seed=1)
    try:
        (chunk,) = policy.build_policy(family_config(shape), ParallelConfig(), dtype=torch.float32, seed=1)
        batch = pack([torch.arange(3, 40), torch.arange(5, 25)])
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_("norm" in name)
        with RowByRow() as found:
            with torch.no_grad():
                policy.token_logprobs(chunk, policy.forward(chunk, batch), batch)
            policy.token_logprobs(chunk, policy.forward(chunk, batch), batch)[0].sum().backward()
        assert found.shapes == []
    finally:
        topology.destroy()


def test_log_probs_of_other_tokens_are_those_that_the_token_would_have_in_its_place() -> None:
    topology.initialize(ParallelConfig(), seed=1)
    try:
        (chunk,) = policy.build_policy(family_config("qwen2_gqa7_tied"), ParallelConfig(), dtype=torch.float32, seed=1)
        batch = pack([torch.arange(3, 40), torch.arange(5, 25)])
        mask = torch.arange(len(batch.tokens)) % 3 > 0
        others = torch.stack([batch.tokens, batch.tokens + 1], 1).int()
        with torch.no_grad():
            output = policy.forward(chunk, batch)
            alone, entropy = policy.token_logprobs(chunk, output, batch, mask=mask)
            found, same = policy.token_logprobs(chunk, output, batch, mask=mask, others=others)
            ids = torch.arange(chunk.real_vocab_size).expand(len(batch.tokens), -1)
            every, _ = policy.token_logprobs(chunk, output, batch, mask=mask, others=ids)
        assert torch.equal(entropy, same) and torch.equal(found[:, 0], alone) and torch.equal(found[:, 1], alone)
        wanted = alone != 0
        torch.testing.assert_close(every[wanted, 1:].exp().sum(1), torch.ones(int(wanted.sum())))
        assert torch.equal(every.gather(1, others[:, 1:].long() + 1)[:, 0], found[:, 2])
    finally:
        topology.destroy()


@pytest.mark.parametrize("recompute", [None, Recompute.full])
@pytest.mark.parametrize("role", ["policy", "critic"])
def test_a_last_layer_that_finishes_only_the_rows_that_are_read_gives_the_same_results_and_gradients(role: str, recompute) -> None:
    topology.initialize(ParallelConfig(), seed=1)
    try:
        hf_config, build = family_config("qwen2_gqa7_tied"), policy.build_policy if role == "policy" else critic.build_critic
        (chunk,) = build(hf_config, ParallelConfig(), dtype=torch.float32, seed=1, **({"recompute": recompute} if recompute else {}))
        batch = pack([torch.arange(3, 40), torch.arange(5, 25)])
        mask = torch.arange(len(batch.tokens)) % 30 > 20
        batch = replace(batch, fields={"mask": mask.float()}, spans=torch.tensor([[20, 30], [3, 20]]))
        read_outputs = (policy if role == "policy" else critic).read_outputs
        read = read_outputs(batch)
        assert read is not None and 0 < read.sum() < len(read)
        found, num_rows = [], set[int]()
        chunk.decoder.layers[-1].mlp.register_forward_hook(lambda _, inputs, __: num_rows.add(len(inputs[0])))
        for options in ({}, {"read": read_outputs}):
            chunk.zero_grad(set_to_none=True)
            output = policy.forward(chunk, batch, **options)
            if role == "policy":
                results = policy.token_logprobs(chunk, output, batch, mask=mask)[0]
            else:
                values = select_spans(batch, critic.token_values(chunk, output, batch))
                results = torch.cat([values, critic.final_values(chunk, output, batch)])
            (results * torch.linspace(1, 2, len(results))).sum().backward()
            found.append([results.detach(), *(parameter.grad for parameter in chunk.parameters())])
        assert num_rows == {len(read), int(read.sum())}
        for ours, whole in zip(*found, strict=True):
            torch.testing.assert_close(ours, whole, rtol=1e-5, atol=1e-6)
    finally:
        topology.destroy()
