"""Verdicts: no wrong program scores 1 through the protocol, and right programs of many kinds do."""

import pytest

from megatron_rl.rewards.rules.code import CodeOptions, score
from tests.unit.graders.sandbox.forged_changes import FORGED_CHANGES
from tests.unit.graders.sandbox.forged_conditions import FORGED_CONDITIONS
from tests.unit.graders.sandbox.forged_forms import FORGED_FORMS
from tests.unit.graders.sandbox.forged_values import FORGED_VALUES
from tests.unit.graders.sandbox.forged_verdicts import FORGED_OUTPUTS, FORGERIES
from tests.unit.graders.sandbox.honest_tasks import HONEST_TASKS
from tests.unit.graders.sandbox.honest_uses import HONEST_USES

PATIENT = CodeOptions(time_limit_s=20.0, wall_limit_s=60.0)


def scored(code: str, tests: object, prompt_code: str = "") -> float | None:
    response = f"```python\n{code}\n```"
    entry_point = "f" if "def f" in prompt_code else ""
    result = score(response, tests=tests, prompt_code=prompt_code, entry_point=entry_point, options=PATIENT)
    assert result.detail or result.error or result.value == 1.0
    return result.value


@pytest.mark.parametrize("kind", FORGERIES)
def test_no_forgery_scores_one(kind: str) -> None:
    assert [row for row in FORGERIES[kind] if scored(*row) == 1.0] == []


@pytest.mark.parametrize("kind", [*FORGED_VALUES, *FORGED_CONDITIONS, *FORGED_FORMS, *FORGED_CHANGES])
def test_no_value_name_or_frame_of_a_wrong_program_scores_one(kind: str) -> None:
    rows = {**FORGED_VALUES, **FORGED_CONDITIONS, **FORGED_FORMS, **FORGED_CHANGES}[kind]
    assert [row for row in rows if _value(f"```python\n{row[0]}\n```", *row[1:]) == 1.0] == []


def _value(response: str, tests: object, prompt_code: str = "", entry_point: str = "", setup: str = "") -> float | None:
    result = score(response, tests=tests, prompt_code=prompt_code, entry_point=entry_point, setup=setup, options=PATIENT)
    assert result.detail or result.error or result.value == 1.0
    return result.value


def test_no_forged_output_scores_one() -> None:
    wrong = [row for row in FORGED_OUTPUTS if scored(row[0], {"inputs": [""], "outputs": [row[1]]}) == 1.0]
    assert wrong == []


@pytest.mark.parametrize(
    ("code", "tests", "expected"),
    [
        ("def f(a):\n    a[:] = [7]\n    return [7]", "a = [2, 1]\nassert f(a) == sorted(a)\nassert f([2]) == [2]", None),
        ("def f(x): return float('nan')", "assert not abs(f(2) - 4) > 1e-6\nassert f(1) == 1", None),
        ("def f(a):\n    a.sort()\n    a[0] = 0", "a = [3, 1]\nf(a)\nassert a == [1, 3]\nb = [0, 2]\nf(b)\nassert b == [0, 2]", 0.5),
        ("def f(x): return x * x if x < 3 else 0", "assert f(1) == 1\nassert f(2) == 4\nassert f(3) == 9\nassert f(4) == 16", 0.5),
    ],
)
def test_partial_credit_is_given_for_what_a_whole_verdict_would_believe(code: str, tests: str, expected: float | None) -> None:
    assert score(code, tests=tests, options=CodeOptions(partial_credit=True, time_limit_s=20.0, wall_limit_s=60.0)).value == expected


def test_honest_programs_score_one() -> None:
    results = {name: score(code, tests=tests, options=PATIENT) for name, (code, tests) in HONEST_TASKS.items()}
    assert {name: result for name, result in results.items() if result.value != 1.0} == {}


@pytest.mark.parametrize("kind", HONEST_USES)
def test_right_programs_score_one_in_whatever_way_they_use_python(kind: str) -> None:
    assert [row for row in HONEST_USES[kind] if _value(*row) != 1.0] == []


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("class C(dict):\n    def __getattr__(s, n): return s[n]\ndef f(d): return C(d)", "assert f({'a': 1}).a == 1"),
        ("class V:\n    def __eq__(s, o): return True", "assert V() == V()"),
        ("class V:\n    def __contains__(s, o): return True", "assert 3 in V()"),
        ("class V: pass\ndef f(x): return V()", "assert abs(f(2) - 4) < 1"),
        ("def f(p): return p.x", "class P:\n    x = 3\nassert f(P()) == 3"),
        ("def f(x): return 1", "import io\nassert f(1) == 1\nassert f(io.StringIO()) == 1"),
        ("class E(Exception):\n    code = 3\ndef f(): raise E", "try:\n    f()\nexcept E as e:\n    assert e.code == 3"),
        ("class V: pass", "assert isinstance(V(), V)"),
        ("class V: pass", "assert type(V()).__name__ == 'V'"),
        ("from collections import defaultdict\ndef f(): return defaultdict(lambda: 0)", "assert f()['z'] == 0"),
        ("import warnings\ndef f():\n    warnings.warn('x')\n    return 1", "import warnings\nwith warnings.catch_warnings(record=True) as w:\n    assert f() == 1\nassert len(w) == 1"),  # noqa: E501
        ("def f():\n    try: 1 / 0\n    except ZeroDivisionError as e: raise ValueError from e", "try:\n    f()\nexcept ValueError as e:\n    assert isinstance(e.__cause__, ZeroDivisionError)"),  # noqa: E501
        ("import os\ndef f(): return os.environ['A']", "import os\nos.environ['A'] = '1'\nassert f() == '1'"),
        ("def f(): return int(input())", "import builtins\nbuiltins.input = lambda *a: '3'\nassert f() == 3"),
        ("def f(x): return x * x", "import pytest\n@pytest.mark.skipif(f(2) == 4, reason='')\ndef test_a():\n    assert f(2) == 4"),
        ("def f(x): return x * x", "print(f(2))"),
        ("def f(x): return 'x'", "x = 4\nassert eval(f(2)) == 4"),
        ("import random\ndef f(x): return random.random()", "import random\nrandom.seed(3)\na = f(1)\nassert random.random() == 0.5442292252959519"),  # noqa: E501
        ("import queue\nq = queue.Queue()\ndef put(x): q.put(x)\ndef get(): return q.get()",
         "import threading\nt = threading.Thread(target=get)\nt.start()\nimport time; time.sleep(0.2)\nput(3)\nt.join()"),
    ],
)  # fmt: skip
def test_uses_that_only_the_program_could_decide_are_unscored(code: str, tests: str) -> None:
    result = score(code, tests=tests, options=CodeOptions(time_limit_s=1.0, wall_limit_s=30.0))
    assert result.value is None and result.error
