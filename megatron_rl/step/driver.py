"""Reinforcement learning and value pretraining, from a checked configuration to their last file.

Every rank calls the same function. Rank 0, the driver, owns the servers, graders, files and the display; the others
serve its commands until it says stop, and end when it is gone.
"""

import asyncio
import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace

from megatron_rl.algorithms.settling import Settling
from megatron_rl.config.derived import effective_window_tokens
from megatron_rl.config.schema import (
    Config,
    FireLoss,
    Mode,
)
from megatron_rl.data.prompts import PromptSet, load_prompts, with_reward_fields
from megatron_rl.data.sampler import PromptSampler
from megatron_rl.data.slots import SlotPool
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.trajectory import POLICY, Prompt, Trajectory
from megatron_rl.data.vision import Vision
from megatron_rl.environments.base import Environment
from megatron_rl.environments.registry import build as build_environment
from megatron_rl.rewards.lines.dense import ProcessRewarder, program_types
from megatron_rl.rewards.router import build_rewards, check_prompts, wanted_row_fields
from megatron_rl.rollout.served_weights import ServedWeights
from megatron_rl.rollout.service import RolloutService, TrainerSide, open_rollout
from megatron_rl.run.checkpoints import Saver
from megatron_rl.run.output import claimed_output_dir
from megatron_rl.run.recorder import Recorder
from megatron_rl.run.summary import Summary, print_summary, summarize, write_summary
from megatron_rl.step.collect import Collector
from megatron_rl.step.evaluation import Evaluator
from megatron_rl.step.grading import Grader
from megatron_rl.step.loop import Parts, TrainingLoop
from megatron_rl.step.parity import compare_logprobs, generate_for_parity, sample_for_parity
from megatron_rl.step.pieces import ResponseRules
from megatron_rl.step.runner import StageRunner
from megatron_rl.step.stages import graph_of
from megatron_rl.training.engines import rl_engines
from megatron_rl.training.ranks import trainer_ranks
from megatron_rl.training.trainer_group import TrainerGroup

_STALL_MARGIN_S = 60.0


def train(config: Config) -> None:
    """T-PPO or PPO, as the configuration says; leaves metrics, report, checkpoint and the policy in run.output_dir."""
    with trainer_ranks(config, rl_engines(config)) as group:
        if group is not None:
            summary = _drive(config, group, freeze_policy=False)
    if group is not None:
        print_summary(config.run.output_dir, summary)


def critic_pretrain(config: Config) -> None:
    """Value pretraining (VC-PPO): the same loop with full responses of the frozen policy, until the critic has settled.

    It starts from critic.path (a reward model) or the policy's weights with a fresh value head, and writes the critic
    that `train` takes as critic.path. Its checkpoints in run.output_dir hold the critic alone; run.resume goes on.
    """
    pretrain = config.critic_pretrain
    config = replace(
        config,
        run=replace(config.run, num_steps=pretrain.num_steps),
        critic=replace(config.critic, optimizer=pretrain.optimizer),
        batch=replace(config.batch, window_tokens=0),
        schedule=replace(config.schedule, mode=Mode.sync),
        eval=replace(config.eval, every_steps=0, stop_at_accuracy=0.0),
    )
    with trainer_ranks(config, rl_engines(config, freeze_policy=True)) as group:
        if group is not None:
            _drive(config, group, freeze_policy=True)
            group.save_hf("critic", pretrain.output_path)


