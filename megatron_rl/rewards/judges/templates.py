"""What judges read: one text for training them (`reward-train`) and for asking them during reinforcement learning.

A judge answers with one token right after the text: the yes word or the no word. Texts are filled in one pass, so that
braces in a prompt or in code stay as they are, and a response that contains "{second}" cannot pull another text in.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from megatron_rl.errors import UserError

YES_WORD, NO_WORD = "YES", "NO"

PAIRWISE_TEMPLATE = """Two responses to a prompt are to be compared.

[Prompt]
{prompt}

[First response]
{first}

[Second response]
{second}

Is the first response better than the second one? Answer YES or NO.
"""
"""Fields: prompt, first, second. YES: the first response is the better one."""

JUDGE_TEMPLATE = """A response to a prompt is to be judged against a reference.

[Prompt]
{prompt}

[Reference]
{reference}

[Response]
{response}

Is the response right, judged by the reference? Answer YES or NO.
"""
"""Fields: prompt, response, reference. YES: the response is as good as the reference."""

PAIRWISE_FIELDS = ("prompt", "first", "second")
JUDGE_FIELDS = ("prompt", "response", "reference")


class TemplateError(UserError, ValueError):
    """A template that lacks a field, or judgement words that are no single tokens."""


def render_pairwise(prompt: str, first: str, second: str, template: str = PAIRWISE_TEMPLATE) -> str:
    """The text whose next token says whether ``first`` is better than ``second``."""
    return fill(template, {"prompt": prompt, "first": first, "second": second})


def render_judge(prompt: str, response: str, reference: str, template: str = JUDGE_TEMPLATE) -> str:
    """The text whose next token says whether ``response`` is as good as ``reference``."""
    return fill(template, {"prompt": prompt, "response": response, "reference": reference})


def fill(template: str, values: Mapping[str, str]) -> str:
    """``{name}`` becomes values[name] for the names in ``values``; every other brace is ordinary text."""
    names = "|".join(map(re.escape, values))
    return re.sub(rf"\{{({names})\}}", lambda match: values[match[1]], template)


def check_template(template: str, fields: Sequence[str]) -> None:
    """Raise TemplateError for a template that leaves out one of ``fields``."""
    missing = [f"{{{name}}}" for name in fields if f"{{{name}}}" not in template]
    if missing:
        raise TemplateError(f"the judge's template lacks {', '.join(missing)}; it needs {{{'}, {'.join(fields)}}}")


def word_token(encode: Callable[[str], Sequence[int]], word: str) -> int:
    """The id of a judgement word that is one token; raises TemplateError naming the tokens otherwise."""
    ids = list(encode(word))
    if len(ids) != 1:
        raise TemplateError(
            f"the judgement word {word!r} is {len(ids)} tokens {ids} in this tokenizer; expected one token: choose "
            "another word, in training and for the judge alike"
        )
    return ids[0]
