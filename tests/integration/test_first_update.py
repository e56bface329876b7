"""Passes that are left out, and how sequences are packed, change an update by float32's rounding and by nothing else.

The step's own stages, once as they are (a first update takes its own log-probs for the old ones), once with a pass of all rows
before it, on a real model. In float64 both give the same loss, gradient and weights to 12 digits: the formulas are equal. In
float32, by the trainer itself, they differ where log-probs come from another pack, for a row of a product rounds otherwise
beside other rows: by some 1e-7 of the whole, the eighth digit of a loss.
"""

import random
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.config.schema import BatchConfig, KlPlace, Normalization, OptimizerConfig, ParallelConfig
from megatron_rl.data.batch import PackedBatch
from megatron_rl.models import policy
from megatron_rl.parallel import topology as topologies
from megatron_rl.training import losses
from megatron_rl.training.batching import plan_microbatches
from megatron_rl.training.engine import Engine, UpdateResult
from megatron_rl.training.trainer_group import TrainerGroup
from megatron_rl.training.trainer_rank import TrainerRank
from tests.integration.engine_worker import ALGORITHM, make_batch
from tests.tiny_models import make_tiny_model
from tests.token_indices import token_indices
from tests.unit.step.test_first_updates import STEP, configured, responses, run_a_step

EXACT = 1e-12
ROUNDED = 5e-6
"""Tolerance relative to the largest value, in float32; steps of 1e-3 move weights by 2e-2 of the largest."""
LR = 1e-3


def ppo(size):
    config = configured(size)
    config.algorithm.entropy_coef = 0.01
    return config


def grpo(size):
    config = configured(size, KlPlace.loss)
    config.algorithm.advantage, config.algorithm.normalization = "group", Normalization.none
    config.algorithm.kl.target = 0.0
    return config


def decoupled(size):
    """The objective of schedule.mode=async: the weights also come from the old log-probs."""
    return configured(size, weight="token")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture(scope="module")
def place():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield topologies.initialize(ParallelConfig(), seed=1)
    topologies.destroy()
    torch.set_num_threads(threads)


class Exact:
    """The interface of ``TrainerGroup`` that the loop uses, in float64 and with plain gradient descent."""

    def __init__(self, engine: Engine, rng: random.Random, algorithm) -> None:
        self.engine, self.rng, self.algorithm = engine, rng, algorithm
        self.losses: list[float] = []
        self.gradients: list[torch.Tensor] = []

    def packs(self, batch, rows):
        """A split of its own for every call."""
        rows = list(range(batch.num_sequences) if rows is None else rows)
        plan = plan_microbatches([int(batch.lengths[row]) for row in rows], 1, self.rng.choice([1, 9, 16, 99]))
        return [[rows[index] for index in indices] for indices in plan[0]]

    def logprobs(self, batch, rows=None, *, temperature, engine="policy"):
        found = torch.zeros(len(batch.tokens), dtype=torch.float64)
        if engine == "reference":
            return found.masked_fill(batch.fields["mask"], -4.5)
        for indices in self.packs(batch, rows) if rows is None or len(rows) else ():
            with torch.no_grad():
                found[token_indices(batch, indices)] = self.outputs(batch.select(indices), temperature)["logprobs"]
        return found

    def update(self, engine, batch, rows, *, objective, denominators, temperature=1.0, keeps_logprobs=False):
        kept, weights = torch.zeros(len(batch.tokens), dtype=torch.float64), list(self.engine.chunks[0].parameters())
        loss = losses.build(objective, self.algorithm, denominators, is_own_old=keeps_logprobs)
        self.losses.append(0.0)
        for indices in self.packs(batch, rows):
            part = batch.select(indices)
            part = part.with_fields(**{name: in_float64(values) for name, values in part.fields.items()})
            outputs = self.outputs(part, temperature)
            value, _ = loss(outputs, part)
            value.backward()
            self.losses[-1] += value.item()
            kept[token_indices(batch, indices)] = outputs["logprobs"].detach()
        self.gradients.append(torch.cat([weight.grad.flatten() for weight in weights]))
        with torch.no_grad():
            for weight in weights:
                weight -= LR * weight.grad
                weight.grad = None
        result = UpdateResult(self.gradients[-1].norm().item(), LR, {"policy_loss": (self.losses[-1], 1.0)}, skipped=False)
        return SimpleNamespace(**{**vars(result), "logprobs": kept if keeps_logprobs else None})

    def outputs(self, batch: PackedBatch, temperature):
        chunk = self.engine.chunks[0]
        batch = batch.joined()
        return self.engine._outputs(chunk, batch, policy.forward(chunk, batch, None), temperature)

    def weights(self):
        return torch.cat([parameter.detach().flatten() for parameter in self.engine.chunks[0].parameters()])


