"""Replays recorded steps of a run: same prompts, recorded tokens, and the quantities that each stage computes here.

Every stage of a step gets its usual inputs, except that tokens and their log-probs come from the record. A
deviating stage therefore shows in its own step, and in later stages only to the extent that they depend on it.
``Quantities`` are small: one value per sequence, two per weight.
"""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config.schema import Config
from megatron_rl.data.batch import PackedBatch
from megatron_rl.data.trajectory import Segment, Trajectory
from megatron_rl.rewards.router import build_rewards
from megatron_rl.step.advantage_spans import SINGLE_RESPONSE
from megatron_rl.step.collect import Collector
from megatron_rl.step.loop import LoopComponents, TrainingLoop
from megatron_rl.step.run_inputs import RunInputs
from megatron_rl.step.scoring import ResponseScorer
from megatron_rl.step.table import graph_of
from megatron_rl.training.trainer_group import TrainerGroup

Quantities = dict[str, list[float] | str]
"""Maps a name to values, or to a digest if they must be exactly equal."""
Window = dict[str, dict[str, Any]]
"""Tokens generated in one step, by trajectory id: token_ids, logprobs and finish_reason."""
STAGES = ("generate", "score", "values", "old_logprobs", "advantages", "update_policy", "publish", "update_critic")
"""Stages that are replayed, in this order."""


@dataclass
class RecordedServers:
    """A rollout service that returns the record's tokens."""

    windows: Sequence[Window]
    """Recorded windows by step."""
    weight_version: int = 1

    async def generate(
        self, trajectories: Sequence[Trajectory], *, step: int, window_tokens: int, is_enough: Any = None
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


class _Loop(TrainingLoop):
    def quantities(self, step: int, stage: str, group: TrainerGroup) -> Quantities:
        """Quantities of a stage that has just run."""
        state = self._states[step]
        batch = state.batch
        if stage == "generate":
            return {"prompts": _digest([t.prompt.token_ids for t in state.slots])}
        if stage == "score":
            return {"rewards": [-1.0 if t.reward is None else float(t.reward) for t in state.finished]}
        if stage == "values" and state.values is not None:
            return {"values": _by_sequence(state.values, batch)}
        if stage == "old_logprobs" and not state.first_update:
            return {"log-probs": _by_sequence(state.old_logprobs, batch)}
        if stage == "advantages":
            return {"advantages": _by_sequence(state.policy_batch.fields["advantages"], state.policy_batch)}
        if stage in ("update_policy", "update_critic"):
            # Without a separate pass, the old log-probs come from the first update.
            of_update = stage == "update_policy" and bool(state.first_update)
            logprobs: Quantities = {"log-probs": _by_sequence(state.old_logprobs, batch)} if of_update else {}
            names = [f"{stage.removeprefix('update_')}/{name}" for name in ("lr", "loss", "grad_norm")]
            return logprobs | {_label(name): [state.metrics[name]] for name in names if name in state.metrics}
        return weight_fingerprints(group, "policy") if stage == "publish" else {}

    def window(self, step: int) -> Window:
        """The tokens that this step generated, in the format of ``RecordedServers``."""
        window = {}
        for t in self._states[step].slots:
            for s in t.segments:
                if s.step == step:
                    window[str(t.id)] = {
                        "token_ids": s.token_ids.tolist(),
                        "logprobs": [round(float(value), 7) for value in s.rollout_logprobs],
                        "finish_reason": s.finish_reason,
                    }
        return window


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
    """Yields (step, stage, quantities, window after ``generate``). Stages of the trainer are collective.

    ``rollout``: ``RecordedServers``, or a service that samples. ``wait_for`` runs a coroutine on the service's event
    loop.
    """
    with build_rewards(config.reward) as rewards:
        grader = ResponseScorer(config.reward, rewards, inputs.tokenizer.decode, None)
        # The replayed stages use none of these parts.
        unused: dict[str, Any] = dict.fromkeys(("keeper", "process_rewarder", "watchdog"))
        unused |= dict.fromkeys(("evaluator", "parity"), SimpleNamespace(due=lambda step: False))
        unused["saver"] = SimpleNamespace(finish_background_save=lambda wait: "")
        recorder: Any = SimpleNamespace(elapsed_s=0.0, log_stage_facts=lambda *args, **facts: None)
        parts = LoopComponents(
            group=group,
            pool=inputs.pool,
            collector=Collector(config, inputs.pool, rollout, grader),
            rollout=rollout,
            grader=grader,
            recorder=recorder,
            rules=SINGLE_RESPONSE,
            stop_after=lambda step: None,
            **unused,
        )
        loop = _Loop(config, parts)
        actions = loop.actions(graph_of(config))
        for step in range(num_steps):
            for stage in filter(actions.__contains__, STAGES):
                made = actions[stage](step)
                if asyncio.iscoroutine(made):
                    wait_for(made)
                yield step, stage, loop.quantities(step, stage, group), loop.window(step) if stage == "generate" else {}
            group.release(step)


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
