"""Comparison by meaning: equations, inequalities, intervals, lists, factorials, small and large values."""

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.rewards.rules import math
from megatron_rl.rewards.rules.math import prepare, score

quick = settings(max_examples=20, deadline=None)
small = st.integers(-9, 9)
nonzero = small.filter(bool)


@pytest.fixture(scope="module", autouse=True)
def warm_parser() -> None:
    prepare({})


def grade(answer: str, candidate: str) -> float | None:
    return score(f"Therefore \\boxed{{{candidate}}}.", answer).value


# ------------------------------------------------------------------------------------------- equations, inequalities


@quick
@given(nonzero, nonzero, small, nonzero)
def test_equation_equals_itself_scaled_or_swapped_but_not_its_constant(
    a: int, b: int, c: int, factor: int
) -> None:
    truth = f"{a}x + {b}y = {c}"
    assert grade(truth, f"{a * factor}x + {b * factor}y = {c * factor}") == 1.0
    assert grade(truth, f"{c} = {b}y + {a}x") == 1.0
    assert grade(truth, f"{a}x + {b}y - {c} = 0" if c >= 0 else f"{a}x + {b}y + {-c} = 0") == 1.0
    assert grade(truth, f"{a}x + {b}y = {c + 1}") == 0.0
    assert grade(truth, f"{a}x + {b + 10}y = {c}") == 0.0
    assert grade(truth, str(c)) == 0.0
    assert grade(str(c), truth) == 0.0


@quick
@given(nonzero, small, st.sampled_from(["<", ">", "\\le", "\\ge"]))
def test_an_inequality_keeps_its_direction_and_strictness(a: int, c: int, sign: str) -> None:
    turned = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
    looser = {"<": "\\le", ">": "\\ge", "\\le": "<", "\\ge": ">"}
    truth = f"x {sign} {c}"
    assert grade(truth, f"{a}x {sign if a > 0 else turned[sign]} {a * c}") == 1.0
    assert grade(truth, f"{c} {turned[sign]} x") == 1.0
    assert grade(truth, f"{a}x {turned[sign] if a > 0 else sign} {a * c}") == 0.0
    assert grade(truth, f"x {looser[sign]} {c}") == 0.0
    assert grade(truth, f"x = {c}") == grade(truth, str(c)) == grade(str(c), truth) == 0.0


@quick
@given(st.integers(-20, 20), st.integers(1, 9))
def test_name_before_a_number_is_not_an_equation(top: int, bottom: int) -> None:
    number = f"{top}/{bottom}"
    for name in ("x_1", "f(3)", "\\text{Area}", "AB"):
        assert grade(number, f"{name} = {number}") == 1.0
        assert grade(f"{name} = {number}", number) == 1.0
        assert grade(number, f"{name} \\ne {number}") == grade(number, f"{name} < {number}") == 0.0


@pytest.mark.parametrize(
    ("truth", "candidate", "value"),
    [
        ("x = 1", "y = 1", 0.0),
        ("y = 3x - 2", "3x - y = 2", 1.0),
        ("y = 3x - 2", "3x - 2", 1.0),
        ("y = 3x - 2", "-2", 0.0),
        ("(x-3)^2 + y^2 = 4", "x^2 - 6x + y^2 + 5 = 0", 1.0),
        ("(x-3)^2 + y^2 = 4", "(x+3)^2 + y^2 = 4", 0.0),
        ("xy = 6", "6", 0.0),
        ("8", "3 + 5 = 8", 1.0),
        ("8", "3 + 4 = 8", 0.0),
        ("8", "1 < 8", 0.0),
        ("x = 4", "3x = 12", 1.0),
        ("f(2) < f(1)", "f(1) > f(2)", 1.0),
        ("f(2) < f(1)", "f(1) < f(2)", 0.0),
    ],
)
def test_relations_compare_by_meaning(truth: str, candidate: str, value: float) -> None:
    assert grade(truth, candidate) == value


# -------------------------------------------------------------------------------------------- intervals, sets, points


@quick
@given(small, st.integers(1, 9), st.sampled_from("(["), st.sampled_from(")]"))
def test_an_interval_keeps_its_ends(low: int, length: int, left: str, right: str) -> None:
    high = low + length
    truth = f"{left}{low}, {high}{right}"
    signs = ("<" if left == "(" else "\\le", "<" if right == ")" else "\\le")
    assert grade(truth, f"x \\in {left}{2 * low}/2, {high}{right}") == 1.0
    assert grade(truth, f"{low} {signs[0]} x {signs[1]} {high}") == 1.0
    other_left, other_right = "(["[left == "("], ")]"[right == ")"]
    assert grade(truth, f"{other_left}{low}, {high}{right}") == 0.0
    assert grade(truth, f"{left}{low}, {high}{other_right}") == 0.0
    assert grade(truth, f"{left}{low}, {high + 1}{right}") == 0.0


