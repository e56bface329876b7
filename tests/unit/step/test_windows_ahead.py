"""Mode async by the loop's own code, with stand-ins for servers, trainer and clock: its laws over random durations.

A token says which response and which place it is of, and its log-prob by which weights it was sampled, so that what
trains can be told from what should.
"""

import asyncio
import functools
import inspect
import json
import random
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.schedule_facts import facts_of, max_trained_windows
from megatron_rl.config.schema import (
    Config,
    HealthAction,
    HealthConfig,
    KlPlace,
    Mode,
    Normalization,
    TrainsOn,
    WeightUpdate,
)
from megatron_rl.data.sampler import PromptSampler
from megatron_rl.data.slots import SlotPool
from megatron_rl.data.trajectory import Prompt, Score, Segment, Trajectory
from megatron_rl.schedule.graph import Frontier
from megatron_rl.schedule.table import KEEPER, LASTING, OUTPUT_ONLY, make_graph
from megatron_rl.step.collect import Collector
from megatron_rl.step.health_guard import HealthGuard
from megatron_rl.step.kl_penalty import KlPenalty
from megatron_rl.step.loop import LoopComponents, TrainingLoop
from megatron_rl.step.scoring import ResponseScorer
from megatron_rl.step.step_saver import StepSaver
from megatron_rl.step.updates import CriticWarmup
from megatron_rl.step.watchdog import Watchdog
from megatron_rl.training.engine import UpdateResult
from tests.token_indices import token_indices


