"""Environments: PAG's branches and rewards (arXiv 2506.10406), the calculator, names and options, message tokens."""

import inspect
import math
import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.schema import FireConfig
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.trajectory import Prompt, Score, Segment, Trajectory, message_segment
from megatron_rl.environments import base, calculator
from megatron_rl.environments.base import EnvironmentFault, Message, TurnView, turn_views, turns_to_score
from megatron_rl.environments.calculator import Calculator, answer
from megatron_rl.environments.pag import REVISE_PROMPT, VERIFY_PROMPT, Pag
from megatron_rl.rollout.generation import make_dialogue, make_fire
from tests.tiny_models import make_tokenizer

PROMPT = Prompt("p", (1,), answer="7")
RIGHT, WRONG, LOST = Score(1.0), Score(0.0), Score(None, error="timed out")


def views(*texts, reason="stop"):
    """y1, v1, y2, v2, ..."""
    return [TurnView("policy" if i % 2 == 0 else "verifier", text, (1,), reason) for i, text in enumerate(texts)]


OK, BAD = "All fine. The answer is correct.", "Step 2 is off. The answer is wrong."


def test_pag_verifies_every_answer_and_revises_only_after_a_wrong_verdict():
    pag = Pag()
    assert pag.first_role() == "policy" and pag.turns_are_independent
    assert pag.respond(PROMPT, views("7")) == Message(VERIFY_PROMPT, next_role="verifier")
    assert pag.respond(PROMPT, views("7", OK)) is None
    assert pag.respond(PROMPT, views("7", BAD)) == Message(REVISE_PROMPT, next_role="policy")
    assert pag.respond(PROMPT, views("7", BAD, "8")) == Message(VERIFY_PROMPT, next_role="verifier")
    assert pag.respond(PROMPT, views("7", BAD, "8", BAD)) is None
    assert pag.respond(PROMPT, views("7", "hm")) is None


def test_pag_prompts_are_the_papers():
    assert "end your response with 'The answer is wrong'" in VERIFY_PROMPT
    assert VERIFY_PROMPT.startswith(
        "Check the math solution step-by-step. If you find a mistake: state the wrong step,"
    )
    assert REVISE_PROMPT.endswith("Please provide the correct solution to the math problem.")


def test_pag_of_one_attempt_without_verdict_is_a_single_turn():
    pag = Pag(max_attempts=1, verify_last=False, bonus=0.0)
    assert pag.respond(PROMPT, views("7")) is None
    assert pag.turn_reward(PROMPT, views("7"), 0, {0: RIGHT}) == RIGHT == pag.outcome(PROMPT, views("7"), {0: RIGHT})


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("The answer is correct", True),
        ("So... the  answer is\n**correct**.", True),
        ("'The answer is wrong'", False),
        ("The answer is correct. No: the answer is wrong.", False),
        ("The answer is wrong at first sight, but the answer is correct!", True),
        ("The answer is not correct", None),
        ("The answer is wrong because 3 + 4 = 7", None),
        ("correct", None),
        ("theanswer is correct", None),
        ("", None),
        ("**.**", None),
    ],
)
def test_verdict_is_the_final_sentence(text, verdict):
    assert Pag().verdict(text) is verdict


@given(st.text(max_size=40))
def test_text_before_a_verdict_does_not_change_it(text):
    assert Pag().verdict(f"{text} The answer is wrong.") is False
    assert Pag().verdict(f"{text}\nThe answer is correct") is True


@pytest.mark.parametrize(
    ("text", "grade", "reward"),
    [(OK, RIGHT, 1.0), (OK, WRONG, 0.0), (BAD, RIGHT, 0.0), (BAD, WRONG, 1.0), ("hm", RIGHT, 0.0), ("hm", WRONG, 0.0)],
)
def test_verifier_is_rewarded_only_for_readable_true_verdicts(text, grade, reward):
    assert Pag().turn_reward(PROMPT, views("7", text), 1, {0: grade}).value == reward


@pytest.mark.parametrize(("first", "second", "reward"), [(0, 1, 2.0), (1, 0, -1.0), (1, 1, 1.0), (0, 0, 0.0)])
def test_bonus_rewards_the_change_between_answers(first, second, reward):
    turns, grades = views("7", BAD, "8"), {0: Score(float(first)), 2: Score(float(second))}
    assert Pag(bonus=1.0).turn_reward(PROMPT, turns, 2, grades).value == reward
    assert Pag(bonus=0.0).turn_reward(PROMPT, turns, 2, grades).value == second
    assert Pag().turn_reward(PROMPT, turns, 0, grades).value == first