@quick
@given(st.lists(st.fractions(-50, 50, max_denominator=9), min_size=2, max_size=6, unique=True), st.randoms())
def test_a_set_has_no_order_and_a_point_has(numbers: list[Fraction], random) -> None:
    shuffled = random.sample(numbers, len(numbers))
    texts, others = [", ".join(map(str, order)) for order in (numbers, shuffled)]
    assert grade(f"\\{{{texts}\\}}", f"\\{{{others}\\}}") == 1.0
    assert grade(f"\\{{{texts}\\}}", others) == 1.0
    assert grade(f"\\{{{texts}\\}}", ", ".join(map(str, numbers[:-1]))) == 0.0
    assert grade(f"({texts})", f"({others})") == float(numbers == shuffled)


def test_a_long_list_in_another_order_is_quick() -> None:
    pairs = [f"({n}, {n * n})" for n in range(60)]
    started_at = time.process_time()
    assert grade(", ".join(pairs), ", ".join(reversed(pairs))) == 1.0
    assert time.process_time() - started_at < 2.0


@pytest.mark.parametrize(
    ("truth", "candidate", "value"),
    [
        ("a=1, b=2", "b=2, a=1", 1.0),
        ("a=1, b=2", "1, 2", 1.0),
        ("a=1, b=2", "2, 1", 0.0),
        ("x=1, x=2", "2 or 1", 1.0),
        ("x > 3 or x < -3", "(-\\infty, -3) \\cup (3, \\infty)", 1.0),
        ("x > 3 or x < 5", "x > 3 and x < 5", 0.0),
        ("|x| < 2", "(-2, 2)", 1.0),
        ("(1, 3)", "(3, 1)", 0.0),
        ("(7, 2)", "(9, 5)", 0.0),
        ("5 \\pm 3", "2, 8", 1.0),
        ("\\pm 3", "3", 0.0),
        ("12,345", "(12, 345)", 0.0),
        ("\\begin{pmatrix} 1 & 2 \\end{pmatrix}", "\\begin{bmatrix} 1 & 2 \\end{bmatrix}", 1.0),
        ("\\begin{pmatrix} 1 & 2 \\end{pmatrix}", "\\begin{pmatrix} 2 & 1 \\end{pmatrix}", 0.0),
    ],
)
def test_groups_compare_by_their_items(truth: str, candidate: str, value: float) -> None:
    assert grade(truth, candidate) == value


# -------------------------------------------------------------------------------------------------------------- values


@quick
@given(st.integers(3, 12))
def test_a_factorial_is_its_product(number: int) -> None:
    product = 1
    for factor in range(2, number + 1):
        product *= factor
    assert grade(f"{number}!", str(product)) == grade(str(product), f"{number}!") == 1.0
    assert grade(f"{number}!", str(number)) == grade(str(number), f"{number}!") == 0.0


@quick
@given(st.integers(2, 9), st.integers(30, 400))
def test_small_values_are_compared_as_exactly_as_large_ones(base: int, exponent: int) -> None:
    assert grade(f"\\frac{{1}}{{{base}^{{{exponent}}}}}", f"{base}^{{-{exponent}}}") == 1.0
    assert grade(f"\\frac{{1}}{{{base}^{{{exponent}}}}}", f"\\frac{{1}}{{{base}^{{{exponent + 1}}}}}") == 0.0
    assert grade(f"\\frac{{1}}{{{base}^{{{exponent}}}}}", "0") == 0.0
    assert grade(f"\\frac{{\\sqrt{{{base}}}}}{{{base}^{{{exponent}}}}}", f"\\frac{{1}}{{{base}^{{{exponent}}}}}") == 0.0


@quick
@given(st.integers(1, 500), st.sampled_from([3, 7, 9, 11, 13, 37]))
def test_decimal_of_six_places_equals_a_value_without_finite_decimal(top: int, bottom: int) -> None:
    exact = Fraction(top, bottom)
    if exact.denominator == 1:
        return
    truth = f"\\frac{{{top}}}{{{bottom}}}"
    assert grade(truth, f"{float(exact):.9f}") == 1.0
    assert grade(truth, f"{float(exact) + 3e-9:.9f}") == 0.0
    assert grade(truth, f"{float(exact):.3f}") == 0.0
    assert grade(str(top), f"{top}.0000001") == 0.0


