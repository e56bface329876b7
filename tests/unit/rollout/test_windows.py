"""Laws of generation in windows: dialogues, FIRE and over-sampling, against a fake server with SGLang's guarantees.

The engine draws each token from (seed, position, history, temperature), stops at stop tokens and at stop strings of
which it sees what it generated in this request alone, and returns what it has when it is aborted.
"""

import asyncio
import itertools
import json
import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.schema import FireConfig
from megatron_rl.data.trajectory import Prompt, Trajectory
from megatron_rl.environments.base import Environment, EnvironmentFault, Message
from megatron_rl.rollout import windows as windows_module
from megatron_rl.rollout.environment_calls import EnvironmentCalls
from megatron_rl.rollout.generation import Dialogue, GenerationPlan, Sampling, end_of_text, hot_token_is_next
from megatron_rl.rollout.requests import NOTHING_GENERATED, Generation, ServerLost
from megatron_rl.rollout.sglang.wire.response_validation import InvalidReply
from megatron_rl.rollout.windows import WindowGenerator

EOS = 0
WORDS = ["", "a", "b", "#", "ab", "b#"]
MESSAGE_ID = 9
PROMPT = Prompt("p", (1, 2), source="file:1")
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=(EOS,), seed=3)


def decode(token_ids):
    return "".join(WORDS[t] if t < len(WORDS) else "~" for t in token_ids)


def encode(message, last_token_id, arguments):
    return [MESSAGE_ID] * len(message.text)


@dataclass
class Engine:
    """Stands in for the client and all servers behind it."""

    version: str = "1"
    end_weight: float = 0.3
    requests: list = field(default_factory=list)
    failures: list = field(default_factory=list)
    """Raised by the next calls, one each."""
    hold: set = field(default_factory=set)
    """Ids of trajectories whose requests wait until they are aborted."""
    aborted: dict = field(default_factory=dict)

    async def generate(self, request, *, alone=False):
        self.requests.append(request)
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop(0)
        whole = self.sample(request)
        if int(request.rid.split("-")[2]) not in self.hold:
            return whole
        assert alone, "a batched request would come back with the slowest of its batch"
        event = self.aborted.setdefault(request.rid, asyncio.Event())
        await event.wait()
        cut = len(whole.token_ids) // 2
        if cut == 0:
            return NOTHING_GENERATED
        return replace(whole, token_ids=whole.token_ids[:cut], logprobs=whole.logprobs[:cut], finish_reason="abort")

    async def abort(self, rids):
        for rid in rids:
            if rid in self.aborted:
                self.aborted[rid].set()

    def sample(self, request):
        tokens, reason, matched = [], "length", ""
        while len(tokens) < request.max_new_tokens:
            history = (*np.asarray(request.input_ids).tolist(), *tokens)
            key = (request.seed, len(history), history, request.temperature, request.top_k)
            weights = [0.0 if t in request.banned_token_ids else 1.0 for t in range(len(WORDS))]
            weights[EOS] *= self.end_weight
            tokens.append(random.Random(repr(key)).choices(range(len(WORDS)), weights)[0])
            matched = next((s for s in request.stop_strings if s in decode(tokens)), "")
            if tokens[-1] in request.stop_token_ids or matched:
                reason = "stop"
                break
        logprobs = tuple(-1.0 - request.temperature - token / 100 for token in tokens)
        return Generation(tuple(tokens), logprobs, reason, self.version, 0, matched)


class Talk(Environment):
    """A helper that answers every turn until ``num_turns``, with messages as long as the turn was."""

    roles = ("policy", "verifier")

    def __init__(self, num_turns=3, stop_strings=("ab",), message_tokens=2):
        self.num_turns, self.stop_strings, self.message_tokens = num_turns, stop_strings, message_tokens

    def respond(self, prompt, turns):
        if len(turns) == self.num_turns:
            return None
        return Message("m" * self.message_tokens, next_role=self.roles[len(turns) % 2])

    def graded_text(self, prompt, turns, index):
        return None

    def turn_reward(self, prompt, turns, index, grades):
        return None

    def outcome(self, prompt, turns, grades):
        raise NotImplementedError


def new_trajectory(id=0, budget=24, dialogue=True, max_turn_tokens=0):
    return Trajectory(id, PROMPT, id, 0, budget, dialogue=dialogue, max_turn_tokens=max_turn_tokens)