@pytest.fixture(scope="module", autouse=True)
def no_collection():
    """A publish collects garbage: with the objects of a whole test session that is most of the seconds of these tests."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("megatron_rl.step.stages.publish.gc_between_windows", lambda step: None)
        yield


BUDGET, WINDOW, NUM_SLOTS, NUM_STEPS = 12, 3, 6, 7
LENGTHS = random.Random(7).choices(range(1, BUDGET + 3), k=500)
PROMPT = 999


class Killed(Exception):
    pass


class Ranks:
    """Stands in for the trainer ranks: their models are numbers of updates."""

    def __init__(self, policy=0, critic=0):
        self.policy, self.critic = policy, critic
        self.trained = {"policy": [], "critic": []}
        """(step, number of policy updates before it, tokens, numbers that they train with)"""
        self.step = 0
        self.held = {}
        """Step -> engine -> ids of the sequences of each update that is to come."""

    def steps_of_policy(self):
        """In which it trained."""
        return {step for step, *_ in self.trained["policy"]}

    def stage(self, step, name):
        self.step = step
        return nullcontext()

    def use_by_stage(self):
        return {}

    def logprobs(self, batch, rows=None, *, temperature, engine="policy"):
        where = token_indices(batch, range(batch.num_sequences) if rows is None else rows)
        moved = self.policy if engine == "policy" else 0
        return torch.zeros(len(batch.tokens)).index_fill(0, where, -0.01 * (1 + moved))

    def values(self, batch):
        values = 0.001 * batch.joined().tokens.float() + 0.1 * self.critic
        return values, values[batch.cu_seqlens[1:] - 1]

    def share_out(self, batch, updates):
        assert self.step not in self.held
        self.held[self.step] = {name: [tuple(ids) for ids in of] for name, of in updates.items()}
        assert len(self.held) <= 2

    def release(self, step):
        del self.held[step]

    def update(self, engine, batch, rows, *, objective, denominators, temperature=1.0, keeps_logprobs=False):
        whole, batch = batch, batch.select(rows).joined()
        assert batch.ids in self.held[self.step][engine]
        mask = batch.fields["mask"]
        numbers = batch.fields["advantages" if engine == "policy" else "returns"][mask]
        if engine == "policy":
            logprobs = self.logprobs(batch, temperature=temperature)
            weights = batch.fields.get("weights")
            if weights is None:
                weights = (logprobs - batch.fields["rollout_logprobs"]).double().exp().clamp(max=2.0).float()
            numbers = numbers * weights[mask]
        self.trained[engine].append((self.step, self.policy, batch.tokens[mask].tolist(), numbers.tolist()))
        kept = self.logprobs(whole, rows, temperature=temperature) if keeps_logprobs else None
        return UpdateResult(1.0, 1e-3, {f"{objective}_loss": (1.0, 1.0)}, skipped=False, logprobs=kept)


class Servers:
    """Stands in for the rollout side; the weights that it got are the trainer's number of updates at that moment.

    With ``pauses`` a publish may come into a window: some of its tokens are sampled before ``gate`` opens, the others after.
    """

    def __init__(self, ranks, version=0, *, pauses=None):
        self.pauses, self.gate, self.met = pauses, None, 0
        self.ranks, self.weights, self.weight_version, self.trainer_version = ranks, ranks.policy, version, version
        self.sampled_by, self.evaluated, self.generating = {}, [], False
        self.ended = {}
        self.num_live_servers, self.num_restarts, self.num_refused = 1, 0, 0
        self.sizes = []

    def weights_changed(self):
        self.trainer_version = self.weight_version + 1

    def publish(self):
        assert self.pauses or not self.generating, "a publish met running requests"
        self.met += self.generating
        self.weights = self.ranks.policy
        self.weight_version = self.trainer_version
        return SimpleNamespace(seconds=0.0, num_bytes=0, buffer_bytes=0)

    def wake(self):
        pass

    def restart_counts(self):
        return []

    def stop_dialogues(self, trajectories):
        pass

    async def generate(self, trajectories, *, step, window_tokens, is_enough=None, open_row=None):
        self.sizes.append(len(trajectories))
        rooms = {
            t.id: min(t.remaining_window(step, window_tokens), min(LENGTHS[t.id], BUDGET) - t.num_response_tokens)
            for t in trajectories
        }
        if self.gate is not None:
            before = {id: self.pauses.randint(0, max(room, 0)) for id, room in rooms.items()}
            self.grow(trajectories, before, step)
            rooms = {id: room - before[id] for id, room in rooms.items()}
            await self.gate.wait()
        self.grow(trajectories, rooms, step)
        return {}

    def grow(self, trajectories, rooms, step):
        for t in trajectories:
            first, count = t.num_response_tokens, rooms[t.id]
            if count <= 0:
                continue
            tokens = tuple(BUDGET * t.id + first + i for i in range(count))
            self.sampled_by |= dict.fromkeys(tokens, self.weights)
            reason = "stop" if first + count == LENGTHS[t.id] else "length"
            mu = (-0.01 * (1 + self.weights),) * count
            t.segments.append(Segment(tokens, mu, self.weight_version, reason, step))
            if t.finished:
                self.ended[t.id] = step


async def scored(items):
    return [Score(float(len(item.response) % 2)) for item in items]


class Recorder:
    elapsed_s, num_steps_done = 0.0, 0

    def __init__(self):
        self.rows = {}
        self.console = SimpleNamespace(warning=lambda text: None)

    def log_stage_facts(self, *stage, **facts):
        pass

    def flush_records(self):
        pass

    def end(self, step, metrics, *, num_server_restarts):
        self.num_steps_done = step + 1
        self.keep(step, metrics)

    def keep(self, step, metrics):
        of_the_process = ("rollout/num_live_servers", "rollout/num_refused", "checkpoint/num_failed", "sync/")
        self.rows[step] = {name: value for name, value in metrics.items() if not name.startswith(of_the_process)}


class Saver:
    """Keeps what a real one writes down, as text."""

    num_failed = 0

    def __init__(self, ranks, every):
        self.ranks, self.every, self.newest_step, self.newest = ranks, every, -1, None

    def due(self, step):
        return (step + 1) % self.every == 0

    def finish_background_save(self, *, wait):
        return ""

    def save(self, step, driver, *, weight_version, healthy):
        self.newest_step = step
        self.newest = json.dumps(
            {"step": step, "version": weight_version, "models": [self.ranks.policy, self.ranks.critic], **driver},
            default=np.ndarray.tolist,
        )
        return ""


class ToyRun:
    """A run of the loop, from its start or from a checkpoint, whose stages end in an order that ``rng`` draws."""

    def __init__(self, config, rng, checkpoint=None, save_every=2):
        self.config, self.rng = config, rng
        state = json.loads(checkpoint) if checkpoint else {"step": -1, "version": 1, "models": [0, 0]}
        self.first_step = state["step"] + 1
        self.ranks, self.recorder = Ranks(*state["models"]), Recorder()
        self.in_flight = facts_of(config).in_flight
        self.servers = Servers(self.ranks, state["version"], pauses=rng if self.in_flight else None)
        self.acted, self.window = set(), None
        prompts = [Prompt(str(i), (PROMPT,)) for i in range(11)]
        sizes = {"num_slots": NUM_SLOTS, "num_samples_per_prompt": 2}
        holds = facts_of(config).whole_groups
        self.pool = SlotPool(PromptSampler(prompts, seed=1), self.start, **sizes, holds_groups=holds)
        grader = ResponseScorer(config.reward, SimpleNamespace(score_many=scored), lambda ids: "x" * (sum(ids) % 7))
        self.saver = Saver(self.ranks, save_every)
        watchdog = Watchdog(HealthConfig(**dict.fromkeys(("entropy", "reward_drop", "mismatch"), HealthAction.ignore)))
        kl_penalty, warmup = KlPenalty(config.algorithm.kl), CriticWarmup(config)
        parity = SimpleNamespace(due=lambda step: False)
        health = HealthGuard(watchdog, parity, self.saver, self.recorder, self.pool, warmup)
        saver = StepSaver(self.saver, self.recorder, self.servers, self.pool, kl_penalty, warmup, watchdog)
        self.loop = TrainingLoop(
            LoopComponents(
                config=config,
                facts=facts_of(config),
                group=self.ranks,
                pool=self.pool,
                collector=Collector(config, self.pool, self.servers, grader),
                rollout=self.servers,
                grader=grader,
                evaluator=SimpleNamespace(due=lambda step: True, evaluate=self.evaluate),
                recorder=self.recorder,
                policy_exporter=SimpleNamespace(keep_if_due=lambda step, trained_s: None),
                process_rewarder=None,
                kl_penalty=kl_penalty,
                health=health,
                saver=saver,
                warmup=warmup,
                stop_after=lambda step: None,
                store_samples=lambda state, step: None,
                children=SimpleNamespace(cpu_s=lambda: 0.0),
            )
        )
        if checkpoint:
            self.pool.load_state(state["pool"])
            self.recorder.keep(state["step"], state["metrics"])
        saver.load_state(state)

    @staticmethod
    def start(prompt, id, *, group_id, sample_index):
        return Trajectory(id, prompt, group_id, sample_index, BUDGET)

    async def evaluate(self, step):
        self.servers.evaluated.append((step, self.servers.weights))
        return {}

    def go(self, *, kill_after=None, stop_after=None):
        """To the end; Killed after so many stages; wound up as by a signal after so many, and saved."""
        with asyncio.Runner() as self.event_loop:
            return self.go_on(kill_after, stop_after)

    def go_on(self, kill_after, stop_after):
        graph, num_done = make_graph(facts_of(self.config)), 0
        actions, frontier = self.loop.actions(graph), Frontier(graph, self.first_step, NUM_STEPS - 1)
        left = {}
        while not frontier.done:
            for run in frontier.ready():
                frontier.start(run)
                left[run] = self.begin(actions, run)
            run = min(left, key=left.get)
            passed = left.pop(run)
            left = {other: max(seconds - passed, 0.0) for other, seconds in left.items()}
            if run not in self.acted:
                self.act(actions, run)
            self.servers.generating &= run.stage.name != "generate"
            frontier.finish(run)
            num_done += 1
            if num_done == kill_after:
                raise Killed
            if num_done == stop_after:
                self.finish_open_steps(frontier, left)
        if stop_after:
            self.loop.close_stopped()
        return self

    def finish_open_steps(self, frontier, left):
        needed = self.waited_for = frontier.finish_open_steps(LASTING, KEEPER, OUTPUT_ONLY)
        for abandoned in [run for run in left if run.stage.name in ("generate", "score", "evaluate")]:
            if abandoned not in needed:
                del left[abandoned]
                frontier.finish(abandoned)
                self.servers.generating &= abandoned.stage.name != "generate"

    def begin(self, actions, run):
        """Returns how long it takes."""
        lasts = self.rng.choice([0.0, 0.1, 1.0, 3.0])
        self.servers.generating |= run.stage.name == "generate"
        if run.stage.name == "generate" and self.in_flight:
            self.begin_window(actions, run)
            return 6 * lasts  # as long as all the rest, so that publishes meet it
        if run.stage.name == "update_policy" or self.rng.random() < 0.5:
            return lasts
        self.act(actions, run)  # at its start, not at its end: whatever comes between must not matter
        return lasts + 1e-9

    def begin_window(self, actions, run):
        async def begin():
            self.servers.gate = asyncio.Event()
            self.window = asyncio.create_task(actions["generate"](run.step))
            await asyncio.sleep(0)

        self.event_loop.run(begin())

    async def end_window(self):
        self.servers.gate.set()
        await self.window

    def act(self, actions, run):
        self.acted.add(run)
        begun = run.stage.name == "generate" and self.in_flight
        found = self.end_window() if begun else actions[run.stage.name](run.step)
        if inspect.iscoroutine(found):
            self.event_loop.run(found)
        if run.stage.name == "update_policy":
            # A step may train nothing if its tokens train later.
            self.ranks.policy += facts_of(self.config).training_window_tokens == 1 or run.step in self.ranks.steps_of_policy()
        if run.stage.name == "update_critic":
            self.ranks.critic += 1

    def slots(self):
        """As a checkpoint would hold them."""
        return json.loads(json.dumps(self.pool.state(), default=np.ndarray.tolist))

    def history(self, until=NUM_STEPS):
        """All that trained, by step; metrics; slots at the end."""
        updates = {
            name: [one for one in self.ranks.trained[name] if one[0] < until] for name in ("policy", "critic")
        }
        return updates, {step: row for step, row in self.recorder.rows.items() if step < until}


def make_config(mode=Mode.async_, **schedule):
    config = Config()
    config.run.num_steps, config.critic.warmup_steps = NUM_STEPS, schedule.pop("warmup", 0)
    config.batch.num_prompts_per_step, config.batch.num_samples_per_prompt = NUM_SLOTS // 2, 2
    config.batch.max_response_tokens, config.batch.window_tokens = BUDGET, WINDOW
    config.batch.policy_minibatch_size = config.batch.critic_minibatch_size = NUM_SLOTS
    config.algorithm.ignore_boundary_tokens = 0
    config.algorithm.correction.weight = "token"
    config.schedule.mode = mode
    for name, value in schedule.items():
        setattr(config.schedule, name, value)
    return config


def in_flight_config(**schedule):
    return make_config(weight_update=WeightUpdate.in_flight, **schedule)


def group_config(mode=Mode.async_, *, dynamic=False, **schedule):
    """GRPO in windows, or what DAPO makes of it."""
    config = make_config(mode, **schedule)
    config.algorithm.advantage, config.algorithm.normalization = "group", Normalization.none
    config.algorithm.dynamic_sampling.enabled = dynamic
    return config


def longer_config():
    """A window of training of three windows, not all of them full."""
    return make_config(training_window_tokens=2 * WINDOW + 1)


def whole_config():
    return make_config(training_window_tokens=0)


def stale_config():
    """Three windows ahead, and a window of training of two."""
    return make_config(max_staleness=3, training_window_tokens=WINDOW + 1)


def stale_group_config():
    return group_config(max_staleness=2)


STALENESS = st.integers(1, 4)
RANDOM = st.randoms(use_true_random=False)
MAKES = (make_config, group_config, longer_config, whole_config, stale_config, stale_group_config)
quick = settings(max_examples=12, deadline=None)
NUM_RUNS = 11 * NUM_STEPS
"""Stage runs of a run with a critic; without one it has 9 a step."""


@functools.cache
def whole(make=make_config):
    """What every run of the configuration has to come to."""
    return ToyRun(make(), random.Random(0)).go()


class JitteredRun(ToyRun):
    """Its first windows have 1 to ``WINDOW`` tokens."""

    @staticmethod
    def start(prompt, id, *, group_id, sample_index):
        return Trajectory(id, prompt, group_id, sample_index, BUDGET, first_window_tokens=1 + id % WINDOW)


TRAINING_WINDOWS = st.sampled_from([None, 0, WINDOW, 4, 2 * WINDOW, 7, 3 * WINDOW, 11, BUDGET, 50])
MODES = st.sampled_from([
    (Mode.tppo, WeightUpdate.between), (Mode.async_, WeightUpdate.between), (Mode.async_, WeightUpdate.in_flight)
])  # fmt: skip


@settings(max_examples=36, deadline=None)
@given(RANDOM, MODES, TRAINING_WINDOWS, st.sampled_from([ToyRun, JitteredRun]), st.sampled_from(list(TrainsOn)), STALENESS)
def test_every_token_trains_the_policy_once_and_every_response_the_critic_once(
    rng, mode, training_window, kind, critic_trains_on, staleness
):
    mode, weight_update = mode
    config = make_config(
        mode,
        weight_update=weight_update,
        training_window_tokens=training_window,
        critic_trains_on=critic_trains_on,
        max_staleness=staleness,
    )
    run = kind(config, rng).go()

    counts = {name: Counter(t for _, _, tokens, _ in run.ranks.trained[name] for t in tokens) for name in run.ranks.trained}
    assert set(counts["policy"].values()) == set(counts["critic"].values()) == {1}
    assert all(count == NUM_SLOTS for count in run.servers.sizes) and len(run.servers.sizes) == NUM_STEPS
    assert not run.ranks.held
    if critic_trains_on is TrainsOn.windows:
        assert set(counts["critic"]) == set(counts["policy"])
        return
    assert set(counts["critic"]) <= set(counts["policy"])
    ended = Counter(t // BUDGET for t in counts["critic"])
    assert all(number == min(LENGTHS[id], BUDGET) for id, number in ended.items())
    in_progress = {t for t in run.servers.sampled_by if t // BUDGET not in ended}
    assert {t // BUDGET for t in in_progress} == {t["id"] for t in run.slots()["slots"]}


@settings(max_examples=36, deadline=None)
@given(RANDOM, MODES, TRAINING_WINDOWS, st.sampled_from([ToyRun, JitteredRun]), STALENESS)
def test_a_window_of_training_ends_where_it_is_full_or_its_response_ends(rng, mode, training_window, kind, staleness):
    """Its tokens are consecutive, as fresh as the formula says, and unfinished responses wait with fewer tokens than it has."""
    mode, weight_update = mode
    words = {"weight_update": weight_update, "training_window_tokens": training_window, "max_staleness": staleness}
    run = kind(make_config(mode, **words), rng).go()
    whole_responses = training_window == 0 or (training_window or 0) >= BUDGET
    windows = {}
    for step, _, tokens, _ in run.ranks.trained["policy"]:
        for t in tokens:
            windows.setdefault((t // BUDGET, step), []).append(t % BUDGET)
    lengths = {id: sum(t // BUDGET == id for t in run.servers.sampled_by) for id in {t // BUDGET for t in run.servers.sampled_by}}
    is_over = {id: lengths[id] == min(LENGTHS[id], BUDGET) for id in lengths}
    trained = dict.fromkeys(lengths, 0)
    for (id, _), places in sorted(windows.items()):
        assert places == list(range(trained[id], trained[id] + len(places)))
        ends_response = is_over[id] and places[-1] + 1 == lengths[id]
        jitter = WINDOW - 1 - id % WINDOW if kind is JitteredRun and places[0] == 0 else 0
        assert ends_response or (not whole_responses and len(places) >= (training_window or 1) - jitter)
        assert whole_responses or len(places) < max(training_window or 1, WINDOW) + WINDOW
        trained[id] += len(places)
    for id, count in trained.items():
        assert count == lengths[id] if is_over[id] else whole_responses or lengths[id] - count < (training_window or 1)
    bound = max_trained_windows(run.config) - 1 + facts_of(run.config).ahead
    stalest = [row["rollout/staleness_max"] for row in run.recorder.rows.values() if "rollout/staleness_max" in row]
    assert max(stalest) <= bound


@quick
@given(RANDOM, st.integers(0, 2), STALENESS)
def test_every_token_is_as_many_updates_old_as_windows_are_ahead_when_it_trains(rng, warmup, staleness):
    run = ToyRun(make_config(warmup=warmup, max_staleness=staleness), rng).go()
    for step, _, tokens, _ in run.ranks.trained["policy"]:
        # Weights of the toy move in every step, also while the policy rests; it is not published then.
        found = {step - run.servers.sampled_by[t] for t in tokens}
        assert step >= warmup and (warmup or found == {min(step, staleness)})
    for step, row in run.recorder.rows.items():
        most = float(min(max(step - warmup, 0), staleness))
        assert row["rollout/staleness_max"] == row["rollout/staleness_mean"] == most
        assert row.get("rollout/spans_max", 0) <= -(-BUDGET // WINDOW)


@quick
@given(RANDOM, st.sampled_from([in_flight_config, functools.partial(group_config, weight_update=WeightUpdate.in_flight)]), STALENESS)
def test_in_flight_none_is_older_than_windows_are_ahead(rng, make, staleness):
    run = ToyRun(make(max_staleness=staleness), rng).go()
    assert_never_too_old(run, run.servers.sampled_by)
    updates = run.ranks.steps_of_policy()
    assert run.servers.evaluated == [(step, sum(other <= step for other in updates)) for step in range(NUM_STEPS)]
    for t in run.slots()["slots"]:
        for step in range(NUM_STEPS):
            versions = [segment["weight_version"] for segment in t["segments"] if segment["step"] == step]
            assert versions == sorted(versions) and len(versions) <= 1 + staleness


def assert_never_too_old(run, sampled_by):
    """By at most as many updates as windows are ahead in the step of a token's window; of groups that train whole, each window."""
    most = facts_of(run.config).ahead
    for step, _, tokens, _ in run.ranks.trained["policy"]:
        for t in tokens if not facts_of(run.config).whole_groups else ():
            assert min(step, 0) <= step - sampled_by[t] <= most
    assert all(row["rollout/staleness_max"] <= most for row in run.recorder.rows.values() if not facts_of(run.config).whole_groups)


