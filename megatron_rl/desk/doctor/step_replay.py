"""Replays recorded steps of a run: the same prompts, the tokens of the record, and each stage's own function on them.

Every stage of a step gets its usual inputs, except that tokens and their log-probs come from the record. A
deviating stage therefore shows in its own step, and in later stages only to the extent that they depend on it.
``Quantities`` are small: one value per sequence, two per weight.
"""

import asyncio
import hashlib
import inspect
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config.schedule_facts import Facts, facts_of
from megatron_rl.config.schema import Config
from megatron_rl.data.batch import PackedBatch
from megatron_rl.data.trajectory import Segment, Trajectory
from megatron_rl.rewards.router import build_rewards
from megatron_rl.schedule.graph import Resource
from megatron_rl.schedule.table import GENERATE, make_graph
from megatron_rl.step.collect import ChildCpuClock, Collector
from megatron_rl.step.kl_penalty import KlPenalty
from megatron_rl.step.loop import share_out
from megatron_rl.step.run_inputs import RunInputs
from megatron_rl.step.scoring import ResponseScorer
from megatron_rl.step.stages import function_of
from megatron_rl.step.state import StepState
from megatron_rl.step.updates import CriticWarmup
from megatron_rl.step.window_advantages import SINGLE_RESPONSE
from megatron_rl.training.trainer_group import TrainerGroup

Quantities = dict[str, list[float] | str]
"""Maps a name to values, or to a digest if they must be exactly equal."""
Window = dict[str, dict[str, Any]]
"""Trajectory id -> token_ids, logprobs and finish_reason of the tokens that a step generated."""
STAGES = ("generate", "score", "values", "old_logprobs", "advantages", "update_policy", "publish", "update_critic")
"""Stages that are replayed, in this order."""


@dataclass
class RecordedServers:
    """Servers that return the record's tokens."""

    windows: Sequence[Window]
    """Windows by step."""
    weight_version: int = 1

    async def generate(
        self, trajectories: Sequence[Trajectory], *, step: int, window_tokens: int, is_enough: Any = None, open_row: Any = None
    ) -> dict[int, float]:
        for trajectory in trajectories:
            window = self.windows[step].get(str(trajectory.id))
            if window is not None and not trajectory.finished:
                segment = Segment(window["token_ids"], window["logprobs"], self.weight_version, window["finish_reason"], step=step)
                trajectory.segments.append(segment)
        return {}

    def publish(self) -> Any:
        self.weight_version += 1
        return SimpleNamespace(seconds=0.0, num_bytes=0, buffer_bytes=0)

    def weights_changed(self) -> None: ...

    def wake(self) -> None: ...


def _quantities(state: StepState, stage: str, group: TrainerGroup) -> Quantities:
    """The quantities of a stage that has just run."""
    batch = state.batch
    match stage:
        case "generate":
            return {"prompts": _digest([t.prompt.token_ids for t in state.slots])}
        case "score":
            return {"rewards": [-1.0 if t.reward is None else float(t.reward) for t in state.finished]}
        case "values" if state.values is not None:
            return {"values": _by_sequence(state.values, batch)}
        case "old_logprobs" if not state.first_update:
            return {"log-probs": _by_sequence(state.old_logprobs, batch)}
        case "advantages":
            return {"advantages": _by_sequence(state.policy_batch.fields["advantages"], state.policy_batch)}
        case "update_policy":
            logprobs: Quantities = {"log-probs": _by_sequence(state.old_logprobs, batch)} if state.first_update else {}
            return logprobs | _update_quantities(state, "policy")
        case "update_critic":
            return _update_quantities(state, "critic")
        case "publish":
            return weight_fingerprints(group, "policy")
    return {}


def _update_quantities(state: StepState, model: str) -> Quantities:
    names = [f"{model}/{name}" for name in ("lr", "loss", "grad_norm")]
    return {_label(name): [state.metrics[name]] for name in names if name in state.metrics}