def generate(
    engine,
    trajectories,
    *,
    step=0,
    window=100,
    environment=None,
    fire=None,
    sampling=SAMPLING,
    encode=encode,
    **options,
):
    recovered = []

    async def recover(lost):
        recovered.append(lost)

    warnings = []
    dialogue = Dialogue(EnvironmentCalls(environment), encode, environment.stop_strings) if environment else None
    ahead = dict.fromkeys(("trains_meanwhile", "published_meanwhile"), isinstance(engine, Updated))
    plan = GenerationPlan(sampling, decode, fire=fire, dialogue=dialogue, **ahead)
    made = WindowGenerator(
        engine, recover, plan, step=step, num_tokens=window, weight_version=1, kind="train", warn=warnings.append
    )

    async def main():
        await asyncio.wait_for(made.generate(trajectories, **options), 20)

    asyncio.run(main())
    return recovered, warnings


def tokens_of(trajectory):
    """All that must not depend on how the response was cut into windows."""
    return (
        trajectory.response_ids.tolist(),
        trajectory.rollout_logprobs().tolist(),
        trajectory.generated_mask().tolist(),
        trajectory.hot_mask().tolist(),
        [(turn.index, turn.role, turn.start, turn.token_ids.tolist(), turn.ended) for turn in trajectory.turns()],
        (trajectory.finished, trajectory.ended_naturally, trajectory.env_done, trajectory.out_of_room),
    )


def in_windows(trajectory, window, **options):
    """Generate step by step to the end, through a checkpoint before each step."""
    engine, step = Engine(), 0
    while not trajectory.finished:
        trajectory = Trajectory.from_dict(json.loads(json.dumps(trajectory.to_dict(), default=np.ndarray.tolist)))
        before = trajectory.num_generated_tokens
        generate(engine, [trajectory], step=step, window=window, **options)
        grown = trajectory.num_generated_tokens - before
        assert grown == trajectory.window_tokens(step) <= window
        assert trajectory.finished or grown == window, "a window is only left unfilled by a finished response"
        step += 1
    return trajectory


seeds = st.integers(0, 10**6)
windows = st.integers(1, 9)
environments = st.one_of(
    st.none(),
    st.builds(
        Talk,
        num_turns=st.integers(1, 4),
        stop_strings=st.sampled_from([(), ("ab",), ("a#", "bb")]),
        message_tokens=st.integers(0, 3),
    ),
)
fires = st.one_of(
    st.none(),
    st.builds(
        FireConfig,
        temperature=st.just(9.0),
        top_k=st.sampled_from([-1, 4]),
        after=st.sampled_from(["", "b", "ba"]),
        banned_token_ids=st.just([EOS]),
    ),
)


@settings(max_examples=150)
@given(seeds, windows, environments, fires, st.integers(1, 24), st.sampled_from([0, 1, 3, 6]))
def test_windows_and_checkpoints_change_no_token(seed, window, environment, fire, budget, max_turn_tokens):
    def whole():
        max_turn = max_turn_tokens if environment else 0
        return new_trajectory(id=seed, budget=budget, dialogue=environment is not None, max_turn_tokens=max_turn)

    once = whole()
    generate(Engine(), [once], environment=environment, fire=fire)
    piecewise = in_windows(whole(), window, environment=environment, fire=fire)
    assert tokens_of(piecewise) == tokens_of(once)
    assert once.finished and 0 < once.num_response_tokens <= budget


@settings(max_examples=100)
@given(seeds, environments, fires, st.integers(1, 24), st.sampled_from([0, 3]))
def test_every_turn_ends_at_its_first_stop(seed, environment, fire, budget, max_turn_tokens):
    if environment is None:
        return
    t = new_trajectory(id=seed, budget=budget, max_turn_tokens=max_turn_tokens)
    generate(Engine(), [t], environment=environment, fire=fire)
    turns = t.turns()
    for turn in turns:
        text = decode(turn.token_ids)
        stops = [s for s in environment.stop_strings if s in text]
        if turn.finish_reason == "stop":
            assert turn.token_ids[-1] == EOS or stops
            assert EOS not in turn.token_ids[:-1]
            assert not any(s in decode(turn.token_ids[:-1]) for s in environment.stop_strings)
        else:
            full = 0 < max_turn_tokens == len(turn.token_ids)
            assert not stops and (full or t.num_response_tokens == budget)
    assert [turn.role for turn in turns] == ["policy", "verifier", "policy", "verifier"][: len(turns)]
    by_itself = turns[-1].finish_reason == "stop" or t.num_response_tokens < budget
    assert t.env_done == (len(turns) == environment.num_turns and by_itself)
    assert t.out_of_room == (len(turns) < environment.num_turns and by_itself)


