"""Runs reinforcement learning and value pretraining, from a checked configuration to the last file.

Every rank calls the same function. Rank 0, the driver, owns the servers, reward workers, files and the display. The other
ranks serve its commands until it sends stop, and end if it exits.
"""

import asyncio
import functools
import shutil
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.algorithms.value_convergence import ValueConvergence
from megatron_rl.config.derived import answer_timeout_s, effective_window_tokens, eval_sets, num_responses_per_step
from megatron_rl.config.schedule_facts import facts_of
from megatron_rl.config.schema import Config, FireLoss, HealthAction, Mode
from megatron_rl.data.slots import SlotPool
from megatron_rl.rewards.line_rewards import ProcessRewarder, program_types
from megatron_rl.rewards.router import RewardRouter, build_rewards
from megatron_rl.rollout.server_pool import ServerPool
from megatron_rl.rollout.service import RolloutService, TrainerHooks, open_rollout
from megatron_rl.rollout.weight_sources import TrainerWeights
from megatron_rl.rollout.workers.remote_workers import start_on_nodes
from megatron_rl.run.checkpoints import Checkpointer, PolicyExporter
from megatron_rl.run.output import lock_output_dir, write_first_prompts
from megatron_rl.run.recorder import Recorder, WriteReport
from megatron_rl.run.summary import RunSummary, print_summary, summarize, write_summary
from megatron_rl.schedule.table import make_graph
from megatron_rl.step.collect import Collector
from megatron_rl.step.evaluation import EvaluationServers, Evaluator
from megatron_rl.step.health_guard import HealthGuard
from megatron_rl.step.kl_penalty import KlPenalty
from megatron_rl.step.loop import LoopComponents, TrainingLoop
from megatron_rl.step.parity import ParityCheck
from megatron_rl.step.run_inputs import RunInputs, describe_prompts, make_inputs
from megatron_rl.step.runner import StageRunner
from megatron_rl.step.scoring import ResponseScorer
from megatron_rl.step.step_saver import StepSaver
from megatron_rl.step.stored_responses import store_samples
from megatron_rl.step.updates import CriticWarmup
from megatron_rl.step.watchdog import Rollback, Watchdog
from megatron_rl.step.window_advantages import ResponseRules
from megatron_rl.system.processes.gc_pauses import gc_young_only
from megatron_rl.system.processes.host_memory import disable_memory_trim
from megatron_rl.system.processes.signals import StopRequested, StopSignals
from megatron_rl.tracking.console import evaluation_text
from megatron_rl.tracking.sinks.all_trackers import start_new_runs
from megatron_rl.training.trainer_group import TrainerGroup
from megatron_rl.training.trainer_ranks import rl_engines, trainer_ranks

_STALL_MARGIN_S = 60.0


@dataclass(frozen=True)
class _RunContext:
    """The objects that the loop's components are built from."""

    config: Config
    group: TrainerGroup
    inputs: RunInputs
    recorder: Recorder
    runner: StageRunner
    event_loop: asyncio.AbstractEventLoop


def train(config: Config, spawned: ServerPool | None = None, write_report: WriteReport | None = None) -> None:
    """Run the configured reinforcement learning; write metrics, report, checkpoints and the policy to run.output_dir.

    ``spawned``: servers that are starting already (``rollout.server_pool.spawned_servers``). ``write_report``: None writes no report.html.
    """
    signals = StopSignals(config.run.stop_grace_s)
    with trainer_ranks(config, rl_engines(config), signals) as group:
        if group is not None:
            summary = _drive(config, group, signals, spawned, write_report, freeze_policy=False)
    if group is not None:
        print_summary(config, summary)


def critic_pretrain(config: Config, spawned: ServerPool | None = None, write_report: WriteReport | None = None) -> None:
    """Run value pretraining (VC-PPO): the same loop with full responses of the frozen policy, until the critic has converged.

    Training starts from critic.path (a reward model) or the policy's weights with a fresh value head, and writes the critic
    that `train` takes as critic.path. Checkpoints contain the critic alone; run.resume continues from them.
    """
    output_path, config = config.critic_pretrain.output_path, pretraining_config(config)
    signals = StopSignals(config.run.stop_grace_s)
    with trainer_ranks(config, rl_engines(config, freeze_policy=True), signals) as group:
        if group is not None:
            _drive(config, group, signals, spawned, write_report, freeze_policy=True)
            group.save_hf("critic", output_path)