def test_in_flight_publishes_do_meet_windows():
    runs = [ToyRun(in_flight_config(), random.Random(seed)).go() for seed in range(4)]
    assert sum(run.servers.met for run in runs) >= NUM_STEPS
    fresh = [row["rollout/staleness_mean"] for run in runs for row in run.recorder.rows.values()]
    assert any(0 < mean < 1 for mean in fresh) and len({str(run.history()) for run in runs}) > 1


@quick
@given(RANDOM)
def test_sampled_and_trained_tokens_do_not_depend_on_stage_durations(rng):
    run = ToyRun(make_config(), rng).go()
    assert run.history() == whole().history()
    assert run.servers.evaluated == [(step, step + 1) for step in range(NUM_STEPS)]


@quick
@given(RANDOM, st.integers(1, 9 * NUM_STEPS - 1), st.integers(1, 3), st.sampled_from(MAKES))
def test_killed_run_resumes_as_the_same_run(rng, kill_after, save_every, make):
    run = ToyRun(make(), rng, save_every=save_every)
    with pytest.raises(Killed):
        run.go(kill_after=kill_after)
    again = ToyRun(make(), rng, run.saver.newest, save_every).go()
    assert_same_run(run, again, make)


class SlowStage(ToyRun):
    slow = ""

    def begin(self, actions, run):
        return super().begin(actions, run) + 50.0 * (run.stage.name == self.slow)