def test_message_is_tokenized_once_and_the_history_only_grows():
    engine, encoded, given = Engine(end_weight=3.0), [], []

    def counting(message, last_token_id, arguments):
        encoded.append(last_token_id)
        given.append(arguments)
        return encode(message, last_token_id, arguments)

    t = new_trajectory(budget=60)
    t.prompt = replace(PROMPT, chat_arguments={"enable_thinking": False})
    generate(engine, [t], environment=Talk(num_turns=3), encode=counting)
    histories = [np.asarray(request.input_ids).tolist() for request in engine.requests]
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(histories))
    assert len(encoded) == 2 == t.response_ids.tolist().count(MESSAGE_ID) // 2
    assert encoded == [turn.token_ids[-1] for turn in t.turns()[:-1]]
    assert given == [{"enable_thinking": False}] * 2  # the prompt's arguments of the chat template


def test_a_turn_that_ends_with_the_window_is_answered_in_the_same_step():
    def turn_at_the_edge(environment):
        t = new_trajectory(id=7, max_turn_tokens=4)
        generate(Engine(end_weight=0.0), [t], window=4, environment=environment)
        return t

    done = turn_at_the_edge(Talk(num_turns=1, stop_strings=()))
    assert done.finished and done.env_done and done.turn_ended(0)
    going_on = turn_at_the_edge(Talk(num_turns=2, stop_strings=()))
    assert not going_on.finished and going_on.segments[-1].finish_reason == "message"
    assert going_on.next_role == "verifier" and going_on.window_tokens(0) == 4


def test_message_that_leaves_no_response_budget_ends_the_dialogue():
    for message_tokens, cut in ((7, False), (8, True)):
        t = new_trajectory(id=7, budget=12, max_turn_tokens=4)
        talk = Talk(num_turns=2, stop_strings=(), message_tokens=message_tokens)
        generate(Engine(end_weight=0.0), [t], environment=talk)
        assert t.out_of_room is cut and t.finished and not t.ended_naturally
        assert t.num_response_tokens == (4 if cut else 12)


@pytest.mark.parametrize(
    ("answer", "names"),
    [(Message("m", next_role="judge"), "policy, verifier"), ("text", "expected None, or a Message"), (None, None)],
)
def test_invalid_environment_message_is_reported_with_its_environment(answer, names):
    class Odd(Talk):
        def respond(self, prompt, turns):
            return answer

    t = new_trajectory()
    if names is None:
        generate(Engine(), [t], environment=Odd())
        assert t.env_done
    else:
        with pytest.raises(EnvironmentFault, match=f"(?s)Odd.*file:1.*{names}"):
            generate(Engine(), [t], environment=Odd())


def test_environment_failure_is_reported_with_the_prompt_source():
    class Broken(Talk):
        def respond(self, prompt, turns):
            return Message(turns[5].text)

    with pytest.raises(EnvironmentFault, match="Broken failed at file:1: IndexError"):
        generate(Engine(), [new_trajectory()], environment=Broken())


def test_environment_ignores_trajectories_that_are_not_dialogues():
    one, two = new_trajectory(dialogue=False), new_trajectory(dialogue=False)
    generate(Engine(), [one], environment=Talk())
    generate(Engine(), [two])
    assert tokens_of(one) == tokens_of(two) and one.finished


@given(seeds, st.integers(1, 20), windows)
def test_fire_at_the_runs_own_temperature_changes_nothing(seed, budget, window):
    fire = FireConfig(SAMPLING.temperature, SAMPLING.top_k, after="", banned_token_ids=[])
    plain, fired = (new_trajectory(id=seed, budget=budget, dialogue=False) for _ in range(2))
    generate(Engine(), [plain], window=window)
    generate(Engine(), [fired], window=window, fire=fire)
    assert fired.response_ids.tolist() == plain.response_ids.tolist()
    assert fired.rollout_logprobs().tolist() == plain.rollout_logprobs().tolist()
    assert fired.finished == plain.finished and fired.window_tokens(0) == plain.window_tokens(0)