def pretraining_config(config: Config) -> Config:
    """Return the configuration of a value pretraining: full responses of the policy, the critic's own steps and learning rate."""
    pretrain = config.critic_pretrain
    return replace(
        config,
        run=replace(config.run, num_steps=pretrain.num_steps, stop_after_s=0.0, keep_policy_every_s=0.0),
        critic=replace(config.critic, optimizer=pretrain.optimizer),
        # The critic must learn from all of the policy's responses, so mixed groups and short responses are not preferred.
        algorithm=replace(config.algorithm, dynamic_sampling=replace(config.algorithm.dynamic_sampling, enabled=False)),
        rollout=replace(config.rollout, over_sampling=1.0),
        batch=replace(config.batch, window_tokens=0),
        schedule=replace(config.schedule, mode=Mode.sync, critic_first=False),
        eval=replace(config.eval, every_steps=0, stop_at_accuracy=0.0),
    )


def _drive(
    config: Config,
    group: TrainerGroup,
    signals: StopSignals,
    spawned: ServerPool | None,
    write_report: WriteReport | None,
    *,
    freeze_policy: bool,
) -> RunSummary:
    """Run the driver's side, from the locked folder to the summary. Raises StopRequested if a signal ended the run."""
    back: Rollback | None = None
    while True:
        try:
            return _drive_attempt(config, group, signals, spawned, write_report, back, freeze_policy=freeze_policy)
        except Rollback as found:
            back, spawned = found, None  # stopped with the attempt
            # The ranks would take the failed attempt's cached sequences for those of the repeated steps.
            group.release()
            # The run resumes in its own folder; an earlier run in that folder has been handled already.
            config = replace(config, run=replace(config.run, resume="auto", overwrite=False))
            folder = Path(config.run.output_dir)
            shutil.copyfile(folder / "metrics.jsonl", folder / f"rolled_back_{found.number}.jsonl")
            # Trackers cannot delete logged steps, so each one starts a new run.
            start_new_runs(folder, f"rolled_back_{found.number}.")


def _drive_attempt(
    config: Config,
    group: TrainerGroup,
    signals: StopSignals,
    spawned: ServerPool | None,
    write_report: WriteReport | None,
    back: Rollback | None,
    *,
    freeze_policy: bool,
) -> RunSummary:
    """Run one attempt. ``back``: the rollback that this attempt starts from. Raises Rollback if another one is needed."""
    with ExitStack() as stack:
        folder = stack.enter_context(lock_output_dir(config))
        inputs = make_inputs(config)
        write_first_prompts(folder, inputs.train_set.prompts)
        frozen = ("policy",) if freeze_policy else ()
        trained = [name for name in ("policy", "critic") if name in group.engine_names and name not in frozen]
        # A function, because the recorder is created later, from what the checkpoint restores.
        checkpointer = Checkpointer(config, group, engines=trained, accuracies=lambda: recorder.accuracies)
        position = back.position if back else {}
        resume = functools.partial(checkpointer.load, lambda state: inputs.go_on_from({**state["pool"], **position}))
        found = resume(healthy=back is not None) if config.run.resume else None
        restored = found or _beginning(inputs.pool)
        first_step = restored["num_steps_done"]
        title, spelling = _title(config, freeze_policy), inputs.tokenizer.spelling
        recorder = stack.enter_context(Recorder(config, restored=found, title=title, spelling=spelling, write_report=write_report))
        _print_start_notes(recorder, checkpointer, _checkpoint_note(config, first_step if found else None), group, inputs)
        event_loop = stack.enter_context(event_loop_thread())
        runner = _stage_runner(config, event_loop, recorder, group, signals)
        rewards = stack.enter_context(build_rewards(config.reward))
        context = _RunContext(config, group, inputs, recorder, runner, event_loop)
        rollout = stack.enter_context(_rollout(context, spawned))
        # A checkpoint's weights are published under the version that they had.
        rollout.weight_version = max(0, restored["weight_version"] - 1)
        rollout.add_restart_counts(restored.get("server_restarts", []))
        components = _components(context, rollout, rewards, checkpointer, freeze_policy=freeze_policy)
        components = _with_fleet(stack, context, components)
        components.saver.load_state(restored)
        loop = TrainingLoop(components)
        if back:
            components.health.watchdog.num_rollbacks = back.number
            recorder.console.warning(f"rolled back to step {first_step}, with the prompts that come next: {back}")
        last_step = _before_first_step(components, runner, first_step)
        recorder.start_clock()
        disable_memory_trim()  # not earlier, so that the memory used for loading models is returned first
        with signals.defer_signals(runner.wake), gc_young_only():
            runner.run(loop.actions(runner.graph), first_step, last_step)
            num_steps_done = loop.close_stopped() if signals.requested else config.run.num_steps
            _warn_if_unsaved(recorder, checkpointer.finish_background_save(wait=True))
            runner.wait_for(components.evaluator.idle(at_once=bool(signals.requested)))
        summary = summarize(config, recorder)
        write_summary(folder, summary)
        if signals.requested:
            raise StopRequested(f"{signals.requested} after step {num_steps_done} of {config.run.num_steps}")
        if not freeze_policy:
            group.save_hf("policy", str(folder / "policy"))
            recorder.exported(folder / "policy", group.heartbeat)
        checkpointer.check_saved()
    return summary


