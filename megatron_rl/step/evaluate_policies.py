"""Evaluates policies stored as Hugging Face folders, one at a time, on servers that start once.

Laws: every policy gets the same prompts with the same seeds, regardless of earlier measurements. ``evaluation.json`` in a
policy's folder records the settings, and a policy that was measured with the same settings is skipped.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_rl.config.derived import eval_sets
from megatron_rl.config.schema import Config, Placement
from megatron_rl.rewards.router import RewardRouter, build_rewards
from megatron_rl.rollout.service import RolloutService, TrainerHooks, open_rollout
from megatron_rl.rollout.weight_sources import FolderWeights
from megatron_rl.step.driver import event_loop_thread, stall_timeout_s
from megatron_rl.step.evaluation import Evaluator
from megatron_rl.step.run_inputs import EvalInputs, make_eval_inputs
from megatron_rl.step.runner import StageRunner
from megatron_rl.step.scoring import ResponseScorer
from megatron_rl.system.files.atomic_files import write_atomic

_FILE = "evaluation.json"

Say = Callable[[str], None]


def missing_evaluations(config: Config, folders: Sequence[Path]) -> list[Path]:
    """Return the folders that have not been measured with these settings."""
    wanted = evaluation_settings(config)
    return [folder for folder in folders if _read(folder).get("settings") != wanted]


def evaluate_policies(config: Config, folders: Sequence[Path], say: Say) -> Iterator[tuple[Path, dict[str, float]]]:
    """Yield each folder with its metrics, once they are written. All models must have the shape of ``policy.path``."""
    # There is no trainer: the servers use all devices, and read the weights from the folders.
    config = replace(config, rollout=replace(config.rollout, placement=Placement.disaggregated))
    with ExitStack() as stack:
        inputs = make_eval_inputs(config)
        event_loop = stack.enter_context(event_loop_thread())
        runner = StageRunner(
            (),
            event_loop,
            stall_timeout_s=stall_timeout_s(config),
            on_span=lambda *span: None,
            heartbeat=lambda: None,
        )
        rewards = stack.enter_context(build_rewards(config.reward))
        weights = FolderWeights(folders[0], config.rollout.weight_sync_timeout_s)
        trainer = TrainerHooks(weights=weights, call_on_trainer=runner.call_on_trainer, note=say, warn=say)
        rollout = stack.enter_context(
            open_rollout(config, event_loop, trainer, tokenizer=inputs.tokenizer, environment=inputs.environment)
        )
        evaluator = _evaluator(config, inputs, rollout, rewards)
        settings = evaluation_settings(config)
        for folder in folders:
            weights.folder = folder
            rollout.publish()
            metrics = runner.wait_for(evaluator.evaluate(-1))
            write_atomic(folder / _FILE, json.dumps({"settings": settings, "metrics": metrics}, indent=2))
            yield folder, metrics


def _evaluator(config: Config, inputs: EvalInputs, rollout: RolloutService, rewards: RewardRouter) -> Evaluator:
    return Evaluator(
        config,
        {name: one.prompts for name, one in inputs.eval_sets.items()},
        rollout=rollout,
        grader=ResponseScorer(config.reward, rewards, inputs.tokenizer.decode, inputs.environment),
        start=inputs.start,
        on_accuracy=lambda *accuracy: None,
        stop_after=lambda step: None,
    )


def evaluation_settings(config: Config) -> dict[str, Any]:
    """Return the settings, in addition to the weights, that determine the metrics."""
    settings = {
        "sets": {name: asdict(one) | {"sha256": _digests(one.files)} for name, one in eval_sets(config).items()},
        "seed": config.run.seed,
        "max_response_tokens": config.batch.max_response_tokens,
        "reward": [config.reward.name, config.reward.options],
        "environment": [config.environment.name, config.environment.options],
    }
    return json.loads(json.dumps(settings))


def _digests(files: Sequence[str]) -> list[str]:
    """Return the digests of the files; a data set in a folder is identified by its name alone."""
    return [hashlib.sha256(Path(file).read_bytes()).hexdigest() if Path(file).is_file() else "" for file in files]


def _read(folder: Path) -> Mapping[str, Any]:
    try:
        return json.loads((folder / _FILE).read_text())
    except (OSError, ValueError):
        return {}
