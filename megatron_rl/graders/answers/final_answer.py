r"""Locates the final answer of a response (boxes, ``####``, "the answer is", formulas) and detects hedging.

An answer counts only if the response commits to it. A sentence that lists alternatives, denies or doubts ("1 or 2",
"not 7", "maybe") is not an answer.

Invariant: every function takes time linear in the text, for any text.
"""

import re

MAX_ANSWER_CHARS = 1000
"""Maximum length of an anchored answer; a longer text is not an answer."""
_MAX_GAP_CHARS = 60
"""Maximum distance between two boxes or formulas of one answer."""

_THINK = re.compile(r"<(/?)think>")
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")
_ANSWER_PHRASE = re.compile(r"(?i)\banswer\s*(?:is|[:=])(?!n['\u2019]?t)[ \t:=*_]*")
_ANY_ANSWER = re.compile(
    r"(?i)\banswers?\s+(?:is|are|was|isn['\u2019]?t|cannot|can|could|may|might|would)\b|\banswer\s*[:=]"
)
_ANSWER_LINE = re.compile(r"(?i)[*_`]*answer[*_`]*[ \t]*:(.*)")
_SENTENCE_END = re.compile(r"\n|[.!?](?=[\s*\"]|$)")
_FORMULA = re.compile(
    r"""\$\$ (?P<a>[^$]{1,1000}?) \$\$ | \\\[ (?P<b>.{1,1000}?) \\\] | \\\( (?P<c>.{1,1000}?) \\\)
    | (?<![\\0-9]) \$ (?![0-9,. ]*[ ][A-Za-z]{2}) (?P<d>(?:[^$\\]|\\.){1,1000}?) \$ (?![0-9])""",
    re.VERBOSE | re.DOTALL,
)
_DELIMITERS = re.compile(r"\\[()\[\]]|\\(?:quad|qquad|text|textbf|mathrm|left|right)(?![A-Za-z])|[$\s*_{}~]|\\[,; ]")
_JOINS = re.compile(r"(?i)[,;&]|\b(?:and|or)\b")
_PARTS = re.compile(
    r"(?i)\b(?:no|not|wait|actually|instead|but|wrong|correction|correct|rather|then|so|thus|hence|therefore|gives)\b|[.!?:]\s|\n\s*\n"
)
_DOUBT = re.compile(
    r"""(?ix) \b(?: or | either | neither | nor | maybe | perhaps | possibly | might | may | could | unsure | uncertain
    | unknown | unclear | refuse | decline | cannot | can['\u2019]t | whether | doubt | unless | guess(?:es|ing)? ) \b"""
)
_DENIAL = re.compile(
    r"""(?ix) \b(?: not | never | between | about | approximately | roughly | around | almost | nearly | if | wrong | incorrect
    | impossible | except | anything\ but | other\ than | up\ to | at\ (?:least|most) | one\ of | some | any | no\ longer
    | least | most | (?:more|less|greater|fewer|larger|smaller|lower|higher)\ than | over | under | above | below | exceeds? )\b
    | n['\u2019]t\b | [<>\u2260\u2264\u2265\u2248~] | != | \\(?:neq?|leq?|geq?|lt|gt|leqslant|geqslant)(?![A-Za-z])"""
)
_HARMLESS = re.compile(
    r"""(?ix) \b(?:that|which|who)\s+(?:could|may|might|can)\s+(?!be\s*(?:[-$0-9\\]|$)) | \bthe\s+(?:most|least)\b
    | << [^<>]{0,80} >> | </?[a-z]{1,10}> | <\|[^<>]{0,30}\|> | [-=]>"""
)
"""Text without hedging although it matches: "the number of points that could be in the domain", calculator marks, tags,
arrows."""
_EXPLANATION = re.compile(
    r"(?i)[,;]?\s+\(?(?:because|since|as|which|where|given|due|for|that\s+is|so\s+that)\b|\s+\((?=[A-Za-z ]{8})"
)
_CONCLUSION = re.compile(r"(?i)\b(?:so|thus|hence|therefore)\b")
_SECOND_THOUGHT = re.compile(
    r"(?i)[\s.!?*]*(?:or|and|maybe|perhaps|no|not|nope|wait|actually|alternatively|but|however|hmm|unless|otherwise|either)\b"
)


def solution_of(response: str) -> str | None:
    """Text after the thought; None if the thought does not end."""
    last = None
    for match in _THINK.finditer(response):
        last = match
    if last is None:
        return response
    return response[last.end() :] if last.group(1) else None


# ----------------------------------------------------------------------------------------------------------- location


def _boxes(text: str) -> list[tuple[int, int, int]]:
    """(start of the command, start and end of the content) of all innermost closed boxes, in order."""
    if "\\boxed" not in text and "\\fbox" not in text:
        return []
    openings: list[tuple[int, int] | None] = []  # for each open brace: start of a box and of its content, or None
    boxes: list[tuple[int, int, int]] = []
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "{":
            openings.append(None)
        elif token.startswith(("\\boxed", "\\fbox")):
            openings.append((match.start(), match.end()))
        elif token == "}" and openings:
            opening = openings.pop()
            # A box that opens before the last closed one contains it, and only innermost boxes count.
            if opening is not None and (not boxes or opening[0] > boxes[-1][0]):
                boxes.append((*opening, match.start()))
    return boxes