@settings(max_examples=100)
@given(seeds, fires, windows, st.integers(1, 20))
def test_exactly_one_token_is_hot_and_the_others_are_sampled_as_usual(seed, fire, window, budget):
    engine, t = Engine(), new_trajectory(id=seed, budget=budget, dialogue=False)
    step = 0
    while not t.finished:
        generate(engine, [t], step=step, window=window, fire=fire)
        step += 1
    if fire is None:
        assert not t.hot_mask().any()
        return
    hot = [i for i, is_hot in enumerate(t.hot_mask()) if is_hot]
    ids = t.response_ids
    marker = end_of_text(ids, [fire.after], decode) if fire.after else 0
    place = [marker] if marker is not None and marker < len(ids) else []
    if place and EOS in ids[: place[0]]:
        place = []
    assert hot == place
    for i in hot:
        assert ids[i] != EOS
    for request in engine.requests:
        is_hot = request.temperature == fire.temperature
        assert request.banned_token_ids == (tuple(fire.banned_token_ids) if is_hot else ())
        assert request.logprobs_after_top_k == (is_hot and fire.top_k > 0)
        assert not is_hot or request.max_new_tokens == 1
    assert sum(request.temperature == fire.temperature for request in engine.requests) == len(hot)


def test_only_the_first_turn_of_a_dialogue_has_a_hot_token():
    fire = FireConfig(9.0, 4, after="", banned_token_ids=[EOS])
    t = new_trajectory(budget=60)
    generate(Engine(end_weight=2.0), [t], environment=Talk(num_turns=4), fire=fire)
    assert len(t.turns()) > 1 and t.hot_mask().tolist() == [True] + [False] * (t.num_response_tokens - 1)


def test_marker_that_spans_two_windows_is_found():
    fire = FireConfig(9.0, -1, after="ba", banned_token_ids=[])
    for seed in range(300):
        t = new_trajectory(id=seed, dialogue=False)
        generate(Engine(end_weight=0.0), [t], window=1, fire=fire)
        generate(Engine(end_weight=0.0), [t], step=1, window=1, fire=fire)
        if decode(t.response_ids) == "ba":
            assert len(t.response_ids) == 2 and hot_token_is_next(t, fire, decode)
            return
    raise AssertionError("no seed begins with the marker")


def test_responses_aborted_by_is_enough_continue_in_the_next_step():
    trajectories = [new_trajectory(id=i, budget=12, dialogue=False) for i in range(8)]
    engine = Engine(end_weight=0.0, hold={2, 5, 6})
    generate(engine, trajectories, is_enough=lambda: sum(t.finished for t in trajectories) >= 5)
    assert [t.id for t in trajectories if not t.finished] == [2, 5, 6]
    for t in (trajectories[i] for i in (2, 5, 6)):
        assert t.num_response_tokens == 6 and t.segments[-1].finish_reason == "abort"
    cut = trajectories[2]
    generate(Engine(end_weight=0.0), [cut], step=1)
    whole = new_trajectory(id=2, budget=12, dialogue=False)
    generate(Engine(end_weight=0.0), [whole])
    assert cut.response_ids.tolist() == whole.response_ids.tolist() and cut.finished
    assert (cut.window_tokens(0), cut.window_tokens(1)) == (6, 6)


def test_no_request_is_sent_once_is_enough_is_true():
    trajectories = [new_trajectory(id=i, dialogue=False) for i in range(3)]
    engine = Engine()
    generate(engine, trajectories, is_enough=lambda: True)
    assert engine.requests == [] and not any(t.segments for t in trajectories)


def test_is_enough_that_stays_false_changes_nothing():
    asked, plain = ([new_trajectory(id=i) for i in range(6)] for _ in range(2))
    generate(Engine(), asked, environment=Talk(), is_enough=lambda: False)
    generate(Engine(), plain, environment=Talk())
    assert [tokens_of(t) for t in asked] == [tokens_of(t) for t in plain]