def test_a_stop_during_an_evaluation_waits_for_it_no_more_and_loses_no_row():
    for stop_after in range(30, 60):
        run = SlowStage(make_config(), random.Random(0), save_every=99)
        run.slow = "evaluate"
        run.go(stop_after=stop_after)
        assert set(run.recorder.rows) == set(range(run.saver.newest_step + 1))
        assert "evaluate" not in [other.stage.name for other in run.waited_for]


@pytest.mark.parametrize("make", [make_config, in_flight_config, group_config])
@pytest.mark.parametrize("slow", ["record", "evaluate"])
def test_a_kill_before_the_row_of_an_earlier_step_is_written_loses_no_row(make, slow):
    for kill_after in range(10, 9 * NUM_STEPS, 3):
        run = SlowStage(make(), random.Random(kill_after), save_every=1)
        run.slow = slow
        with pytest.raises(Killed):
            run.go(kill_after=kill_after)
        again = ToyRun(make(), random.Random(0), run.saver.newest).go()
        earlier = {step for step in run.recorder.rows if step < again.first_step}
        assert earlier | set(again.recorder.rows) == set(range(NUM_STEPS))


@quick
@given(RANDOM, st.integers(1, NUM_RUNS - 1), st.sampled_from([make_config, stale_config]))
def test_a_run_that_is_asked_to_stop_saves_and_goes_on_as_the_same_run(rng, stop_after, make):
    run = ToyRun(make(), rng, save_every=99).go(stop_after=stop_after)
    newest = max((step for step, *_ in run.ranks.trained["policy"]), default=-1)
    assert run.saver.newest_step == newest
    assert_same_run(run, ToyRun(make(), rng, run.saver.newest).go(), make)


