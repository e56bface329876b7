"""The math reward: extraction of the final answer, and its comparison with the ground truth."""

import json
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.graders.answers.final_answer import boxed_answer
from megatron_rl.graders.answers.number_parsing import MAX_NUMBER_CHARS, last_number, parse_number
from megatron_rl.rewards.rules.math import score

GSM8K = Path(__file__).parents[4] / "../shared/data/gsm8k"

integers = st.integers(-(10**15), 10**15)


def value_of(text: str) -> Fraction | None:
    number = parse_number(text)
    return number.value if number else None


# ------------------------------------------------------------------------------------------------------ plain numbers


@given(integers)
def test_spellings_of_an_integer_read_alike(number: int) -> None:
    latex = f"{number:,}".replace(",", "{,}")
    amount = f"-${-number:,}" if number < 0 else f"${number:,}"
    spellings = [f"{number}", f"{number:,}", latex, amount, f"**{number}**", f"${number}$", f"x = {number}."]
    spellings += [f"{number} apples", f"{number}.00", f"{number}/1", f"\\({number:,}\\)", f"{number}\\text{{ cm}}"]
    assert [value_of(text) for text in spellings] == [number] * len(spellings)


@given(st.decimals(allow_nan=False, allow_infinity=False, places=6, min_value=-(10**9), max_value=10**9))
def test_decimals_read_exactly(number) -> None:
    assert value_of(f"{number:f}") == Fraction(number)
    assert value_of(f"{number:,f}") == Fraction(number)


@given(st.integers(-999, 999), st.integers(1, 999))
def test_fractions_read_exactly(top: int, bottom: int) -> None:
    sign = "-" if top < 0 else ""
    assert value_of(f"{top}/{bottom}") == Fraction(top, bottom)
    assert value_of(f"{sign}\\frac{{{abs(top)}}}{{{bottom}}}") == Fraction(top, bottom)


@given(integers, st.text("abcdefgh ,.:=\n(", max_size=300))
def test_last_number_is_found_after_any_words(number: int, words: str) -> None:
    found = last_number(f"{words} 17 {words} {number}")
    assert found is not None and found[0].value == number


@given(st.lists(st.integers(0, 999999), min_size=1, max_size=40))
def test_separator_splits_chains_in_any_grouping(numbers: list[int]) -> None:
    response = ",".join(map(str, numbers))
    assert score(response, str(numbers[-1]), extract="last_number", separator=",").value == 1.0
    assert score(response, str(numbers[-1]), separator=",").value == 1.0
    assert score(response, str(numbers[-1] + 1), separator=",").value == 0.0


@given(st.one_of(st.text(), st.text("0123456789,.$%/-+eE^{}\\frac \x00\ud800", max_size=400)))
def test_math_reward_parses_any_text(text: str) -> None:
    parse_number(text)
    last_number(text, ",")
    assert score(text, "12345678987654321").value == float("12345678987654321" in text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3 1/2", Fraction(7, 2)),
        ("-3\\frac{1}{2}", Fraction(-7, 2)),
        ("1.5e-3", Fraction(3, 2000)),
        ("3 \\times 10^{5}", Fraction(300000)),
        ("\u22125", Fraction(-5)),
        ("5 million dollars", Fraction(5_000_000)),
        ("90^\\circ", Fraction(90)),
        ("5 square metres", Fraction(5)),
        ("5x", None),
        ("5\\pi", None),
        ("5 or 7", None),
        ("1/0", None),
        ("1,2,3", None),
        ("10^5", None),
        ("\u0663", None),
        ("9" * (MAX_NUMBER_CHARS + 1), None),
        ("", None),
    ],
)
def test_text_is_one_number_or_none(text: str, expected: Fraction | None) -> None:
    assert value_of(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5-3", 3),
        ("5 - 3", 3),
        ("the sum is -3", -3),
        ("area 5 cm^2", 5),
        ("so 5 cm^{-2}.", 5),
        ("12/25/2020", 2020),
        ("about 1,234 of 5", 5),
        ("x_{12} = 7 and H2O", 7),
        ("12,345,6", 6),
    ],
)
def test_last_number_skips_other_text(text: str, expected: int) -> None:
    found = last_number(text)
    assert found is not None and found[0].value == expected


def test_a_percentage_equals_itself_its_count_and_its_share() -> None:
    assert [score("50%", truth, extract="exact").value for truth in ("50%", "50", "0.5", "1/2")] == [1.0] * 4
    assert score("50%", "5000%", extract="exact").value == 0.0
    assert score("0.5", "50%", extract="exact").value == 1.0


# --------------------------------------------------------------------------------------------------------- extraction


def test_122_134_is_one_number_unless_the_comma_separates() -> None:
    assert score("122,134", "134", extract="last_number", separator=",").value == 1.0
    assert score("122,134", "122134", extract="last_number", separator=",").value == 0.0
    assert score("122,134", "122134", extract="last_number").value == 1.0
    assert score("122,134", "134", extract="last_number").value == 0.0


@pytest.mark.parametrize(
    "response",
    [
        "42",
        "first 7, then \\boxed{42}, not 8",
        "\\boxed{41} no: \\boxed{ 42 }",
        "\\boxed{\\boxed{42}}",
        "reasons 1 2 3\n#### 42",
        "The answer is 42, because 40 + 3 - 1 works.",
        "The answer is: $42. That took 3 steps.",
        "**Final answer:** 6 * 7 = 42",
        "It costs 42 dollars.",
    ],
)
def test_auto_finds_the_final_answer(response: str) -> None:
    assert score(response, "42").value == 1.0
    assert score(response, "43").value == 0.0