def _stage_runner(
    config: Config, event_loop: asyncio.AbstractEventLoop, recorder: Recorder, group: TrainerGroup, signals: StopSignals
) -> StageRunner:
    runner = StageRunner(
        make_graph(facts_of(config)),
        event_loop,
        stall_timeout_s=stall_timeout_s(config),
        on_span=recorder.stage_done,
        heartbeat=group.heartbeat,
        stop_requested=lambda: signals.requested,
    )
    recorder.running = runner.running
    return runner


def _print_start_notes(recorder: Recorder, checkpointer: Checkpointer, checkpoints: str, group: TrainerGroup, inputs: RunInputs) -> None:
    for text in checkpointer.skipped:
        recorder.console.warning(text)
    for text in filter(None, (checkpoints, *group.notes, group.transport.note, *describe_prompts(inputs.train_set, inputs.eval_sets))):
        recorder.console.note(text)


def _warn_if_unsaved(recorder: Recorder, problem: str) -> None:
    if problem:
        recorder.console.warning(f"no checkpoint {problem}")


def _checkpoint_note(config: Config, first_step: int | None) -> str:
    run = config.run
    begin = "" if first_step is None else f"resumes after step {first_step}; "
    every = f"every {run.save_every_steps} steps" if run.save_every_steps else "at the end only (run.save_every_steps=0)"
    return f"{begin}checkpoints: {every}, and when a signal stops the run; the newest {run.keep_last} are kept"


def _beginning(pool: SlotPool) -> dict[str, Any]:
    """Return the driver's checkpoint state of a run that has not started."""
    return {"num_steps_done": 0, "weight_version": 0, "pool": pool.state()}


def _components(
    context: _RunContext, rollout: RolloutService, rewards: RewardRouter, checkpointer: Checkpointer, *, freeze_policy: bool
) -> LoopComponents:
    config, inputs, recorder, runner = context.config, context.inputs, context.recorder, context.runner
    tokenizer, environment, pool = inputs.tokenizer, inputs.environment, inputs.pool
    stop_on_errors, texts = config.health.reward_errors is HealthAction.stop, rollout.texts(tokenizer)
    grader = ResponseScorer(config.reward, rewards, tokenizer.decode, environment, stop_on_errors=stop_on_errors, texts=texts)
    kl_penalty, warmup = KlPenalty(config.algorithm.kl), CriticWarmup(config, _convergence(config) if freeze_policy else None)
    watchdog = Watchdog(config.health, max_error_rate=config.reward.max_error_rate)
    vision, prompts = tokenizer.vision, inputs.train_set.prompts
    parity = ParityCheck(config, prompts, group=context.group, rollout=rollout, vision=vision, wait_for=runner.wait_for)
    return LoopComponents(
        config=config,
        facts=facts_of(config),
        group=context.group,
        pool=pool,
        collector=Collector(config, pool, rollout, grader),
        rollout=rollout,
        grader=grader,
        evaluator=Evaluator(
            config,
            {name: one.prompts for name, one in inputs.eval_sets.items()},
            rollout=rollout,
            grader=grader,
            start=inputs.start,
            on_accuracy=recorder.evaluated,
            stop_after=runner.stop_after,
        ),
        recorder=recorder,
        policy_exporter=PolicyExporter(config.run, context.group, first_step=recorder.num_steps_done),
        process_rewarder=ProcessRewarder(config.reward.process, tokenizer.decode, program_types(config.reward)),
        kl_penalty=kl_penalty,
        health=HealthGuard(watchdog, parity, checkpointer, recorder, pool, warmup),
        saver=StepSaver(checkpointer, recorder, rollout, pool, kl_penalty, warmup, watchdog),
        warmup=warmup,
        stop_after=runner.stop_after,
        store_samples=functools.partial(store_samples, config, recorder),
        rules=ResponseRules(
            independent_turns=environment is not None and environment.turns_are_independent,
            masks_hot_tokens=config.rollout.fire.loss is FireLoss.mask,
        ),
        vision=vision,
    )