def test_abort_that_never_returns_has_a_deadline(monkeypatch):
    class Deaf(Engine):
        async def abort(self, rids):
            self.asked = self.__dict__.get("asked", 0) + 1

    monkeypatch.setattr(windows_module, "ABORT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(windows_module, "ABORT_REPEAT_S", 0.05)
    trajectories = [new_trajectory(id=i, dialogue=False) for i in range(3)]
    engine = Deaf(hold={1})
    _, warnings = generate(engine, trajectories, is_enough=lambda: sum(t.finished for t in trajectories) >= 2)
    assert engine.asked > 1 and "1 responses were aborted" in warnings[0]
    assert trajectories[1].segments == []


def test_failure_during_over_sampling_is_raised():
    trajectories = [new_trajectory(id=i, dialogue=False) for i in range(3)]
    with pytest.raises(InvalidReply, match="weight version"):
        generate(Engine(version="0"), trajectories, is_enough=lambda: False)


def test_a_lost_server_costs_no_token():
    t = new_trajectory()
    recovered, _ = generate(Engine(failures=[ServerLost("http://x", 1.0, 1, "gone")] * 2), [t], environment=Talk())
    whole = new_trajectory()
    generate(Engine(), [whole], environment=Talk())
    assert len(recovered) == 2 and tokens_of(t) == tokens_of(whole)


def test_window_rejects_tokens_of_unknown_weight_versions():
    with pytest.raises(InvalidReply, match="'0', but version 1"):
        generate(Engine(version="0"), [new_trajectory()])


def test_restarted_server_may_serve_the_next_weight_version():
    def versions_from(server):
        plan, t = GenerationPlan(SAMPLING, decode, trains_meanwhile=True), new_trajectory(dialogue=False)
        window = WindowGenerator(Engine(version=server), None, plan, step=0, num_tokens=9, weight_version=1, kind="train")
        asyncio.run(window.generate([t]))
        return {segment.weight_version for segment in t.segments}

    assert [versions_from("1"), versions_from("2")] == [{1}, {2}]
    for version in ("0", "3"):
        with pytest.raises(InvalidReply, match="weight version"):
            versions_from(version)


@dataclass
class Updated(Engine):
    """New weights come after every third token of a request, as long as there are newer ones."""

    async def generate(self, request, *, alone=False):
        answer = await super().generate(request, alone=alone)
        assert request.needs_spans
        cuts = [0, *range(3, len(answer.token_ids), 3)][:2]
        ends = [*cuts[1:], len(answer.token_ids)]
        spans = tuple((str(1 + i), start, end) for i, (start, end) in enumerate(zip(cuts, ends, strict=True)))
        return replace(answer, weight_version=spans[-1][0], versions=spans)


def test_reply_of_two_weight_versions_becomes_two_segments():
    plain, mixed = new_trajectory(), new_trajectory()
    generate(Engine(), [plain], environment=Talk())
    generate(Updated(), [mixed], environment=Talk())
    assert tokens_of(plain) == tokens_of(mixed) and mixed.finished
    assert [t.finish_reason for t in plain.turns()] == [t.finish_reason for t in mixed.turns()]
    for turn in mixed.turns():
        *earlier, last = turn.segments
        assert [len(s.token_ids) for s in earlier] == [3] * bool(earlier) and last.weight_version == 1 + bool(earlier)
        assert all(s.finish_reason == "abort" for s in earlier)
    assert any(len(turn.segments) == 2 for turn in mixed.turns())


@given(st.lists(st.integers(0, 5), max_size=12), st.lists(st.sampled_from(["a", "ab", "b#", "#a#"]), max_size=2))
def test_text_ends_at_the_first_token_that_completes_it(token_ids, texts):
    ends = [n for n in range(len(token_ids) + 1) if any(text in decode(token_ids[:n]) for text in texts)]
    assert end_of_text(token_ids, texts, decode) == (ends[0] if ends else None)


def test_short_first_window_changes_no_token():
    plain, moved = (new_trajectory(budget=24, dialogue=False) for _ in range(2))
    moved.first_window_tokens = 5
    grown = []
    for trajectory in (plain, moved):
        step = 0
        while not trajectory.finished:
            generate(Engine(), [trajectory], step=step, window=8)
            if trajectory is moved:
                grown.append(trajectory.window_tokens(step))
            step += 1
    assert grown[0] == 5 and all(n == 8 for n in grown[1:-1]) and grown[-1] <= 8
    assert tokens_of(plain)[0] == tokens_of(moved)[0]


def test_greedy_response_takes_the_most_likely_tokens_and_is_never_hot():
    greedy, sampled = new_trajectory(dialogue=False), new_trajectory(id=1, dialogue=False)
    greedy.greedy = True
    asked = []

    class Asked(Engine):
        async def generate(self, request, **options):
            asked.append((request.rid.split("-")[2], request.temperature))
            return await super().generate(request, **options)

    fire = FireConfig(temperature=30.0, top_k=16, after="", banned_token_ids=[])
    generate(Asked(), [greedy, sampled], fire=fire)
    assert {temperature for id, temperature in asked if id == "0"} == {0.0}
    assert {temperature for id, temperature in asked if id == "1"} == {30.0, SAMPLING.temperature}
    assert not greedy.hot_mask().any() and sampled.hot_mask()[0]