@pytest.mark.parametrize(
    ("truth", "candidate", "value"),
    [
        ("\\pi", "3.14159265", 1.0),
        ("\\pi", "3.14", 0.0),
        ("3.14", "\\pi", 0.0),
        ("2t", "2", 0.0),
        ("5m", "5", 0.0),
        ("5", "5\\text{ m}", 1.0),
        ("AB", "BA", 0.0),
        ("\\sqrt{12}", "2√3", 1.0),
        ("\\infty", "∞", 1.0),
        ("49", "7²", 1.0),
        ("3/4", "¾", 1.0),
        ("-6", "–6", 1.0),
        ("6", "6\u200b", 1.0),
        ("1/6", "0.1\\overline{6}", 1.0),
        ("2", "\\frac8{4}", 1.0),
        ("2/5", "\\cfrac{2}{5}", 1.0),
        ("14", "\\text{14 pears}", 1.0),
        ("101_2", "101_{2}", 1.0),
        ("101_2", "101", 0.0),
        ("101_2", "101_3", 0.0),
        ("\\frac{\\sqrt{3}}{2}", "\\sin 60^\\circ", 1.0),
        ("-1", "i^2", 1.0),
        ("|x|", "x", 0.0),
        ("(x+2)^2", "x^2+4x+4", 1.0),
        ("(x+2)^2", "x^2+4", 0.0),
        ("12:00", "1:00", 0.0),
        ("1,5", "1.5", 1.0),
        ("7", "\\text{not } 7", 0.0),
        ("7", "7 \\text{ is wrong}", 0.0),
        ("7", "7?", 0.0),
        ("7", "\\not= 7", 0.0),
        ("7", "\\approx 7", 1.0),
        ("7", "7, 7", 1.0),
        ("x_{1}=10^{\\frac{1+\\sqrt{3}}{6}},\\quadx_{2}=2", "10^{\\frac{\\sqrt{3}+1}{6}}, 2", 1.0),
    ],
)
def test_values_compare_equal_in_any_notation(truth: str, candidate: str, value: float) -> None:
    assert grade(truth, candidate) == value


TOO_LARGE = [
    "10^{10^{10}}",
    "9^{9^{9^9}}",
    "10^{-10^{12}}",
    "((((",
    "(" * 400 + "1" + ")" * 400,
    "\\Gamma(10^9)",
    "(10^8)!",
    "1000000!!",
    "\\binom{10^9}{12345678}",
    "\\sum_{k=1}^{10^9} k^2",
    "\\prod_{k=1}^{10^9} k",
    "(a+b+c+d+e+f)^{200}",
    "\\int_0^1 e^{x^{2}} \\sin(x^3) dx",
    "x^{" * 40 + "2" + "}" * 40,
    "+".join(f"x_{{{n}}}" for n in range(120)),
]


@pytest.mark.parametrize("monster", TOO_LARGE, ids=lambda text: text[:20])
def test_response_with_too_large_values_is_wrong_and_not_unscored(monster: str, monkeypatch) -> None:
    monkeypatch.setattr(math, "_CPU_LIMIT_S", 0.4)
    started_at = time.process_time()
    assert grade("5", monster) == 0.0
    assert time.process_time() - started_at < 2.0


@pytest.mark.parametrize("truth", ["???", "1/0", "\\frac{3}{0}", "((((", "10^{10^{10}}", "\\boxed{}", "$ $"])
def test_ground_truth_that_is_not_an_answer_is_unscored(truth: str) -> None:
    assert score("\\boxed{5}", truth).value is None


@pytest.mark.parametrize(
    ("truth", "candidate"),
    [
        ("5 m", "5 km"),
        ("5\\text{ m}", "5\\text{ km}"),
        ("45 degrees", "45 rad"),
        ("45^\\circ", "45\\text{ rad}"),
        ("100 km/h", "100 m/s"),
        ("100\\text{ km/h}", "100\\,\\mathrm{m/s}"),
        ("5\\text{ cm}^2", "5\\text{ cm}^3"),
        ("5 square meters", "5 square feet"),
        ("\\$5", "€5"),
        ("5 dollars", "5 cents"),
        ("3\\pi \\text{ cm}", "3\\pi \\text{ m}"),
        ("30 mph", "30 kg"),
        ("20^\\circ C", "20^\\circ F"),
        ("2 km", "2000 m^2"),
    ],
)
def test_equal_numbers_of_different_units_differ(truth: str, candidate: str) -> None:
    assert grade(truth, candidate) == grade(candidate, truth) == 0.0
    if "$" not in truth + candidate:
        assert score(f"The answer is {candidate}.", truth).value == 0.0


@pytest.mark.parametrize(
    ("truth", "candidate"),
    [
        ("5 km", "5000 m"),
        ("1 hour", "60 minutes"),
        ("5\\text{ m}", "5"),
        ("5", "5 km"),
        ("180 degrees", "\\pi \\text{ rad}"),
        ("36 km/h", "10 \\text{ m} \\text{ s}^{-1}"),
        ("5 apples", "5 pears"),
        ("0.5 dollars", "50 cents"),
        ("1 liter", "1000 cm^3"),
        ("2 m + 3 s", "3 s + 2 m"),
        ("5 feet 3 inches", "5 feet 3 inches"),
        ("5", "５"),
        ("10", "{5 \\choose 2}"),
        ("(10101)_2", "10101_2"),
        ("\\{x \\mid x > 3\\}", "(3, \\infty)"),
        ("(-2, 2)", "\\{x \\in \\mathbb{R} : |x| < 2\\}"),
    ],
)
def test_equal_measures_agree_in_any_unit_and_notation(truth: str, candidate: str) -> None:
    assert grade(truth, candidate) == 1.0


def test_units_are_compared_outside_of_boxes() -> None:
    assert score("so it is $5$ km.", "5 \\text{ m}").value == score("I walked 5 kilometers", "5 meters").value == 0.0
    assert score("the distance is 5000 m", "5 km").value == score("It took 5 hours.", "5").value == 1.0