@given(st.lists(st.floats(-1, 1), min_size=4, max_size=4))
def test_rewards_of_later_turns_never_reach_earlier_turns(values):
    turns = views("7", BAD, "8", BAD)
    now, later = {0: RIGHT, 2: Score(values[0])}, {0: RIGHT, 2: Score(values[1])}
    for index in (0, 1):
        assert Pag().turn_reward(PROMPT, turns, index, now) == Pag().turn_reward(PROMPT, turns, index, later)


def test_unscored_answers_never_become_zero():
    turns = views("7", BAD, "8", OK)
    assert Pag().turn_reward(PROMPT, turns, 1, {0: LOST}).value is None
    assert "timed out" in Pag().turn_reward(PROMPT, turns, 1, {0: LOST}).error
    assert Pag().turn_reward(PROMPT, turns, 2, {0: LOST, 2: RIGHT}).value is None
    assert Pag().turn_reward(PROMPT, turns, 2, {0: RIGHT, 2: LOST}).value is None
    assert Pag().turn_reward(PROMPT, turns, 3, {0: LOST, 2: RIGHT}).value == 1.0
    assert Pag().metrics(PROMPT, views("7"), {0: LOST}) == {"revised": 0.0}


def test_only_answers_are_scored_and_the_last_is_the_outcome():
    turns, grades = views("7", BAD, "8", OK), {0: WRONG, 2: RIGHT}
    assert [Pag().graded_text(PROMPT, turns, i) for i in range(4)] == ["7", None, "8", None]
    assert Pag().outcome(PROMPT, turns, grades) == RIGHT
    assert Pag().metrics(PROMPT, turns, grades) == {
        "revised": 1.0,
        "first_accuracy": 0.0,
        "final_accuracy": 1.0,
        "unreadable_verdicts": 0.0,
        "verifier_accuracy": 1.0,
    }


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2+3*4", "14"),
        ("(2+3)*4", "20"),
        ("7/2", "3.5"),
        ("8/2", "4"),
        ("1/3", "0.3333333333"),
        ("07 + 003", "10"),
        ("1.05*2", "2.1"),
        ("2**10", "1024"),
        ("-3 - -4", "1"),
        ("7//2", "3"),
        ("7%4", "3"),
        ("0.5+.5", "1"),
        ("2**-1", "0.5"),
        ("99999999999*99999999999", "9999999999800000000001"),
    ],
)
def test_calculator_evaluates_expressions(expression, result):
    assert answer(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        "", " ", "2+", "1/0", "1%0", "0**-1", "9**9**9**9", "9**99999999", "(-8)**0.5", "1.5**10000", "__import__('os')",
        "a+1", "1e9", "(1)(2)", "1,2", "1" * 199, "(" * 150, "1+" * 150 + "1", "((((9**40)**40)**40)**40)", "0.1**-1000",
        "5 if 1 else 2", "1\x00", "１+１", "-" * 200, "*" * 50, "1..2", "()", "..",
    ],
)  # fmt: skip
def test_calculator_rejects_invalid_or_expensive_expressions(expression):
    assert answer(expression).startswith("error: ")


@given(st.text(alphabet="0123456789.+-*/%() ", max_size=60))
def test_calculator_always_returns_a_short_text(expression):
    result = answer(expression)
    assert 0 < len(result) <= calculator.MAX_DIGITS + 10
    assert result.startswith("error: ") or math.isfinite(float(result))


@given(st.integers(-999, 999), st.integers(-999, 999), st.sampled_from("+-*"))
def test_calculator_is_exact_on_integers(a, b, operation):
    assert answer(f"({a}){operation}({b})") == str({"+": a + b, "-": a - b, "*": a * b}[operation])


def call_turn(text, reason="stop"):
    return TurnView("policy", text, (1,), reason)


def test_call_gets_its_result_and_the_last_turn_is_scored():
    tool = Calculator()
    call, final = call_turn("so <calc>2+3</calc>"), call_turn("the answer is 5")
    assert tool.stop_strings == ("</calc>",) and not tool.turns_are_independent
    assert tool.respond(PROMPT, [call]) == Message("<result>5</result>", verbatim=True)
    assert tool.respond(PROMPT, [call, final]) is None
    assert [tool.graded_text(PROMPT, [call, final], i) for i in range(2)] == [None, "the answer is 5"]
    assert tool.turn_reward(PROMPT, [call, final], 0, {1: RIGHT}) is None
    assert tool.turn_reward(PROMPT, [call, final], 1, {1: RIGHT}) == RIGHT
    assert tool.outcome(PROMPT, [call, final], {1: LOST}).value is None
    assert tool.metrics(PROMPT, [call, final], {1: RIGHT}) == {"num_calls": 1.0, "failed_calls": 0.0}