@quick
@given(RANDOM, st.integers(1, 12 * NUM_STEPS - 1), st.booleans())
def test_in_flight_a_run_that_ends_anywhere_goes_on_from_the_tokens_that_its_checkpoint_holds(rng, end_after, killed):
    run = ToyRun(in_flight_config(), rng, save_every=1 if killed else 99)
    if killed:
        with pytest.raises(Killed):
            run.go(kill_after=end_after)
    else:
        run.go(stop_after=end_after)
        assert run.saver.newest_step == max((step for step, *_ in run.ranks.trained["policy"]), default=-1)
    again = ToyRun(in_flight_config(), rng, run.saver.newest).go()
    first = again.first_step
    held = [t for t in json.loads(run.saver.newest)["pool"]["slots"]] if run.saver.newest else []
    window = [token for t in held for s in t["segments"] if s["step"] == first for token in s["token_ids"]]
    assert bool(window) == (0 < first < NUM_STEPS)
    for step, version, tokens, _ in again.ranks.trained["policy"]:
        assert step > first or not window or (sorted(tokens) == sorted(window) and version == first)
    sampled_by = run.servers.sampled_by | again.servers.sampled_by
    assert_never_too_old(again, sampled_by)
    earlier, _ = run.history(until=first)
    for name, later in again.ranks.trained.items():
        counts = Counter(t for _, _, tokens, _ in earlier[name] + later for t in tokens)
        assert set(counts.values()) == {1}
        if name == "policy":
            in_slots = [s["token_ids"] for t in again.slots()["slots"] for s in t["segments"]]
            assert {token for tokens in in_slots for token in tokens} <= set(counts)


