"""A calculator that the model calls within its text: after ``<calc>2+3*4</calc>`` the environment inserts the result.

A call ends the turn. The result is appended to the same text, without a chat template, and the model continues. The
first turn without a call is the last, and the run's reward scores it. The dialogue is one episode.

Expressions consist of numbers, + - * / // % ** and parentheses. They are evaluated by this module, never executed, with
bounds on length, exponents and size, so that every call is fast. An invalid expression gives an error text as result.
"""

import ast
import math
import operator
import re
from collections.abc import Mapping, Sequence

from megatron_rl.data.trajectory import Prompt, Score
from megatron_rl.environments.base import Environment, Message, TurnView, register

_MAX_CHARACTERS = 200
MAX_DIGITS = 50
_SIGNIFICANT_DIGITS = 10
"""Digits of results that are not integers."""


class _CalculatorError(ValueError):
    """An expression without a result; the message is inserted into the model's text."""


@register("calculator")
class Calculator(Environment):
    def __init__(
        self,
        *,
        open_tag: str = "<calc>",
        close_tag: str = "</calc>",
        result: str = "<result>{}</result>",
        max_calls: int = 8,
    ) -> None:
        """
        Args:
            open_tag, close_tag: Delimiters of a call.
            result: Text inserted after a call; {} is replaced by the number or the error.
            max_calls: Calls per dialogue that get a result; one more call ends the dialogue.
        """
        if not open_tag or not close_tag:
            raise ValueError("open_tag and close_tag must not be empty")
        if result.count("{}") != 1:
            raise ValueError(f"result must contain {{}} exactly once, for the number, got {result!r}")
        if max_calls < 0:
            raise ValueError(f"max_calls must be at least 0, got {max_calls}")
        self.open_tag = open_tag
        self.result = result
        self.max_calls = max_calls
        self.stop_strings = (close_tag,)

    def respond(self, prompt: Prompt, turns: Sequence[TurnView]) -> Message | None:
        expression = self._call(turns[-1])
        if expression is None or len(turns) > self.max_calls:  # every turn before the last was a call
            return None
        return Message(self.result.replace("{}", answer(expression)), verbatim=True)

    def graded_text(self, prompt: Prompt, turns: Sequence[TurnView], index: int) -> str | None:
        """Text of the last turn: the first one without a call, or the call after ``max_calls`` results.

        None for any other call, even if the token budget ended the dialogue before the call's result.
        """
        return turns[index].text if self.respond(prompt, turns[: index + 1]) is None else None

    def turn_reward(
        self, prompt: Prompt, turns: Sequence[TurnView], index: int, grades: Mapping[int, Score]
    ) -> Score | None:
        return self.outcome(prompt, turns, grades) if index == len(turns) - 1 else None

    def outcome(self, prompt: Prompt, turns: Sequence[TurnView], grades: Mapping[int, Score]) -> Score:
        last = len(turns) - 1
        return grades[last] if last in grades else Score(0.0, "ended with a call, without an answer")

    def metrics(self, prompt: Prompt, turns: Sequence[TurnView], grades: Mapping[int, Score]) -> dict[str, float]:
        """``num_calls``, and ``failed_calls``: the fraction of calls whose result was an error."""
        calls = [call for turn in turns[: self.max_calls] if (call := self._call(turn)) is not None]
        values = {"num_calls": float(len(calls))}
        if calls:
            values["failed_calls"] = sum(answer(call).startswith("error") for call in calls) / len(calls)
        return values

    def _call(self, turn: TurnView) -> str | None:
        """The expression of a turn that ended with a call, else None."""
        # rpartition instead of removesuffix, because the last token may have characters after the closing tag.
        before, closed, _ = turn.text.rpartition(self.stop_strings[0])
        _, opened, expression = before.rpartition(self.open_tag)
        return expression if turn.finish_reason == "stop" and closed and opened else None


def answer(expression: str) -> str:
    """The result as text, or ``error: reason``."""
    try:
        return _format(evaluate(expression))
    except _CalculatorError as error:
        return f"error: {error}"


def evaluate(expression: str) -> int | float:
    """The value of an arithmetic expression; exact for integers. Raises _CalculatorError."""
    if len(expression) > _MAX_CHARACTERS:
        raise _CalculatorError(f"longer than {_MAX_CHARACTERS} characters")
    if not re.fullmatch(r"[0-9.+\-*/%() ]+", expression):
        raise _CalculatorError("only numbers, + - * / // % ** and parentheses")
    # Python rejects leading zeros of integers; here 07 means 7.
    source = re.sub(r"(?<![\d.])0+(?=\d)", "", expression).strip()
    try:
        tree = ast.parse(source, mode="eval")
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise _CalculatorError("not an expression") from error
    return _value(tree.body)


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return _bounded(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            try:
                return _bounded(_OPERATIONS[type(operation)](_value(left), _value(right)))
            except ZeroDivisionError:
                raise _CalculatorError("division by zero") from None
            except OverflowError:
                raise _CalculatorError("too large") from None
    raise _CalculatorError("not an expression")


def _divide(a: int | float, b: int | float) -> int | float:
    if isinstance(a, int) and isinstance(b, int) and a % b == 0:
        return a // b
    return a / b


def _power(base: int | float, exponent: int | float) -> int | float:
    # Checked before computing, because a huge integer power would take too long.
    if abs(exponent) > 1000 or (abs(base) > 1 and abs(exponent) * math.log10(abs(base)) > MAX_DIGITS):
        raise _CalculatorError("too large")
    return base**exponent


def _bounded(number: int | float | complex) -> int | float:
    if isinstance(number, complex) or number != number:  # only NaN differs from itself
        raise _CalculatorError("no real number")
    if abs(number) >= 10**MAX_DIGITS:
        raise _CalculatorError("too large")
    return number


_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}


def _format(number: int | float) -> str:
    if isinstance(number, float) and number.is_integer() and abs(number) < 10**15:
        number = int(number)
    return str(number) if isinstance(number, int) else f"{number:.{_SIGNIFICANT_DIGITS}g}"