def _window(state: StepState, step: int) -> Window:
    """The tokens that this step generated, in the form that ``RecordedServers`` takes."""
    return {
        str(t.id): {
            "token_ids": s.token_ids.tolist(),
            "logprobs": [round(float(value), 7) for value in s.rollout_logprobs],
            "finish_reason": s.finish_reason,
        }
        for t in state.slots
        for s in t.segments
        if s.step == step
    }


def weight_fingerprints(group: TrainerGroup, engine: str) -> Quantities:
    """Two values per tensor: its norm, and its dot product with a fixed vector, which also detects swapped elements."""
    fingerprints: Quantities = {}
    for name, tensor in group.export_weights(engine):
        flat = tensor.detach().double().flatten().cpu()
        probe = torch.cos(torch.arange(len(flat), dtype=torch.float64))
        fingerprints[f"weights {name}"] = [float(flat.norm()), float(flat @ probe)]
    return fingerprints


def replay(
    config: Config,
    group: TrainerGroup,
    inputs: RunInputs,
    rollout: Any,
    num_steps: int,
    wait_for: Callable[[Coroutine[Any, Any, Any]], Any] = asyncio.run,
) -> Iterator[tuple[int, str, Quantities, Window]]:
    """Run the stages of each step; yields (step, stage, quantities, window). Trainer stages are collective.

    The window is empty except after ``generate``. ``rollout``: ``RecordedServers``, or a service that samples.
    ``wait_for`` runs a coroutine on the service's event loop.
    """
    facts = facts_of(config)
    stages = {stage.name: stage for stage in make_graph(facts)}
    with build_rewards(config.reward) as rewards:
        scorer = ResponseScorer(config.reward, rewards, inputs.tokenizer.decode, None)
        components = _components(config, facts, group, inputs, rollout, scorer)
        for step in range(num_steps):
            state = StepState()
            for stage in (stages[name] for name in STAGES if name in stages):
                run, taken = function_of(stage.name)
                arguments = {name: components[name] for name in taken}
                if stage.resource is Resource.trainer:
                    with group.stage(step, stage.name):
                        share_out(config, group, state, step)
                        run(step, state, **arguments)
                elif inspect.iscoroutinefunction(run):
                    wait_for(run(step, state, **arguments))
                else:
                    run(step, state, **arguments)
                window = _window(state, step) if stage.name == GENERATE else {}
                yield step, stage.name, _quantities(state, stage.name, group), window
            group.release(step)


def _components(
    config: Config, facts: Facts, group: TrainerGroup, inputs: RunInputs, rollout: Any, grader: ResponseScorer
) -> dict[str, Any]:
    """Arguments of the replayed stages, by name; recorder, health checks and evaluation are replaced by objects without effect."""
    return {
        "config": config,
        "facts": facts,
        "group": group,
        "pool": inputs.pool,
        "collector": Collector(config, inputs.pool, rollout, grader),
        "rollout": rollout,
        "grader": grader,
        "kl_penalty": KlPenalty(config.algorithm.kl),
        "warmup": CriticWarmup(config),
        "rules": SINGLE_RESPONSE,
        "children": ChildCpuClock(),
        "recorder": SimpleNamespace(elapsed_s=0.0, log_stage_facts=lambda *words, **facts: None),
        "health": SimpleNamespace(check_parity=lambda step, state: None),
        "stop_after": lambda step: None,
        "store_samples": lambda state, step: None,
        "evaluator": None,
        "fleet": None,
        "vision": None,
    }


def _by_sequence(values: Tensor, batch: PackedBatch) -> list[float]:
    """The mean over each sequence's masked tokens, in float64."""
    mask, masked = batch.fields["mask"], torch.where(batch.fields["mask"], values, 0.0).double()
    bounds = batch.cu_seqlens.tolist()
    return [
        float(masked[start:end].sum()) / max(int(mask[start:end].sum()), 1)
        for start, end in pairwise(bounds)
    ]


def _label(metric: str) -> str:
    return metric.replace("/", " ").replace("grad_norm", "gradient norm")


def _digest(rows: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(repr([list(row) for row in rows]).encode()).hexdigest()[:16]