@pytest.mark.parametrize("text", ["2+3</calc>", "<calc>2+3", "text", "", "</calc><calc>"])
def test_turn_without_a_call_ends_the_dialogue(text):
    assert Calculator().respond(PROMPT, [call_turn(text)]) is None


def test_truncated_call_is_not_a_call():
    assert Calculator().respond(PROMPT, [call_turn("<calc>1</calc>", reason="length")]) is None


def test_calls_beyond_the_limit_end_the_dialogue():
    tool, call = Calculator(max_calls=2), call_turn("<calc>1</calc>")
    assert tool.respond(PROMPT, [call, call]) is not None
    assert tool.respond(PROMPT, [call, call, call]) is None
    assert tool.metrics(PROMPT, [call, call, call], {})["num_calls"] == 2


def test_dialogue_that_ends_with_a_call_has_no_answer():
    tool, call = Calculator(), call_turn("<calc>1+</calc>")
    assert tool.graded_text(PROMPT, [call], 0) is None
    assert tool.outcome(PROMPT, [call], {}).value == 0.0 == tool.turn_reward(PROMPT, [call], 0, {}).value
    assert tool.metrics(PROMPT, [call], {})["failed_calls"] == 1.0


def test_environments_are_found_by_name_and_import_path():
    assert base.available() == ["calculator", "harness", "pag", "tools"]
    assert isinstance(base.build("pag", {"max_attempts": 3}), Pag)
    assert isinstance(base.build("megatron_rl.environments.calculator:Calculator", {}), Calculator)
    assert base.build("pag", {"bonus": 2}).bonus == 2


@pytest.mark.parametrize(
    ("name", "options", "names"),
    [
        ("nobody", {}, "expected one of .*calculator, pag"),
        ("no.such.module:X", {}, "does not import"),
        ("megatron_rl.environments.pag:Nobody", {}, r"has no 'Nobody'; it has \['Pag'"),
        ("megatron_rl.environments.pag:VERIFIER", {}, "expected a plain function or a class, got 'verifier'"),
        ("megatron_rl.environments.base:Environment", {}, "lacks the methods"),
        ("pag", {"max_attempt": 3}, "no option 'max_attempt'; its options: max_attempts"),
        ("pag", {"max_attempts": "3"}, "max_attempts must be an integer, got '3'"),
        ("pag", {"max_attempts": True}, "max_attempts must be an integer"),
        ("pag", {"verify_last": 1}, "true or false"),
        ("pag", {"max_attempts": 0}, "at least 1"),
        ("pag", {"wrong_verdict": "correct"}, "neither may end with the other"),
        ("pag", {"wrong_verdict": "."}, "neither may end with the other"),
        ("calculator", {"result": "nothing"}, "exactly once"),
        ("calculator", {"close_tag": ""}, "must not be empty"),
        (f"{__name__}:Needy", {}, "needs size"),
        (f"{__name__}:Roleless", {}, "first_role"),
    ],
)
def test_bad_environments_are_rejected_before_a_run_starts(name, options, names):
    with pytest.raises(EnvironmentFault, match=names):
        base.build(name, options)


class Needy(Calculator):
    def __init__(self, size: int) -> None:
        super().__init__()


class Roleless(Calculator):
    def first_role(self) -> str:
        return "judge"


def test_every_builtin_environment_option_has_a_checked_type():
    for name in ("calculator", "pag"):  # the agents' environments have required options: tests/unit/agents
        for option in inspect.signature(base.resolve(name)).parameters:
            with pytest.raises(EnvironmentFault, match=f"{option} must be"):
                base.build(name, {option: object()})


def dialogue_with(*segments, **fields):
    return Trajectory(0, PROMPT, 0, 0, 99, list(segments), dialogue=True, **fields)


def segment(step, turn, role, reason):
    return Segment((5, 6), (-1.0, -1.0), 0, reason, step, turn, role)


def test_turns_are_scored_at_their_end_or_with_the_dialogue():
    answered = [segment(0, 0, "policy", "stop"), message_segment((9,), weight_version=0, step=0, turn=0)]
    open_ = dialogue_with(*answered, segment(0, 1, "verifier", "length"))
    done = dialogue_with(*open_.segments, segment(1, 1, "verifier", "stop"), env_done=True)
    assert turns_to_score(Pag(), open_, 0) == [0] and turns_to_score(Pag(), done, 1) == [1]
    assert turns_to_score(Calculator(), open_, 0) == [] and turns_to_score(Calculator(), done, 1) == [1]
    assert [view.role for view in turn_views(open_, str)] == ["policy"]
    assert [(view.role, view.text, view.finish_reason) for view in turn_views(done, str)][1] == (
        "verifier", "[5, 6, 5, 6]", "stop",
    )  # fmt: skip


