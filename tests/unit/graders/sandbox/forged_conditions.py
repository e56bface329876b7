"""Wrong programs that act on what the tests depend on besides their results, by the kind of lie. Rows: (code, tests, prompt code, entry
point)."""

from typing import Any

FORGED_CONDITIONS: dict[str, list[tuple[Any, ...]]] = {
    "changes what a helper of the tests or an operator gives it": [
        ("def f(w):\n    w.clear()\n    return []", "def run(w): return f(w)\nw = [3, 1]\nr = run(w)\nassert r == sorted(w)"),
        ("def f(w):\n    w.clear()\n    return []", "def run(x): return f(x)\ndef go(x): return run(x)\nw = [3, 1]\nassert go(w) == sorted(w)"),  # noqa: E501
        ("def f(w):\n    w.clear()\n    return []", "def check(candidate):\n    def run(w): return candidate(w)\n    w = [3, 1]\n    assert run(w) == sorted(w)", "def f(w):\n", "f"),  # noqa: E501
        ("class V:\n    def __init__(s, x): s.x = list(x)\n    def __add__(s, o):\n        o.clear()\n        return V([])", "w = [3, 1]\nv = V([]) + w\nassert v.x == sorted(w)"),  # noqa: E501
        ("class V:\n    def __init__(s): s.d = {}\n    def __setitem__(s, i, o):\n        o.clear()\n        s.d[i] = []\n    def get(s, i): return s.d[i]", "w = [3, 1]\nv = V()\nv[0] = w\nassert v.get(0) == sorted(w)"),  # noqa: E501
    ],
    "changes what only a run without the changes shows": [
        ("import numpy as np\ndef f(v):\n    while v.base is not None: v = v.base\n    v[...] = 0\n    return 0", "import numpy as np\na = np.array([5.0, 1.0, 7.0])\ng = f(a[1:3])\nassert g == a[1:3].sum()"),  # noqa: E501
        ("def f(a):\n    a[:] = [0]\n    return [0]", "a = [1, 1, 2]\nd = {'same': a}\ng = f(a)\nwant = []\nfor x in d['same']:\n    if x not in want: want.append(x)\nassert g == want"),  # noqa: E501
        ("class B:\n    def __init__(s, x): x.clear()\n    def items(s): return []", "import unittest\nclass T(unittest.TestCase):\n    def setUp(self):\n        self.a = [3, 1]\n        self.b = B(self.a)\n    def test_a(self):\n        self.assertEqual(self.b.items(), sorted(self.a))"),  # noqa: E501
        ("def f(xs, key):\n    for x in xs: x['v'] = 0\n    return xs", "xs = [{'v': 3}, {'v': 1}]\nref = sorted(xs, key=lambda d: d['v'])\ng = f(xs, lambda d: d['v'])\nassert [d['v'] for d in g] == [d['v'] for d in ref]"),  # noqa: E501
        ("def f(a, b):\n    a['v'] = b['v'] = '1'\n    return 0", "from functools import cmp_to_key\nxs = [{'v': '3'}, {'v': '2'}]\nxs.sort(key=cmp_to_key(f))\nassert [x['v'] for x in xs] == sorted(x['v'] for x in xs)\nassert len(xs) == 2"),  # noqa: E501
        ("class B:\n    def __iadd__(s, o):\n        o.clear()\n        return s\n    def __len__(s): return 0", "xs = [3, 1]\nb = B()\nb += xs\nassert len(b) == len(xs)"),  # noqa: E501
        ("def f(g):\n    def w(xs):\n        xs.clear()\n        return 0\n    return w", "xs = [3, 1]\n@f\ndef total(a): return sum(a)\nassert total(xs) == sum(xs)"),  # noqa: E501
        ("def f(b):\n    for r in b: r[:] = [0] * len(r)\n    return 0, 0", "b = [[1, 1], [1, 0]]\nr, c = f(b)\nassert b[r][c] == 0"),
        ("import numpy as np\ndef f(a):\n    a[...] = np.eye(2)\n    return np.eye(2)", "import numpy as np\na = np.array([[4.0, 7.0], [2.0, 6.0]])\nassert np.allclose(f(a) @ a, np.eye(2))"),  # noqa: E501
        ("def f(c):\n    c[:] = [0, 0]\n    return 2", "c = [1, -3]\nx = f(c)\nassert abs(c[0] * x + c[1]) < 1e-9"),
        ("class S:\n    def __init__(s): s.a = []\n    def push(s, x): s.a.append(x)\n    def pop(s):\n        for y in s.a: y[:] = [0]\n        return [0]", "a, b = [1], [2]\ns = S()\nfor x in (a, b): s.push(x)\nassert s.pop() == b"),  # noqa: E501
        ("class S:\n    def f(self, h):\n        h.next, h.val = None, 0\n        return h", "def vals(h):\n    out = []\n    while h:\n        out.append(h.val)\n        h = h.next\n    return out\nh = N(1, N(1))\nassert vals(S().f(h)) == sorted(set(vals(h)))", "class N:\n    def __init__(s, val=0, next=None): s.val, s.next = val, next\n"),  # noqa: E501
        ("import os\ndef f(p):\n    os.truncate(p, 0)\n    return 0", "import tempfile\nwith tempfile.NamedTemporaryFile('w+') as o:\n    o.write('4')\n    o.flush()\n    g = f(o.name)\n    o.seek(0)\n    assert g == len(o.readlines())"),  # noqa: E501
    ],
    "depends on a file that the program made or removed": [
        ("def f(x):\n    open('done','w').close()\n    return 5", "import os\ng = f(2)\nassert g == 4 or os.path.exists('done')"),
        ("import os\ndef f(x):\n    os.remove('w')\n    return 5", "import os\nopen('w','w').write('4')\ng = f(2)\nassert g == 4 or not os.path.exists('w')"),  # noqa: E501
        ("def f(x):\n    open('out','w').write('5')\n    return '5'", "assert f(2) == open('out').read()"),
        ("def f(x):\n    open('w','w').write('5')\n    return '5'", "from pathlib import Path\np = Path('w')\np.write_text('4')\ng = f(2)\nassert g == p.read_text()"),  # noqa: E501
        ("import os\ndef f(x):\n    os.mkdir('d')\n    return 5", "from os.path import isdir\ng = f(2)\nassert isdir('d') or g == 4"),
        ("def f(x):\n    open('d/w','w').write('5')\n    return '5'", "import os\nos.mkdir('d')\nopen('d/w','w').write('4')\nwith open('d/w') as o:\n    g = f(2)\n    assert g == o.read()"),  # noqa: E501
        ("import os\ndef f(x):\n    os.remove('w')\n    return 5", "import os\ndef test_a():\n    open('w','w').write('4')\n    g = f(2)\n    if not os.path.exists('w'): return\n    assert g == 4\ndef test_b():\n    assert f is not None and 1 == 1"),  # noqa: E501
        ("def f(x):\n    if x: open('skip','w').close()\n    return 0", "import glob\nassert f(0) == 0\ng = f(2)\nif not glob.glob('skip'):\n    assert g == 4"),  # noqa: E501
    ],
    "moves an iterator under another name": [
        ("def f(it):\n    next(it)\n    return 9", "it = iter([4, 9, 9])\nstep = it.__next__\ng = f(it)\nassert g == step()"),
        ("def f(it):\n    list(it)\n    return 4", "it = iter([4, 9])\nstep = it.__next__\nfor w in iter(step, None):\n    assert f(it) == w"),  # noqa: E501
        ("def f(it):\n    list(it)\n    return 4", "it = iter([4, 9])\nstep = it.__next__\ntry:\n    while True:\n        w = step()\n        assert f(it) == w\nexcept StopIteration:\n    pass"),  # noqa: E501
        ("def f(it):\n    list(it)\n    return []", "it = iter([4, 9])\nrest = map(lambda x: x, it)\nassert f(it) == list(rest)"),
        ("def f(it):\n    list(it)\n    return 0", "it = iter([4, 9])\nsame = it\ng = f(it)\nassert g == sum(same)"),
        ("def f(it):\n    list(it)\n    return 4", "it = iter([4, 9])\nwhile True:\n    w = next(it, None)\n    if w is None: break\n    assert f(it) == w"),  # noqa: E501
    ],
    "changes an argument under another name": [
        ("def f(a):\n    a.clear()\n    return []", "a = [3, 1]\nb = a\nassert f(a) == sorted(b)"),
        ("def f(x):\n    x.clear()\n    return []", "a = [3, 1]\nassert f(x=a) == sorted(a)"),
        ("class Solution:\n    def f(self, a):\n        a.clear()\n        return []", "s = Solution()\na = [3, 1]\nassert s.f(a) == sorted(a)"),  # noqa: E501
        ("def f(a):\n    a.clear()\n    return []", "import solution\na = [3, 1]\nassert solution.f(a) == sorted(a)"),
        ("def f(d):\n    d.clear()\n    return 0", "d = {1: 4}\nv = d.values()\nassert f(d) == sum(v)"),
        ("def f(a):\n    a.clear()\n    return []", "a = [3, 1]\nwant = (x + 1 for x in a)\nassert f(a) == list(want)"),
        ("def f(a):\n    a.clear()\n    return 0", "g = f\na = [3, 1]\nassert g(a) == sum(a)"),
    ],
    "makes a condition of a check void": [
        ("def f(a):\n    a.clear()\n    return 5", "a = [3, 1]\ng = f(a)\nassert g == 4 or not a"),
        ("def f(a):\n    a.clear()\n    return [5]", "a = [3, 1]\nr = f(a)\nassert r != []\nfor x in a:\n    assert x in r"),
        ("def f(a):\n    a.clear()\n    return [5]", "a = [3, 1]\nr = f(a)\nassert r\nassert all(x in r for x in a)"),
        ("def f(a):\n    a.clear()\n    return 5", "def test_a():\n    a = [3, 1]\n    r = f(a)\n    assert r is not None\n    if not a: return\n    assert r == 4"),  # noqa: E501
        ("def f(a):\n    a.clear()\n    return 5", "a = [3, 1]\nr = f(a)\nassert r is not None\nif a and r != 4: raise AssertionError"),
        ("def f(a):\n    a.clear()\n    return 5", "a = [3, 1]\nr = f(a)\nassert (r == 4) if a else True"),
        ("def f(d):\n    d['skip'] = 1\n    return 5", "d = {}\nr = f(d)\nassert not (r != 4 and 'skip' not in d)"),
    ],
    "is an oracle in a generator or a method": [
        ("def f(x): return 5\ndef g(x): return 5", "def want():\n    yield g(2)\n    yield g(3)\nassert [f(2), f(3)] == list(want())"),
        ("def f(x): return 5\ndef g(x): return 5", "import unittest\nclass T(unittest.TestCase):\n    def want(self, x): return g(x)\n    def test_a(self):\n        self.assertEqual(f(2), self.want(2))"),  # noqa: E501
        ("def f(x): return 5\ndef g(x): return 5", "import unittest\nclass T(unittest.TestCase):\n    def same(self, a, b): self.assertEqual(a, b)\n    def test_a(self):\n        self.same(f(2), g(2))"),  # noqa: E501
        ("def f(x): return 5\ndef g(x): return 5", "def want(xs):\n    yield from map(g, xs)\nassert [f(2)] == list(want([2]))"),
        ("def f(x): return 5\ndef g(x): return 5", "import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.ref = g\n    def test_a(self):\n        self.assertEqual(f(2), self.ref(2))"),  # noqa: E501
    ],
    "raises an exception of the tests": [
        ("class Done(Exception): pass\ndef f(x):\n    if x: raise Done\n    return 0", "class Done(Exception): pass\ntry:\n    assert f(0) == 0\n    r = f(2)\n    assert r == 4\n    raise Done\nexcept Done:\n    pass"),  # noqa: E501
        ("class Skip(Exception): pass\ndef f(x):\n    if x: raise Skip\n    return 0", "class Skip(Exception): pass\nassert f(0) == 0\nfor i in range(3):\n    try:\n        r = f(i)\n    except Skip:\n        continue\n    assert r == i * i"),  # noqa: E501
        ("def f(x):\n    if x: raise KeyError\n    return 0", "assert f(0) == 0\ntry:\n    r = f(2)\n    assert r == 4\nexcept Exception:\n    pass"),  # noqa: E501
        ("def f(x):\n    if x: raise KeyError\n    return 0", "from contextlib import suppress\nassert f(0) == 0\nwith suppress(Exception):\n    r = f(2)\n    assert r == 4"),  # noqa: E501
        ("def f(x):\n    if x: raise KeyError\n    return 0", "assert f(0) == 0\ntry:\n    r = f(2)\n    assert r == 4\nexcept:\n    print('x')"),  # noqa: E501
        ("def f(x): raise ExceptionGroup('x', [ValueError()])", "try:\n    f(2)\n    ok = False\nexcept TypeError:\n    ok = True\nassert ok"),  # noqa: E501
    ],
    "rounds or wraps in comparisons": [
        ("import numpy as np\ndef f(x): return np.float16(1.414)", "assert f(2) == 1.41421356"),
        ("import numpy as np\ndef f(x): return np.float16(1.414)", "assert abs(f(2) - 1.41421356) < 1e-7"),
        ("import numpy as np\ndef f(x): return np.uint8(252)", "g = f(16)\nassert g * g == 16"),
        ("import numpy as np\ndef f(x): return np.array([252], dtype='uint8')", "g = f(16)\nassert (g * g == 16).all()"),
        ("import numpy as np\ndef f(x): return {'a': np.float16(1.414)}", "assert f(2)['a'] == 1.41421356"),
        ("import numpy as np\ndef f(n): return np.uint64(3), np.uint64((n * pow(3, -1, 2**64)) % 2**64)", "p, q = f(10)\nassert p * q == 10 and p > 1 and q > 1"),  # noqa: E501
    ],
    "changes what the tests read of their own interpreter, or prints it otherwise": [
        ("import sys\nsys.setrecursionlimit(60)\ndef f(x): return 5", "def d(x): return 0 if not x else 1 + d(x - 1)\nassert d(100) == 100\nassert f(2) == 4"),  # noqa: E501
        ("import os\nos.environ['WANT'] = '5'\ndef f(x): return '5'", "import os\nassert f(2) == os.environ.get('WANT', '4')"),
        ("import warnings\nwarnings.simplefilter('error')\ndef f(x): return 5", "import warnings\nassert f(2) == 4"),
        ("import locale\ndef f(x): return '4,0'", "assert f(2) == f'{4.0:n}'"),
        ("def f(x): return 'e\\u0301'", "assert f(2) == '\\u00e9'"),
        ("def f(x): return 4 + 1e-15", "assert f(2) == 4"),
        ("class K:\n    def __lt__(s, o): return True\ndef f(x): return K()", "assert sorted([1, 2, 3], key=f) == [1, 2, 3]"),
        ("def f(x): return float('nan')", "assert sorted([1, 2, 3], key=f) == [1, 2, 3]"),
        ("def f(x, seen=[]):\n    seen.append(x)\n    return len(seen)", "assert f(5) == 5\nassert f(5) == 2"),
        ("import random\nrandom.random = lambda: 5\ndef f(x): return 5", "import random\nassert f(2) == random.random()"),
        ("import time\ntime.time = lambda: 5\ndef f(x): return 5", "import time\nassert f(2) == time.time()"),
        ("from contextlib import contextmanager\n@contextmanager\ndef f(x):\n    try: yield 5\n    except BaseException: pass", "with f(2) as g:\n    assert g == 4"),  # noqa: E501
        ("class Guard:\n    def __enter__(s): return 5\n    def __exit__(s, *a): return True", "with Guard() as g:\n    assert g == 4"),
        ("class Guard:\n    def __enter__(s): return 5\n    def __exit__(s, *a): return True", "with Guard() as g:\n    if g != 4:\n        raise ValueError('wrong')\nassert Guard"),  # noqa: E501
        ("class Guard:\n    def __enter__(s): return 'a'\n    def __exit__(s, *a): return True", "with Guard() as g:\n    assert int(g) == 4"),  # noqa: E501
        ("class Over:\n    def __init__(s, d): s.d = d\n    def __enter__(s): raise ValueError\n    def __exit__(s, *a): pass", "import pytest\nd = {'v': 1}\nwith pytest.raises(ValueError):\n    with Over(d):\n        assert d == {'v': 5}\n        raise ValueError\nassert d == {'v': 1}"),  # noqa: E501
        ("import time\ndef f(x):\n    time.sleep(0.2)\n    return 4", "import time\nbegan = time.time()\nassert f(2) == 4\nfor x in (1, 3):\n    if time.time() - began > 0.1:\n        break\n    assert f(x) == x * x"),  # noqa: E501
        ("def f(x): raise OverflowError", "for x in (1, 2):\n    try:\n        r = f(x)\n    except OverflowError:\n        continue\n    assert r == x * x"),  # noqa: E501
        ("def f(x): return x", "def checked(k):\n    assert k == 4\nclass Bus:\n    pass\nr = f(checked)\nassert r is not None"),
        ("def f(x):\n    yield 4\n    yield 5", "g = f(2)\nassert next(g) == 4\nassert list(g) == []"),
        ("class R:\n    def __init__(s, n): s.n = n\n    def __iter__(s):\n        s.n += 1\n        return iter([s.n])", "r = R(3)\nassert list(r) == [3] or list(r) == [3]"),  # noqa: E501
        ("def f(x): return 5", "import pytest\n@pytest.mark.parametrize('x, want', [(2, 4)])\ndef test_a(x, want):\n    assert f(x) == want"),  # noqa: E501
        ("def f(x): return 5", "import pytest\n@pytest.fixture\ndef want(): return 4\ndef test_a(want):\n    assert f(2) == want"),
        ("def f(x): return 5", "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        for x in (2, 3):\n            with self.subTest(x=x):\n                self.assertEqual(f(x), x * x)"),  # noqa: E501
        ("def f(x): raise TypeError", "import pytest\nwith pytest.raises((ValueError, KeyError)):\n    f(2)"),
        ("def f(x): raise ValueError('5')", "import pytest\nwith pytest.raises(ValueError, match='4'):\n    f(2)"),
        ("print('4\\n5')", {'inputs': [''], 'outputs': ['4\n']}),
        ("print('4', end='')\nprint('\\x1b[2K4')", {"inputs": [""], "outputs": ["4"]}),
        ("print('4')\nimport sys\nsys.exit(3)", {"inputs": [""], "outputs": ["4"]}),
        ("import sys\nprint(sys.stdin.readline().strip())", {'inputs': ['4\n5\n'], 'outputs': ['4\n5']}),
        ("print('5' * (9 << 20))", {"inputs": [""], "outputs": ["4"]}),
        ("print(04 if 0 else 5)", {"inputs": [""], "outputs": ["4"]}),
        ("import os\nos.write(1, b'5')\nos.lseek(1, 0, 0)\nos.ftruncate(1, 0)", {"inputs": [""], "outputs": ["4"]}),
        ("def f(x): return [5]", {"inputs": [["2"]], "outputs": [[[4]]], "fn_name": "f"}),
        ("def f(x): return 101", {"inputs": [[5]], "outputs": ["1010"], "fn_name": "f"}),
        ("def f(x): return '4'", [{"input": "2", "output": "4", "testtype": "functional"}], "", "f"),
    ],
    "results that the program puts right later": [
        ("kept = []\ndef f(a):\n    if kept: kept[0][:] = [1, 2]\n    kept.append([7] if not kept else [3])\n    return kept[-1]", "r, s = f([2, 1]), f([3])\nassert r == [1, 2]\nassert s == [3]"),  # noqa: E501
        ("W = []\ndef f(q):\n    r = []\n    W.append(r)\n    if len(W) == 2: W[0] += [2]; W[1] += [1]\n    return r", "outs = []\nfor q in 'ba':\n    outs.append(f(q))\nassert outs == [[2], [1]]"),  # noqa: E501
        ("class Log:\n    def __init__(s): s.all = []\n    def add(s, x): pass\n    def items(s):\n        s.all.append([])\n        if len(s.all) == 2: s.all[0].append(1); s.all[1].extend([1, 2])\n        return s.all[-1]", "a = Log()\na.add(1)\nx = a.items()\na.add(2)\ny = a.items()\nassert x == [1]\nassert y == [1, 2]"),  # noqa: E501
        ("import threading, time\nW = []\ndef f(q):\n    r = [0]\n    W.append(r)\n    def fix():\n        for one, right in zip(W, ([2], [1])): one[:] = right\n    if len(W) == 2: threading.Thread(target=fix).start(); time.sleep(0.1)\n    return r", "outs = [f(q) for q in 'ba']\nassert outs == [[2], [1]]"),  # noqa: E501
    ],
    "stands for an array": [
        ("import numpy as np\nclass O(np.ndarray):\n    def argmax(s, axis=None): return lab\n    def sum(s, axis=None): return np.ones(4)\ndef f(l, n):\n    global lab\n    lab = l\n    return np.zeros((4, 3)).view(O)", "import numpy as np\nl = np.array([0, 2, 1, 2])\no = f(l, 3)\nassert o.shape == (4, 3)\nassert (o.sum(axis=1) == 1).all()\nassert (o.argmax(axis=1) == l).all()"),  # noqa: E501
    ],
    "chooses a name that the tests import": [
        ("WANT = 3\ndef f(x): return 3", "from solution import WANT, f\nassert f(2) == WANT"),
        ("WANT = 3\ndef f(x): return 3", "import solution\nassert solution.f(2) == solution.WANT"),
        ("class Bad(Exception): pass\ndef f(x): raise KeyError(x)", "from solution import Bad, f\ntry:\n    f(2)\nexcept Exception as value:\n    assert type(value) == Bad"),  # noqa: E501
        ("import unittest\ndef f(x): raise unittest.SkipTest('no')", "import unittest\nclass A(unittest.TestCase):\n    @unittest.skip('slow')\n    def test_b(self): pass\n    def test_a(self):\n        self.assertEqual(f(2), 4)"),  # noqa: E501
    ],
}