def _drive(config: Config, group: TrainerGroup, *, freeze_policy: bool) -> Summary:
    """The driver's part of a run, from the claimed folder to the summary."""
    with ExitStack() as stack:
        folder = stack.enter_context(claimed_output_dir(config))
        tokenizer = Tokenizer(config.policy.path)
        environment = _environment(config)
        start = functools.partial(_new_trajectory, config, environment)
        train_set, eval_set = _prompt_sets(config, tokenizer)
        pool = _slot_pool(config, train_set, start)
        settling = _settling(config) if freeze_policy else None
        trained = [
            name
            for name in ("policy", "critic")
            if name in group.engine_names and not (freeze_policy and name == "policy")
        ]
        saver = Saver(config, group, engines=trained)
        restored = (
            saver.load() if config.run.resume else {"num_steps_done": 0, "weight_version": 0, "pool": pool.state()}
        )
        pool.load_state(restored["pool"])
        if tokenizer.vision is not None:
            tokenizer.vision.check_known(image for prompt in pool.prompts for image in prompt.images)
        first_step = restored["num_steps_done"]
        recorder = stack.enter_context(Recorder(config, first_step=first_step, title=_title(config, freeze_policy)))
        event_loop = stack.enter_context(_event_loop_thread())
        graph = graph_of(config)
        runner = StageRunner(
            graph,
            event_loop,
            stall_timeout_s=_stall_timeout_s(config),
            on_span=recorder.stage_done,
            heartbeat=group.heartbeat,
        )
        recorder.running = runner.running
        for text in (*group.notes, _describe_prompts(train_set)):
            recorder.console.note(text)
        rewards = stack.enter_context(build_rewards(config.reward))
        grader = Grader(config.reward, rewards, tokenizer.decode, environment)
        rollout = stack.enter_context(_rollout(config, group, tokenizer, event_loop, runner, recorder, environment))
        rollout.weight_version = restored["weight_version"]
        evaluator = Evaluator(
            config,
            eval_set.prompts,
            rollout=rollout,
            grader=grader,
            start=start,
            recorder=recorder,
            stop_after=runner.stop_after,
        )
        parts = Parts(
            group=group,
            pool=pool,
            collector=Collector(config, pool, rollout, grader),
            rollout=rollout,
            grader=grader,
            evaluator=evaluator,
            recorder=recorder,
            saver=saver,
            rules=ResponseRules(
                independent_turns=environment is not None and environment.turns_are_independent,
                masks_hot_tokens=config.rollout.fire.loss is FireLoss.mask,
            ),
            process_rewarder=ProcessRewarder(config.reward.process, tokenizer.decode, program_types(config.reward)),
            settling=settling,
            vision=tokenizer.vision,
            stop_after=runner.stop_after,
        )
        loop = TrainingLoop(config, parts)
        loop.load_state(restored)
        _before_first_step(config, group, rollout, evaluator, recorder, runner, train_set, first_step, tokenizer.vision)
        recorder.start_clock()
        runner.run(loop.actions(graph), first_step, config.run.num_steps - 1)
        summary = summarize(config, recorder)
        write_summary(folder, summary)
        if not freeze_policy:
            group.save_hf("policy", str(folder / "policy"))
    return summary


def _environment(config: Config) -> Environment | None:
    if not config.environment.name:
        return None
    return build_environment(config.environment.name, config.environment.options)


def _new_trajectory(
    config: Config,
    environment: Environment | None,
    prompt: Prompt,
    id: int,
    *,
    group_id: int | None = None,
    sample_index: int = 0,
) -> Trajectory:
    """A response that has not begun, as the run's environment and budgets want it."""
    return Trajectory(
        id=id,
        prompt=prompt,
        group_id=id if group_id is None else group_id,
        sample_index=sample_index,
        max_response_tokens=config.batch.max_response_tokens,
        dialogue=environment is not None,
        max_turn_tokens=config.environment.max_turn_tokens if environment is not None else 0,
        next_role=environment.first_role() if environment is not None else POLICY,
    )


def _settling(config: Config) -> Settling:
    pretrain = config.critic_pretrain
    return Settling(pretrain.settle_window, pretrain.settle_tolerance, min_steps=pretrain.min_steps)


def _rollout(
    config: Config,
    group: TrainerGroup,
    tokenizer: Tokenizer,
    event_loop: asyncio.AbstractEventLoop,
    runner: StageRunner,
    recorder: Recorder,
    environment: Environment | None,
) -> AbstractContextManager[RolloutService]:
    trainer = TrainerSide(
        weights=ServedWeights(config, group, "policy"),
        call_on_trainer=runner.call_on_trainer,
        note=recorder.console.note,
        warn=recorder.console.warning,
        while_waiting=group.heartbeat,
    )
    return open_rollout(config, event_loop, trainer, tokenizer=tokenizer, environment=environment)