def test_truncated_turns_have_finish_reason_length():
    cut = dialogue_with(segment(0, 0, "policy", "abort"), max_turn_tokens=2)
    assert [view.finish_reason for view in turn_views(cut, str)] == ["length"]


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(path)
    from transformers import PreTrainedTokenizerFast

    inner = PreTrainedTokenizerFast.from_pretrained(path)
    inner.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "eos_token": "<|im_end|>"})
    inner.chat_template = CHATML
    inner.save_pretrained(path)
    return Tokenizer(path)


def test_dialogue_tokens_equal_the_chat_template(chat_tokenizer):
    encode = chat_tokenizer.encode
    history = chat_tokenizer.encode_prompt("what is it?", chat=True)
    history += [*encode("it is 7"), chat_tokenizer.eos_id]
    history += chat_tokenizer.encode_message("are you sure?", chat=True, last_token_id=history[-1])
    conversation = [
        {"role": "user", "content": "what is it?"},
        {"role": "assistant", "content": "it is 7"},
        {"role": "user", "content": "are you sure?"},
    ]
    assert history == chat_tokenizer.encode_prompt(conversation, chat=True)


def test_truncated_turn_is_closed_before_the_message(chat_tokenizer):
    ended = chat_tokenizer.encode_message("go on", chat=True, last_token_id=chat_tokenizer.eos_id)
    cut = chat_tokenizer.encode_message("go on", chat=True, last_token_id=5)
    assert cut == [chat_tokenizer.eos_id, *ended]


def test_message_without_chat_template_is_plain_text(chat_tokenizer, tmp_path):
    assert chat_tokenizer.encode_message("=7", chat=False) == chat_tokenizer.encode("=7")
    make_tokenizer(tmp_path)
    with pytest.raises(base.UserError, match="no message can follow"):
        Tokenizer(tmp_path).encode_message("go on", chat=True)


def test_dialogue_knows_the_special_tokens(chat_tokenizer):
    assert {chat_tokenizer.eos_id, 0, 2} <= set(chat_tokenizer.special_ids)
    assert chat_tokenizer.encode("<|im_start|>")[0] in chat_tokenizer.special_ids
    assert chat_tokenizer.encode("7")[0] not in chat_tokenizer.special_ids


def test_rewards_of_random_dialogues_follow_the_truth_table():
    rng, pag = random.Random(0), Pag(max_attempts=3)
    for _ in range(200):
        turns, grades = [], {}
        while True:
            message = pag.respond(PROMPT, turns) if turns else Message("", "policy")
            if message is None:
                break
            is_answer = message.next_role == "policy"
            if is_answer:
                grades[len(turns)] = Score(float(rng.random() < 0.5))
            turns.append(TurnView(message.next_role, "7" if is_answer else rng.choice([OK, BAD, "hm"]), (1,), "stop"))
        assert [turn.role for turn in turns] == (["policy", "verifier"] * 3)[: len(turns)] and len(turns) % 2 == 0
        assert all(turn.text == BAD for turn in turns[1:-1:2])
        assert len(turns) == 6 or turns[-1].text in (OK, "hm")


def test_documented_environment_works():
    text = (Path(__file__).resolve().parents[3] / "docs" / "environments.md").read_text()
    sources = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    names = {}
    exec("\n".join(sources), names)
    assert inspect.iscoroutinefunction(names["Search"].respond)
    hint = names["Hint"](hint="units!")
    assert hint.respond(PROMPT, views("8")) == Message("units!") and hint.respond(PROMPT, views("it is 7")) is None
    assert hint.respond(PROMPT, views("8", "7")) is None
    assert [hint.graded_text(PROMPT, views("8", "7"), i) for i in range(2)] == [None, "7"]
    assert hint.outcome(PROMPT, views("8", "7"), {1: RIGHT}) == RIGHT


def test_special_tokens_are_never_hot(chat_tokenizer):
    fire = make_fire(FireConfig(temperature=30.0, top_k=4, banned_token_ids=[7]), chat_tokenizer)
    assert set(fire.banned_token_ids) == {7, *chat_tokenizer.special_ids}
    assert make_fire(FireConfig(), chat_tokenizer) is None


def test_verbatim_messages_continue_the_text_of_the_turn(chat_tokenizer):
    made = make_dialogue(Calculator(open_tag="(", close_tag=")", result="={}."), chat_tokenizer, chat=True)
    assert made.server_stops == ()
    assert made.encode_message(Message("=7.", verbatim=True), 5) == chat_tokenizer.encode("=7.")
    assert made.encode_message(Message("go on"), 5) == chat_tokenizer.encode_message("go on", chat=True)