def boxed_answer(text: str) -> str | None:
    r"""Content of the last closed ``\boxed{...}``; of the innermost box if boxes nest.

    Adjacent boxes, ``\boxed{1} and \boxed{2}``, are one answer, joined by semicolons.
    """
    boxes = _boxes(text)
    if not boxes:
        return None
    group = [boxes[-1]]
    for box in reversed(boxes[:-1]):
        if not _belong_together(text[box[2] + 1 : group[-1][0]]):
            break
        group.append(box)
    contents = dict.fromkeys(text[start:end].strip() for _, start, end in reversed(group))
    return "; ".join(contents)


def open_box(text: str) -> str:
    r"""Text after a ``\boxed{`` that is never closed; otherwise the whole text."""
    return text.rpartition("\\boxed{")[2] if "\\boxed{" in text and not _boxes(text) else text


def _belong_together(between: str) -> bool:
    """True if two boxes or formulas separated by ``between`` are parts of one answer."""
    if len(between) > _MAX_GAP_CHARS or _PARTS.search(between):
        return False
    rest = _DELIMITERS.sub(" ", between).strip()
    return not rest or bool(_JOINS.search(rest))


def hash_answer(text: str) -> str | None:
    """Text after the last ``####``, up to the end of its line (the GSM8K form); None without the marker."""
    start = text.rfind("####")
    return text[start + 4 :].strip().partition("\n")[0].strip() if start >= 0 else None


def answer_line(text: str) -> str | None:
    r"""Text after ``Answer:`` at the start of the last line, without emphasis and ``\boxed``; None if that line begins otherwise."""
    match = _ANSWER_LINE.fullmatch(text.rstrip().rpartition("\n")[2].strip())
    if match is None:
        return None
    answer = match[1].strip(" *_`")
    boxes = _boxes(answer)
    if len(boxes) == 1 and not _DELIMITERS.sub("", answer[: boxes[0][0]] + answer[boxes[0][2] + 1 :]).strip(" ."):
        return answer[boxes[0][1] : boxes[0][2]].strip()
    return answer


def phrase_answer(text: str) -> str | None:
    """Text after the last "answer is" or "answer:", up to the end of its sentence; "" if the sentence hedges or denies."""
    phrase = None
    for match in _ANSWER_PHRASE.finditer(text):
        phrase = match
    if phrase is None:
        return None
    tail = text[phrase.end() : phrase.end() + MAX_ANSWER_CHARS + 1].lstrip()
    end = _SENTENCE_END.search(tail)
    sentence = (tail[: end.start()] if end else tail).strip(" *_`")
    lead = text[max(0, phrase.start() - 200) : phrase.start()]
    lead = _CONCLUSION.split(_SENTENCE_END.split(lead)[-1])[-1]
    if (
        _DOUBT.search(lead)
        or _DENIAL.search(re.split("[,;:]", lead)[-1])
        or (end and _SECOND_THOUGHT.match(tail, end.end()))
    ):
        return ""
    return sentence


def strip_explanation(sentence: str) -> str:
    """The sentence up to "because" or a similar word."""
    match = _EXPLANATION.search(sentence)
    return sentence[: match.start()] if match else sentence


def hedged(text: str) -> bool:
    """True if ``text`` lists alternatives, denies or doubts."""
    text = _HARMLESS.sub(" ", text)
    return bool(_DOUBT.search(text) or _DENIAL.search(text))


def hedged_near(text: str, position: int) -> bool:
    """True if the sentence around ``position`` doubts, or its clause at ``position`` denies."""
    start = max(0, position - 400)
    before, after = text[start:position], text[position : position + 200]
    sentence = _SENTENCE_END.split(_HARMLESS.sub(" ", before))[-1]
    rest = _SENTENCE_END.split(after)[0]
    clause = re.split(r"[,;:=]", sentence)[-1]
    return bool(_DOUBT.search(sentence + rest) or _DENIAL.search(clause) or _DENIAL.search(re.split("[,;:=]", rest)[0]))


def last_formula(text: str) -> tuple[str, int, int] | None:
    r"""(content, start, end) of the last ``$...$``, ``\(...\)`` or ``\[...\]``, joined with earlier formulas of the same answer."""
    # Search only the end of the text, to bound the work of the pattern.
    offset = max(0, len(text) - 4 * MAX_ANSWER_CHARS)
    matches = [match for match in _FORMULA.finditer(text, offset)]
    if not matches:
        return None
    group = [matches[-1]]
    for match in reversed(matches[:-1]):
        if not _belong_together(text[match.end() : group[-1].start()]):
            break
        group.append(match)
    contents = ["".join(filter(None, match.groups())).strip() for match in reversed(group)]
    return "; ".join(contents), group[-1].start(), group[0].end()