def in_float64(values):
    return values.double() if values.is_floating_point() else values


def exact(model, place, config, rng):
    engine = Engine("policy", model, parallel=ParallelConfig(), topology=place, optimizer=None, dtype=SimpleNamespace(value="float64"))
    engine.chunks[0].requires_grad_(True)
    group = Exact(engine, rng, config.algorithm)
    engine.chunks[0].train()
    return group


def assert_close(found, expected, share):
    difference = (torch.as_tensor(found) - torch.as_tensor(expected)).abs().max().item()
    largest = torch.as_tensor(expected).abs().max().item()
    assert difference <= share * largest, f"{difference / largest:.1e} of the largest number"


@pytest.mark.parametrize("size", [99, 3])
@pytest.mark.parametrize("make", [ppo, grpo, decoupled])
def test_float64_update_without_the_extra_pass_agrees_to_twelve_digits(model, place, make, size):
    found = []
    for own in (True, False):
        config = make(size)
        group = exact(model, place, config, random.Random(int(own)))
        state, _ = run_a_step(config, own=own, group=group, slots=responses(all_end=make is grpo), dtype=torch.float64)
        found.append((group, state.metrics))
    (short, metrics), (long, expected) = found
    assert len(short.losses) == len(long.losses) == -(-7 // size)
    assert any(gradient.abs().max() > 0 for gradient in long.gradients)
    for ours, theirs in zip(short.losses, long.losses, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-10, abs=1e-13)
    for ours, theirs in zip(short.gradients, long.gradients, strict=True):
        assert_close(ours, theirs, 1e-10)
    assert_close(short.weights(), long.weights(), EXACT)
    for name in ("policy/grad_norm", "mismatch/k3"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-10)


@pytest.mark.parametrize("size", [99, 3])
@pytest.mark.parametrize("make", [ppo, decoupled])
def test_updates_with_and_without_the_extra_pass_differ_by_rounding_only(model, place, make, size):
    found = []
    for own in (True, False):
        config = make(size)
        config.batch = BatchConfig(max_tokens_per_microbatch=24, policy_minibatch_size=size)
        optimizer = OptimizerConfig(lr=LR, warmup_steps=0, eps=1e-3)
        engine = Engine("policy", model, parallel=ParallelConfig(), topology=place, optimizer=optimizer)
        group = TrainerGroup(TrainerRank(config, place, {"policy": engine}))
        start = weights_of(group)
        with group.stage(STEP, "step"):
            state, _ = run_a_step(config, own=own, group=group, slots=responses(all_end=True))
        group.release(STEP)
        found.append((state, weights_of(group), start))
    (short, weights, start), (long, expected, _) = found
    for name in ("policy/loss", "policy/grad_norm"):
        assert short.metrics[name] == pytest.approx(long.metrics[name], rel=ROUNDED, abs=1e-7)
    assert_close(weights, expected, ROUNDED)
    assert (weights - start).abs().max() > 100 * ROUNDED * start.abs().max()  # what is compared could differ
    read = short.policy_batch.fields["mask"]
    assert_close(short.old_logprobs[read], long.old_logprobs[read], ROUNDED)


def weights_of(group):
    return torch.cat([tensor.detach().clone().flatten() for _, tensor in sorted(group.export_weights("policy"))])


def test_float64_loss_and_gradient_do_not_depend_on_packing(model, place):
    """Nor on the order of sequences, nor on sequences that train nothing; so a layout changes them by rounding alone."""
    batch = make_batch()
    batch.fields["old_logprobs"] = -4.8 + batch.fields["noise"]
    untrained = make_batch(masked_rows=3)
    untrained.fields["old_logprobs"] = -4.8 + untrained.fields["noise"]
    counts = losses.policy_denominators(batch, ALGORITHM)
    found = []
    for seed in range(6):
        rng = random.Random(seed)
        whole = untrained if seed % 2 else batch
        rows = rng.sample(range(whole.num_sequences), whole.num_sequences) if seed else range(whole.num_sequences)
        group = exact(model, place, SimpleNamespace(algorithm=ALGORITHM), rng)
        group.update("policy", whole, rows, objective="policy", denominators=counts)
        found.append((group.losses[0], group.gradients[0]))
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=EXACT)
        assert_close(gradient, found[0][1], EXACT)
