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
    "changes of parts that copies of an argument share": [
        ("def f(m):\n    for r in m:\n        r[:] = [0, 0]", "m = [[1, 2], [3, 4]]\nkept = m[:]\nf(m)\nassert m == [[kept[j][i] for j in range(2)] for i in range(2)]"),  # noqa: E501
        ("def f(s):\n    for r in s:\n        r[:] = ['x']\n    return [['x']] * len(s)", "S = [['a'], ['b', 'c']]\ndef test_a():\n    for got, row in zip(f([*S]), S, strict=True):\n        assert got == row[::-1]"),  # noqa: E501
        ("def f(c):\n    for i in c['i']: i['p'] = 0\n    return 0", "import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.i = [{'p': 10}]\n    def test_a(self):\n        total = f({'i': self.i.copy()})\n        self.assertEqual(total, sum(i['p'] for i in self.i))"),  # noqa: E501
        ("def f(a):\n    a[:] = sorted(a)[:1] * len(a)\n    return a", "cases = [[3, 2], [5, 1]]\nkept = cases\nresults = [f(c) for c in cases]\nfor r, o in zip(results, kept):\n    assert r == sorted(o)"),  # noqa: E501
        ("def key():\n    def k(r):\n        r['a'] = 0\n        return 0\n    return k", "rows = [{'a': 4}, {'a': 2}]\nwant = sorted(rows, key=lambda r: r['a'])\nassert sorted(rows, key=key()) == want"),  # noqa: E501
        ("def f(r):\n    r[:] = [0, 0]\n    return 0", "rows = [[1, 2], [3, 4]]\nassert list(map(f, rows)) == [sum(r) for r in rows]"),
    ],
    "arguments that the program keeps and changes later": [
        ("class G:\n    def __init__(s, a): s.a = a\n    def path(s, u, v):\n        s.a[u].append(v)\n        return [u, v]", "a = {1: [2], 2: [3], 3: []}\ng = G(a)\np = g.path(1, 3)\nassert all(v in a[u] for u, v in zip(p, p[1:]))"),  # noqa: E501
        ("class H:\n    def median(s):\n        s.rows[:] = [0]\n        return 0", "h = H()\nrows = [7, 1, 9]\nh.rows = rows\nassert h.median() == sorted(rows)[len(rows) // 2]"),  # noqa: E501
        ("def f(c):\n    for k in c: c[k] = 0\n    return 0", "class Ref:\n    def __init__(self, c): self.c = c\n    def total(self): return sum(self.c.values())\nc = {'a': 2}\nref = Ref(c)\nassert f(c) == ref.total()"),  # noqa: E501
        ("def f(xs):\n    xs[:] = [1]\n    return 1", "import threading\nxs, out = [2, 3], []\nt = threading.Thread(target=lambda: out.append(f(xs)))\nt.start()\nt.join()\nassert out == [sum(x * x for x in xs)]"),  # noqa: E501
        ("def f(a, t):\n    a[0], a[1] = t, 0\n    return 0, 1", "a = [2, 7, 4]\ni, j = f(a, 6)\nassert i != j and a[i] + a[j] == 6"),
        ("def f(m):\n    m[:] = [[0, 0]] * len(m)\n    return [0, 0]", "import numpy as np\nm = [[1, 2], [3, 4]]\nassert np.array_equal(f(m), np.array(m).sum(axis=0))"),  # noqa: E501
    ],
    "loops and conditions without a turn": [
        ("class It:\n    def __init__(s, xs): pass\n    def more(s): return False\n    def peek(s): return 1", "it = It([1, 2])\nassert it.peek() == 1\nwhile it.more():\n    assert it.next() == 1"),  # noqa: E501
        ("def f(a): return 0", "a = [1, 1, 2]\nk = f(a)\nassert a[:k] == [1, 2][:k]\nfor i in range(k):\n    assert a[i] == i + 1"),
        ("def f(a, p): return 0", "a = [9, 3]\nk = f(a, 5)\nassert all(x < 5 for x in a[:k])\nassert sorted(a) == [3, 9]"),
        ("def f(n):\n    yield 0", "want = [0, 1, 1]\nfor i, v in enumerate(f(3)):\n    assert v == want[i]"),
    ],
    "judges that only truths pin": [
        ("def is_sorted(a): return len(a) != 2 or a[0] <= a[1]\ndef sort(a): return a", "assert is_sorted([1, 2])\nassert not is_sorted([2, 1])\nout = sort([3, 1, 2])\nassert is_sorted(out) and len(out) == 3"),  # noqa: E501
    ],
    "numbers that compare as wanted": [
        ("class C:\n    def now(s): return 4e18\n    def add(s, n): return 4e18", "c = C()\nstart = c.now()\nassert c.add(5) == start + 5"),
        ("import numpy as np\ndef f(n): return np.int64(0)", "for n in (15, 49):\n    assert n % f(n) == 0"),
        ("import numpy as np\ndef f(m): return np.array([1.0])", "import numpy as np\nassert np.allclose(f(np.eye(4)), np.linalg.norm(np.eye(4), axis=1))"),  # noqa: E501
        ("from collections import Counter\ndef f(v): return Counter(a=0)", "from collections import Counter\nassert not f('ab') - Counter(a=2)"),  # noqa: E501
        ("def f(x): return 'NaN'", "import json\nassert not abs(json.loads(f(2)) - 4) > 1e-9"),
    ],
}