def test_boxed_asks_for_a_box_and_exact_for_the_whole_response() -> None:
    assert score("42", "42", extract="boxed").value == 0.0
    assert score("\\boxed{42", "42", extract="boxed").value == 0.0
    assert score("so 42", "42", extract="exact").value == 0.0
    assert score(" 42.\n", "42", extract="exact").value == 1.0


def test_boxed_answer_keeps_nested_and_escaped_braces() -> None:
    assert boxed_answer("\\boxed{\\frac{1}{2}}") == "\\frac{1}{2}"
    assert boxed_answer("\\boxed{\\{1, 2\\}}") == "\\{1, 2\\}"
    assert boxed_answer("}} \\boxed{3} \\boxed{4") == "3"


def test_math_detail_contains_the_extracted_answer() -> None:
    assert score("The answer is 41.", "42").detail == "answer is: 41"
    assert "1,234" in score("that makes 1,234 in all", "5").detail


def test_empty_response_is_wrong_and_empty_ground_truth_unscored() -> None:
    assert score("", "42").value == 0.0
    assert score(" \n", "42").value == 0.0
    assert score("42", " ").value is None
    assert score("42", "x + 1", extract="last_number").value is None


# ------------------------------------------------------------------------------------------------------------ symbols


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("\\frac{\\sqrt{3}}{2}", "\\sqrt{3}/2", "\\sqrt{3}"),
        ("x^2 + 2x + 1", "(x+1)^2", "(x-1)^2"),
        ("2\\pi", "\\pi + \\pi", "\\pi"),
        ("\\{3, 4\\}", "4, 3", "3"),
        ("12", "3 \\cdot 4", "3 \\cdot 5"),
        ("Paris", "\\text{Paris}", "parsi"),
        ("B", "\\text{B}", "A"),
    ],
)
def test_symbolic_answers_compare_by_meaning(answer: str, right: str, wrong: str) -> None:
    assert score(f"Therefore \\boxed{{{right}}}.", answer).value == 1.0
    assert score(f"Therefore \\boxed{{{wrong}}}.", answer).value == 0.0


# ---------------------------------------------------------------------------------------------------------- hostility


@pytest.mark.parametrize(
    "response",
    [
        "\\boxed{" * 150_000,
        "\\boxed{1}" * 110_000,
        "{" * 1_000_000,
        "\\boxed{" + "{" * 500_000 + "}" * 500_000 + "}",
        "1,111" * 200_000,
        ",111" * 250_000,
        "9" * 1_000_000,
        "x2" * 500_000,
        "answer is " * 100_000,
        "#### " * 200_000,
        "1/" * 500_000,
        "\\frac{" * 160_000,
        "\x00" * 1_000_000,
        "9**9**9**9",
        "1e999 " * 1000,
    ],
    ids=lambda text: text[:12].replace("\x00", "NUL"),
)
@pytest.mark.parametrize("separator", ["", ","])
def test_pathological_responses_take_linear_time(response: str, separator: str) -> None:
    started_at = time.monotonic()
    result = score(response, "31337", separator=separator)
    assert result.value == 0.0 and len(result.detail) < 1000
    assert time.monotonic() - started_at < 20  # quadratic time would be hours


# -------------------------------------------------------------------------------------------------------------- gsm8k


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_gsm8k_solution_matches_only_its_own_answer(split: str) -> None:
    path = GSM8K / f"{split}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    misread = []
    for line in path.read_text().splitlines():
        solution = json.loads(line)["answer"]
        truth = solution.rpartition("####")[2].strip()
        other = f"{int(truth.replace(',', '')) + 1:,}"
        for extract in ("auto", "last_number"):
            values = (score(solution, truth, extract=extract).value, score(solution, other, extract=extract).value)
            if values != (1.0, 0.0):
                misread.append((solution, extract, values))
    assert misread == []


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [
        ("so\n#### 33", "33.3 % rounds down to 33%\n#### 33", 1.0),
        ("so\n#### 34", "33.3 % rounds down to 33%\n#### 33", 0.0),
        (r"thus \boxed{\frac{1}{2}}", r"We get \boxed{0.5}.", 1.0),
        ("she makes 18 dollars\n####", "#### 18", 0.0),
    ],
)
def test_ground_truth_may_be_a_whole_solution(response, answer, value):
    assert score(response, answer).value == value


@pytest.mark.parametrize("form", ["Answer: {}", "answer : {}.", "**Answer:** ${}$", "Answer: $\\boxed{{{}}}$", "*Answer*: \\({}\\)"])
def test_answer_line_reads_the_asked_form(form: str) -> None:
    response = f"First 41.\n{form.format(42)}\n"
    assert score(response, "42", extract="answer_line").value == 1.0
    assert score(response, "41", extract="answer_line").value == 0.0


@pytest.mark.parametrize(
    "response",
    ["so it is 42", "the answer is 42", "\\boxed{42}", "Answer: 42\nbut wait", "Hence Answer: 42", "Answer:", "Answer: 42 or 43"],
)
def test_answer_line_reads_no_other_form(response: str) -> None:
    assert score(response, "42", extract="answer_line").value == 0.0