def _convergence(config: Config) -> ValueConvergence:
    pretrain = config.critic_pretrain
    return ValueConvergence(pretrain.settle_window, min_steps=pretrain.min_steps)


def _rollout(context: _RunContext, spawned: ServerPool | None) -> AbstractContextManager[RolloutService]:
    inputs, console = context.inputs, context.recorder.console
    trainer = replace(
        _trainer_side(context),
        far_workers=lambda number: start_on_nodes(context.group.transport, number, console.note, console.warning),
    )
    return open_rollout(
        context.config, context.event_loop, trainer, tokenizer=inputs.tokenizer, environment=inputs.environment, spawned=spawned
    )


def _with_fleet(stack: ExitStack, context: _RunContext, components: LoopComponents) -> LoopComponents:
    """Return the components with the evaluation servers, if the configuration names some."""
    config, inputs = context.config, context.inputs
    if not (config.eval.urls and eval_sets(config)):
        return components
    own = replace(config, rollout=replace(config.rollout, urls=config.eval.urls, urls_file=""), eval=replace(config.eval, urls=[]))
    opened = open_rollout(
        own,
        context.event_loop,
        _trainer_side(context),
        tokenizer=inputs.tokenizer,
        environment=inputs.environment,
        publisher=components.rollout.publisher,
    )
    fleet = EvaluationServers(stack.enter_context(opened), context.runner.wait_for, context.recorder.console.warning)
    components.evaluator.move_to(fleet.rollout)
    return replace(components, fleet=fleet)


def _trainer_side(context: _RunContext) -> TrainerHooks:
    console = context.recorder.console
    return TrainerHooks(
        weights=TrainerWeights(context.config, context.group, "policy"),
        call_on_trainer=context.runner.call_on_trainer,
        note=console.note,
        warn=console.warning,
        while_waiting=context.group.heartbeat,
    )


def _before_first_step(components: LoopComponents, runner: StageRunner, first_step: int) -> int:
    """Publish the weights, run the parity check, and evaluate the initial policy.

    Returns the last step of the run, which is the previous step if the run reached its goal before it was stopped.
    """
    config, parity = components.config, components.health.parity
    rollout, recorder, evaluator = components.rollout, components.recorder, components.evaluator
    components.group.set_progress_callback(recorder.console.note)
    result = rollout.publish()
    recorder.console.note(f"weights on the servers: {result.num_bytes:,} bytes in {result.seconds:.2f} s")
    if components.fleet is not None:
        components.fleet.rollout.publish()
    if parity.wanted:
        agreement = parity.compare()
        recorder.log_metrics(agreement.metrics())
        recorder.console.note(f"Megatron and SGLang agree on {agreement.num_tokens} sampled tokens: {agreement}")
    if first_step == 0 and evaluator.due(config.run.num_steps - 1):
        metrics = runner.wait_for(evaluator.evaluate(-1))
        recorder.log(0, metrics)
        recorder.console.note(f"before training: accuracy {evaluation_text(metrics)} on held-out prompts")
    # The run was stopped after this step's checkpoint, before its evaluation ended.
    if first_step and evaluator.due(first_step - 1) and first_step not in recorder.accuracies:
        recorder.add_to(first_step, runner.wait_for(evaluator.evaluate(first_step - 1)))
    goal = config.eval.stop_at_accuracy
    reached = first_step and goal and recorder.accuracies.get(first_step, 0.0) >= goal
    return first_step - 1 if reached else config.run.num_steps - 1


@contextmanager
def event_loop_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """Run an asyncio loop on its own thread, so that generation and scoring proceed while the main thread trains."""
    event_loop = asyncio.new_event_loop()
    thread = threading.Thread(target=event_loop.run_forever, name="rollout", daemon=True)
    thread.start()
    try:
        yield event_loop
    finally:
        event_loop.call_soon_threadsafe(event_loop.stop)
        # With a limit, because a coroutine that blocks the event loop must not keep the process alive.
        thread.join(timeout=10)


def _title(config: Config, freeze_policy: bool) -> str:
    name = "critic pretraining" if freeze_policy else config.preset or config.schedule.mode.value
    window = effective_window_tokens(config)
    return f"{name}: {num_responses_per_step(config)} slots, window {window} tokens"


def stall_timeout_s(config: Config) -> float:
    """Return the longest legitimate silence of the rollout in seconds: every retry of a request, and a server's restart."""
    rollout = config.rollout
    # A request may take longer than its timeout while tokens arrive.
    answer_s = max(rollout.request_timeout_s, answer_timeout_s(0.0, config.batch.max_response_tokens))
    return answer_s * (rollout.max_retries + 1) + rollout.start_timeout_s + _STALL_MARGIN_S