def _before_first_step(
    config: Config,
    group: TrainerGroup,
    rollout: RolloutService,
    evaluator: Evaluator,
    recorder: Recorder,
    runner: StageRunner,
    train_set: PromptSet,
    first_step: int,
    vision: Vision | None,
) -> None:
    """Current weights on every server, the two engines compared, and where the policy starts from."""
    result = rollout.publish()
    recorder.console.note(f"weights on the servers: {result.num_bytes:,} bytes in {result.seconds:.2f} s")
    if config.rollout.max_logprob_difference:
        trajectories = sample_for_parity(config, train_set.prompts)
        runner.wait_for(generate_for_parity(rollout, trajectories))
        rollout.sleep()
        parity = compare_logprobs(config, group, trajectories, rollout.differing_weights, vision)
        recorder.console.note(
            f"Megatron and SGLang agree on {parity.num_tokens} sampled tokens: log-probs differ by at most "
            f"{parity.max_difference:.1e} (allowed: {config.rollout.max_logprob_difference:g})"
        )
        rollout.wake()
    if first_step == 0 and evaluator.due(config.run.num_steps - 1):
        metrics = runner.wait_for(evaluator.evaluate(-1))
        recorder.log(0, metrics)
        recorder.console.note(f"before training: accuracy {metrics['eval/accuracy']:.1%} on held-out prompts")


def _prompt_sets(config: Config, tokenizer: Tokenizer) -> tuple[PromptSet, PromptSet]:
    """Prompts to train and to evaluate on, with every field that a reward reads."""
    data = with_reward_fields(config.data, wanted_row_fields(config.reward))
    limit = config.batch.max_prompt_tokens
    train_set = load_prompts(data.train_files, data, tokenizer, max_prompt_tokens=limit)
    eval_set = PromptSet((), 0)
    if data.eval_files:
        eval_set = load_prompts(data.eval_files, data, tokenizer, max_prompt_tokens=limit)
    check_prompts(config.reward, [*train_set.prompts, *eval_set.prompts])
    return train_set, eval_set


def _describe_prompts(prompts: PromptSet) -> str:
    by_type = ", ".join(f"{count:,} {name or 'without type'}" for name, count in prompts.num_by_type.items())
    left_out = {"longer than batch.max_prompt_tokens": prompts.num_too_long, "duplicate ids": prompts.num_duplicates}
    dropped = ", ".join(f"{count:,} {why}" for why, count in left_out.items() if count)
    return f"prompts to train on: {by_type}" + (f"; left out: {dropped}" if dropped else "")


def _slot_pool(config: Config, train_set: PromptSet, start: Callable[..., Trajectory]) -> SlotPool:
    batch, data = config.batch, config.data
    num_prompts = math.ceil(batch.num_prompts_per_step * config.rollout.over_sampling)
    return SlotPool(
        PromptSampler(
            train_set.prompts,
            seed=config.run.seed,
            shuffle=data.shuffle,
            mixture=data.mixture,
            curriculum=data.curriculum,
        ),
        start,
        num_slots=num_prompts * batch.num_samples_per_prompt,
        num_samples_per_prompt=batch.num_samples_per_prompt,
    )


@contextmanager
def _event_loop_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """An asyncio loop on a thread of its own: generation and grading run there while the main thread trains."""
    event_loop = asyncio.new_event_loop()
    thread = threading.Thread(target=event_loop.run_forever, name="rollout", daemon=True)
    thread.start()
    try:
        yield event_loop
    finally:
        event_loop.call_soon_threadsafe(event_loop.stop)
        thread.join(timeout=10)


def _title(config: Config, freeze_policy: bool) -> str:
    name = "critic pretraining" if freeze_policy else config.preset or config.schedule.mode.value
    window = effective_window_tokens(config)
    return f"{name}: {config.batch.num_prompts_per_step * config.batch.num_samples_per_prompt} slots, window {window} tokens"


def _stall_timeout_s(config: Config) -> float:
    """Longest honest silence of the rollout side: every retry of a request, and a server's restart."""
    rollout = config.rollout
    return rollout.request_timeout_s * (rollout.max_retries + 1) + rollout.start_timeout_s + _STALL_MARGIN_S
