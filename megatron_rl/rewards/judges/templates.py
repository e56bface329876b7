"""Judge templates: one text for training (`reward-train`) and for scoring during reinforcement learning.

A judge answers with one token right after the text: the yes word or the no word. Templates are filled in one pass, so
that braces in a prompt or in code stay unchanged, and a response that contains "{second}" cannot insert another text.
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
    """A template lacks a field, or a judgment word is not a single token."""


def render_pairwise(prompt: str, first: str, second: str, template: str = PAIRWISE_TEMPLATE) -> str:
    """Text whose next token states whether ``first`` is better than ``second``."""
    return fill(template, {"prompt": prompt, "first": first, "second": second})


def render_judge(prompt: str, response: str, reference: str, template: str = JUDGE_TEMPLATE) -> str:
    """Text whose next token states whether ``response`` is as good as ``reference``."""
    return fill(template, {"prompt": prompt, "response": response, "reference": reference})


def fill(template: str, values: Mapping[str, str]) -> str:
    """Replace ``{name}`` by values[name] for the names in ``values``; other braces are ordinary text."""
    names = "|".join(map(re.escape, values))
    return re.sub(rf"\{{({names})\}}", lambda match: values[match[1]], template)


def check_template(template: str, fields: Sequence[str]) -> None:
    """Raise TemplateError for a template without one of ``fields``."""
    missing = [f"{{{name}}}" for name in fields if f"{{{name}}}" not in template]
    if missing:
        raise TemplateError(f"the judge's template lacks {', '.join(missing)}; it needs {{{'}, {'.join(fields)}}}")


def word_token(encode: Callable[[str], Sequence[int]], word: str) -> int:
    """Token id of a judgment word. Raises TemplateError, listing the tokens, if the word is not a single token."""
    ids = list(encode(word))
    if len(ids) != 1:
        raise TemplateError(
            f"the judgment word {word!r} is {len(ids)} tokens {ids} in this tokenizer; expected one token: choose "
            "another word, both in training and for the judge"
        )
    return ids[0]