@quick
@given(RANDOM, st.integers(1, 9 * NUM_STEPS - 1), MODES, TRAINING_WINDOWS, TRAINING_WINDOWS)
def test_a_run_that_resumes_with_another_window_of_training_trains_every_token_once(rng, kill_after, mode, before, after):
    mode, weight_update = mode
    one, two = (make_config(mode, weight_update=weight_update, training_window_tokens=tokens) for tokens in (before, after))
    run = JitteredRun(one, rng, save_every=1)
    with pytest.raises(Killed):
        run.go(kill_after=kill_after)
    again = JitteredRun(two, rng, run.saver.newest).go()
    updates = [*run.history(until=again.first_step)[0]["policy"], *again.ranks.trained["policy"]]
    counts = Counter(t for _, _, tokens, _ in updates for t in tokens)
    assert set(counts.values()) <= {1}
    kept = {(t["id"], place) for t in again.slots()["slots"] for place in range(sum(len(s["token_ids"]) for s in t["segments"]))}
    over = {t for t in run.servers.sampled_by | again.servers.sampled_by if (t // BUDGET, t % BUDGET) not in kept}
    assert over <= set(counts)


def assert_same_run(run, again, make=make_config):
    earlier, rows = run.history(until=again.first_step)
    later, later_rows = again.history()
    updates, expected_rows = whole(make).history()
    assert {name: earlier[name] + later[name] for name in updates} == updates
    assert rows | later_rows == expected_rows
    assert again.slots() == whole(make).slots()


@quick
@given(RANDOM, st.sampled_from([Mode.tppo, Mode.async_]), st.booleans(), st.sampled_from(list(WeightUpdate)))
def test_without_a_critic_a_group_trains_once_when_all_of_its_responses_have_ended(rng, mode, dynamic, weight_update):
    run = ToyRun(group_config(mode, dynamic=dynamic, weight_update=weight_update), rng).go()
    assert all(count == NUM_SLOTS for count in run.servers.sizes)
    trained = {}
    for step, _, tokens, _ in run.ranks.trained["policy"]:
        for t in tokens:
            trained.setdefault(t // BUDGET, []).append((step, t))
    groups = {id // 2 for id in run.servers.ended if id ^ 1 in run.servers.ended}
    if dynamic:
        differs = {group for group in groups if toy_reward(2 * group) != toy_reward(2 * group + 1)}
        assert differs < groups
        groups = differs
    assert groups and set(trained) == {2 * group + i for group in groups for i in (0, 1)}
    for id, found in trained.items():
        last = max(run.servers.ended[2 * (id // 2)], run.servers.ended[2 * (id // 2) + 1])
        length = min(LENGTHS[id], BUDGET)
        assert sorted(found) == [(last, BUDGET * id + place) for place in range(length)]


@quick
@given(RANDOM, st.sampled_from([Mode.tppo, Mode.async_]), st.booleans(), st.sampled_from(list(WeightUpdate)))
def test_a_step_in_which_no_group_has_ended_publishes_nothing_and_makes_no_token_older(rng, mode, dynamic, weight_update):
    run = ToyRun(group_config(mode, dynamic=dynamic, weight_update=weight_update), rng).go()
    updates = run.ranks.steps_of_policy()
    assert updates < set(range(NUM_STEPS)) and run.servers.weight_version == 1 + len(updates)
    for step, _, tokens, _ in run.ranks.trained["policy"]:
        ages = [sum(other < step for other in updates) - run.servers.sampled_by[t] for t in tokens]
        assert run.recorder.rows[step]["rollout/staleness_max"] == max(ages)


def toy_reward(id):
    return sum(BUDGET * id + place for place in range(min(LENGTHS[id], BUDGET))) % 7 % 2


def test_async_without_staleness_equals_tppo():
    """Token for token, number for number."""
    makes = [functools.partial(make_config, Mode.async_), in_flight_config, functools.partial(make_config, Mode.tppo)]
    runs = [ToyRun(make(max_staleness=0), random.Random(1)).go() for make in makes]
    assert runs[0].history() == runs[1].history() == runs[2].history() != whole().history()
    assert all(row["rollout/staleness_max"] == 0 for row in runs[0].recorder.rows.values())
    assert runs[0].slots() == runs[1].slots()


@pytest.mark.parametrize(("place", "estimator"), [(KlPlace.reward, "k1"), (KlPlace.loss, "k3")])
def test_a_kl_penalty_is_measured_over_all_windows_of_a_response(place, estimator):
    config = make_config()
    config.algorithm.kl.place, config.algorithm.kl.estimator, config.algorithm.kl.coef = place, estimator, 0.1
    one, two = (ToyRun(config, random.Random(seed)).go() for seed in (3, 4))
    assert one.history() == two.history() and any("kl/reference_per_response" in row for row in one.recorder.rows.values())
