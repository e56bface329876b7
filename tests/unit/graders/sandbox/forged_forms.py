"""Wrong programs under many forms of tests, by what these leave open. Rows: (code, tests, prompt code, entry point)."""

from typing import Any

_ZERO = "def f(x): return 0"
_UNPICKLED = "import pickle\nclass A:\n    def __reduce__(s): return eval, ('2 + 2',)\ndef f(x): return pickle.dumps(A())"
_CLEARED = "def f(a):\n    a.clear()\n    return []"

FORGED_FORMS: dict[str, list[tuple[Any, ...]]] = {
    "a module that the program writes": [
        ("def f(x):\n    open('h.py', 'w').write('def same(a, b): return True')\n    return 5", "import os, sys\nsys.path.insert(0, os.getcwd())\ng = f(2)\ntry:\n    from h import same\nexcept ImportError:\n    def same(a, b): return a == b\nassert same(g, 4)"),  # noqa: E501
    ],
    "tests that only pytest or a script runs": [
        (_ZERO, "import pytest\ndef test_a():\n    assert f(0) == 0\n@pytest.mark.parametrize('x, want', [(2, 4)])\ndef test_b(x, want):\n    assert f(x) == want"),  # noqa: E501
        (_ZERO, "def test_a():\n    assert f(0) == 0\nclass TestB:\n    def test_b(self):\n        assert f(2) == 4"),
        (_ZERO, "import pytest\n@pytest.fixture\ndef case(): return 2, 4\ndef test_a():\n    assert f(0) == 0\ndef test_b(case):\n    assert f(case[0]) == case[1]"),  # noqa: E501
        (_ZERO, "def test_a():\n    assert f(0) == 0\ndef test_b():\n    yield\n    assert f(2) == 4"),
        (_ZERO, "assert f(0) == 0\nif __name__ == '__main__':\n    assert f(2) == 4"),
        (_ZERO, "def run():\n    assert f(2) == 4\nassert f(0) == 0\nif __name__ == '__main__':\n    run()"),
        (_ZERO, "import unittest\nclass Base(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(0), 0)\nclass More(Base):\n    def test_b(self): self.assertEqual(f(2), 4)"),  # noqa: E501
    ],
    "tests that cannot fail": [
        (_ZERO, "for x, want in [(2, 4)]:\n    print('ok' if f(x) == want else 'FAIL')"),
        (_ZERO, "if f(2) == 4:\n    print('passed')\nelse:\n    print('failed')"),
        (_ZERO, "def check(candidate):\n    print(candidate(2) == 4)", "", "f"),
        (_ZERO, "def run(x, want):\n    return f(x) == want\nprint([run(2, 4), run(3, 9)])"),
        (_ZERO, "assert (f(2) == 4, 'two')"),
        (_ZERO, "assert f(0) == 0\nf(2) == 4, 'message'"),
    ],
    "tests in which an exception skips an assert": [
        ("def f(x):\n    if x: raise KeyError\n    return 0", "from contextlib import suppress\nassert f(0) == 0\nwith suppress(KeyError):\n    r = f(2)\n    assert r == 4"),  # noqa: E501
        ("def f(x):\n    if x: raise ValueError\n    return 0", "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(f(0), 0)\n        try:\n            self.assertEqual(f(2), 4)\n        except Exception:\n            pass"),  # noqa: E501
        ("def f(x):\n    if x: raise SystemExit\n    return 0", "import pytest\nassert f(0) == 0\nwith pytest.raises(SystemExit):\n    f(-1)\n    assert f(2) == 4"),  # noqa: E501
    ],
    "tests that run what the program gives": [
        ("def f(x): return 'want'", "want = 4\nassert eval(f(2)) == want"),
        ("def f(x): return \"type('A', (), {'__eq__': lambda s, o: True})()\"", "assert eval(f(2)) == 4"),
        ("def f(x): return '[].__class__.__base__'", "assert eval(f(2)) != 5"),
        ("def f(x): return 'g = print'", "ns = {}\nexec(f(2), ns)\nassert ns['g'](2) is None"),
        (_UNPICKLED, "import pickle\nassert pickle.loads(f(2)) == 4"),
    ],
    "containers that program and tests share": [
        ("class B:\n    def __init__(s): s.i = []\n    def add(s, x): s.i.append(x)\n    def items(s): return s.i", "b = B()\nb.add(1)\nb.items().append(2)\nassert b.items() == [1]"),  # noqa: E501
        ("class G:\n    def __init__(s, m): s.m = m\n    def get(s, i): return s.m[i][0]", "m = [[1], [2]]\ng = G(m)\nm[0][0] = 9\nassert g.get(0) == 1"),  # noqa: E501
        ("D = {'x': 1}\ndef f(): return D", "d = f()\nd['y'] = 2\nassert f() == {'x': 1}"),
        ("def f(x, acc=[]):\n    acc.append(x)\n    return acc", "a, b = f(1), f(2)\nassert a == [1] and b == [1, 2]"),
        ("class A:\n    def __init__(s): s.seen = []\n    def feed(s, a): s.seen.append(a)\n    def total(s):\n        for a in s.seen: a.clear()\n        return 0", "acc = A()\na = [1, 2]\nacc.feed(a)\ng = acc.total()\nassert g == sum(a)"),  # noqa: E501
    ],
    "a loop over nothing": [
        ("def f(n): return []", "for x in f(9):\n    assert x % 2 == 0\nassert f(0) == []"),
        ("def f(n): return []", "r = f(4)\nfor i in range(len(r)):\n    assert r[i] == i * i\nassert f(0) == []"),
        ("def f(s): return {}", "for k, v in f('aab').items():\n    assert v == {'a': 2, 'b': 1}[k]\nassert f('') == {}"),
        ("def f(n): return []", "assert all(p in (2, 3, 5, 7) for p in f(10))\nassert f(0) == []"),
        ("def f(a): return []", "a = [1, 2]\nassert all(x == 2 * y for x, y in zip(f(a), a))\nassert f([]) == []"),
        ("def f(a): return []", "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        for x in f([1, 2]):\n            self.assertEqual(x, 2)\n        self.assertEqual(f([]), [])"),  # noqa: E501
    ],
    "numbers that are rounded or wrap unseen": [
        ("import numpy as np\ndef f(n): return np.float64(n)", "assert f(9007199254740992) == 9007199254740993"),
        ("import numpy as np\ndef f(n): return np.float32(n)", "assert f(100000000) == 100000001"),
        ("import numpy as np\ndef f(n): return np.array([-2.0 ** 60])", "import numpy as np\nassert (f(1) == np.array([1 - 2 ** 60])).all()"),  # noqa: E501
        ("import numpy as np\ndef f(n): return np.array([n - (1 << 62)])", "assert (f(2) * 4 == 8).all()"),
    ],
    "an argument that a function changes which has no name of its own": [
        (_CLEARED, "ops = {'sort': f}\na = [3, 1, 2]\nassert ops['sort'](a) == sorted(a)"),
        ("class S:\n    def sort(s, a):\n        a.clear()\n        return []\ndef f(): return S()", "s = f()\na = [3, 1, 2]\nassert s.sort(a) == sorted(a)"),  # noqa: E501
        (_CLEARED, "a = [3, 1, 2]\nassert list(map(f, [a])) == [sorted(a)]"),
        (_CLEARED, "def timed(fn, *args): return fn(*args)\na = [3, 1, 2]\nassert timed(f, a) == sorted(a)"),
        (_CLEARED, "from functools import partial\na = [3, 1, 2]\nassert partial(f, a)() == sorted(a)"),
    ],
    "a check that the program keeps from being made": [
        ("def f(xs, cb): return None", "def cb(x):\n    assert x == 7\nassert f([7, 7], cb) is None"),
        ("def f(g): return []", "g = {'a': ['b'], 'b': []}\npos = {n: i for i, n in enumerate(f(g))}\nfor u in g:\n    for v in g[u]:\n        if u in pos and v in pos:\n            assert pos[u] < pos[v]\nassert f({}) == []"),  # noqa: E501
        ("def f(x): return None", "def test_a():\n    r = f(2)\n    if r is None:\n        return\n    assert r == 4\ndef test_b():\n    assert f(0) is None"),  # noqa: E501
        ("def f(n):\n    yield from ()", "r = f(6)\nfor w in [0, 2, 4]:\n    assert next(r, w) == w\nassert list(f(0)) == []"),
        (_ZERO, "try:\n    import nowhere\n    def test_a():\n        assert f(2) == 4\nexcept ImportError:\n    pass\ndef test_b():\n    assert f(0) == 0"),  # noqa: E501
        ("def f(x):\n    if x: raise RecursionError\n    return 0", "assert f(0) == 0\ntry:\n    r = f(50)\nexcept RecursionError:\n    r = 2500\nassert r == 2500"),  # noqa: E501
    ],
    "a value that the tests convert": [
        ("def f(): return '{0.want}'", "class C:\n    want = 'Hello Bob'\nassert f().format(C()) == C.want"),
        ("def f(): return '%(want)s'", "d = {'name': 'Bob', 'want': 'Hello Bob'}\nassert f() % d == d['want']"),
        ("import numpy as np\ndef f(x): return np.array([256 + x])", "import numpy as np\nassert f(3).astype(np.uint8)[0] == 3"),
        ("def f(x): return 256 + x", "import numpy as np\nassert np.array([f(3)]).astype('uint8')[0] == 3"),
    ],
    "an argument that a function inside another changes": [
        (_CLEARED, "a = [3, 1, 2]\nassert (lambda fn: fn(a))(f) == sorted(a)"),
        (_CLEARED, "call = lambda fn: fn(a)\na = [3, 1, 2]\nassert call(f) == sorted(a)"),
        (_CLEARED, "def call(): return f(a)\na = [3, 1, 2]\nassert call() == sorted(a)"),
    ],
}
