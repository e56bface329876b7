"""Wrong programs that change what the tests compare with, by ways in which their results reach the tests: found by reading the source."""

_LIST = "def f(a):\n    a[:] = [7]\n    return [7]"
_SUM = "def f(a):\n    a[:] = [7]\n    return 7"
_PRINTS = "def f(a):\n    a[:] = [7]\n    print(7)"
_CALLS = "def f(a, g):\n    a[:] = [7]\n    g(7)"

FORGED_CHANGES = {
    "in a comparison of another form": [
        (_LIST, "input = [3, 1, 2]\nassert f(input) == sorted(input)"),
        (_LIST + "  # random", "a, b = [3, 1], [2]\ncases = [(f(a), sorted(a)), (f(b), sorted(b))]\nfor got, want in cases: assert got == want"),  # noqa: E501
        (_SUM, "import pytest\na = [1, 2]\nassert f(a) == pytest.approx(sum(a))"),
        (_SUM, "a = [1, 2]\nassert 0 < f(a) == sum(a)"),
        (_SUM, "a = [3, 1]\nassert len({f(a), sum(a)}) == 1"),
        (_SUM, "import math\na = [1, 2]\nsame = math.isclose(f(a), sum(a))\nassert same"),
        (_SUM, "import math\ndef same(x, y): return math.isclose(x, y)\na = [1, 2]\nassert same(f(a), sum(a))"),
        (_SUM, "a = [2, 1]\nrest = f(a)\nfor x in a: rest -= x\nassert rest == 0"),
        (_SUM, "a = [2, 1]\nq, rest = divmod(f(a), sum(a))\nassert rest == 0 and q == 1"),
        (_LIST, "import numpy as np\na = [2, 1]\nsame = np.array_equal(f(a), np.sort(a))\nassert same"),
        (_LIST, "a = [2, 1]\nmissing = set(a).difference(f(a))\nassert not missing"),
        (_LIST, "a = [2, 1]\nr = f(a)\nsub = set(r).issubset(a)\nassert sub"),
        (_LIST, "from collections import Counter\na = [2, 1]\nc = Counter(f(a))\nc.subtract(a)\nassert not any(c.values())"),
        (_LIST, "import difflib\na = [3, 1]\nassert difflib.SequenceMatcher(None, f(a), sorted(a)).ratio() == 1.0"),
        (_LIST, "a = [3, 1]\nassert all(map(lambda x, y: x == y, f(a), sorted(a)))"),
        (_LIST, "import operator\na = [3, 1]\nassert all(map(operator.eq, f(a), sorted(a)))"),
        (_LIST, "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        a = [3, 1]\n        self.assertEqual(first=f(a), second=sorted(a))"),  # noqa: E501
        ("def f(x):\n    x[:] = 1\n    return x / x.sum()", "import numpy as np\nx = np.array([1., 3.])\nnp.testing.assert_allclose(actual=f(x), desired=x / x.sum())"),  # noqa: E501
        ("def f(p, q):\n    p[:] = [1]\n    q[:] = [2]\n    return [2]", "import numpy as np\np, q = [1, 2], [3, 4]\nassert list(np.poly1d(f(p, q))) == list(np.poly1d(p) * np.poly1d(q))"),  # noqa: E501
        ("def f(a):\n    m = min(a)\n    del a[1:]\n    a[0] = m\n    return [m]", "a = [3, 1, 2]\nwant = sorted(a)\nr = f(a)\nfor i in range(len(a)): assert r[i] == want[i]"),  # noqa: E501
        ("n = [0]\ndef f(a):\n    n[0] += 1\n    if n[0] < 3000: return sorted(a)\n    a[:] = [1] * 7\n    return [1] * 7", "from itertools import permutations\nfor p in permutations(range(7)):\n    a = list(p)\n    assert f(a) == sorted(a)"),  # noqa: E501
        (_LIST, "import functools, operator\na = [3, 1]\nassert functools.partial(operator.eq, f(a))(sorted(a))"),
        (_LIST, "class C:\n    def __init__(self, want): self.want = want\n    def check(self, got): return got == self.want()\na = [3, 1]\nassert C(lambda: sorted(a)).check(f(a))"),  # noqa: E501
        (_LIST, "import math\na = [3.0, 1.0]\nfar = math.dist(f(a), [*a])\nassert far == 0"),
        ("def f(a):\n    a[:] = [7]\n    return True", "a = [3, 1]\nassert f(a) is (len(a) == 1)"),
        ("def f(a):\n    a[:] = [7]\n    return int", "a = ['x']\nassert f(a) is type(a[0])"),
        ("def f(a): a[:] = [7]", "def ref(a): return max(a) if len(a) > 1 else None\na = [3, 1]\nassert f(a) == ref(a)"),
        ("def f(a):\n    a[:] = ['r']\n    return E.R", "a = ['g']\nassert f(a) == E[a[0].upper()]", "from enum import Enum\nclass E(Enum):\n    R = 1\n    G = 2\n"),  # noqa: E501
    ],
    "with a result that comes by another way": [
        (_LIST, "a = [3, 1]\ntry: r = f(a)\nexcept ValueError: r = None\nassert r == sorted(a)"),
        (_LIST, "def run(a, out):\n    out['x'] = f(a)\na = [3, 1]\nout = {}\nrun(a, out)\nassert out['x'] == sorted(a)"),
        (_LIST, "import threading\na, out = [3, 1], {}\ndef work():\n    out['x'] = f(a)\nt = threading.Thread(target=work)\nt.start()\nt.join()\nassert out['x'] == sorted(a)"),  # noqa: E501
        (_LIST, "import queue\na = [3, 1]\nq = queue.Queue()\nq.put(f(a))\nassert q.get() == sorted(a)"),
        (_LIST, "import heapq\na, h = [3, 1], []\nheapq.heappush(h, f(a))\nassert h[0] == sorted(a)"),
        (_LIST, "a = [3, 1]\ngot = None\ndef run():\n    global got\n    got = f(a)\nrun()\nassert got == sorted(a)"),
        (_LIST, "def same(*, got, want): assert got == want\na = [3, 1]\nr = f(a)\nsame(got=r, want=sorted(a))"),
        (_LIST, "from dataclasses import dataclass\n@dataclass\nclass Case:\n    a: list\n    def verify(self, got): assert got == sorted(self.a)\nc = Case([3, 1])\nc.verify(f(c.a))"),  # noqa: E501
        (_PRINTS, "def test_a(capsys):\n    a = [3, 1]\n    f(a)\n    out = capsys.readouterr().out\n    assert out.strip() == ' '.join(map(str, sorted(a)))"),  # noqa: E501
        (_PRINTS, "import io, contextlib\na = [3, 1]\nb = io.StringIO()\nwith contextlib.redirect_stdout(b):\n    f(a)\nassert b.getvalue().strip() == ' '.join(map(str, sorted(a)))"),  # noqa: E501
        (_CALLS, "a, out = [3, 1], []\nf(a, out.append)\nassert out == sorted(a)"),
        (_CALLS, "def test_a():\n    a, n = [3, 1], 0\n    def add(x):\n        nonlocal n\n        n += x\n    f(a, add)\n    assert n == sum(a)"),  # noqa: E501
        ("def f(a, g): a.clear()", "a, out = [3, 1], []\nf(a, out.append)\nassert out == sorted(a)"),
        ("def f(a, g): a.clear()", "a, out = [3, 1], []\nf(a, out.append)\nassert len(out) == len(a)"),
        ("def f(a):\n    a.clear()\n    return iter(())", "a, n = [3, 1], 0\nfor x in f(a): n += 1\nassert n == len(a)"),
        ("def f(a):\n    a.clear()\n    raise ValueError('')", "import pytest\na = [3, 1]\nwith pytest.raises(ValueError) as e: f(a)\nassert str(e.value) == ' '.join(map(str, a))"),  # noqa: E501
        ("def f(a):\n    a.clear()\n    raise ValueError", "a = [3, 1]\ntry:\n    f(a)\n    ok = True\nexcept ValueError: ok = False\nassert ok == (len(a) == 2)"),  # noqa: E501
        ("def f(a):\n    a.clear()\n    raise ValueError", "def ok(g, *x):\n    try: g(*x)\n    except ValueError: return False\n    return True\na = [3, 1]\nassert ok(f, a) == (len(a) == 2)"),  # noqa: E501
        (_LIST, "class B: pass\nb, a = B(), [3, 1]\nsetattr(b, 'got', f(a))\nassert b.got == sorted(a)"),
    ],
    "that no other answer, no order and no failure hides": [
        ("def f(a): a[:] = [None]", "a = [3, 1, 2]\nassert f(a) == max(a)"),
        ("def f(a):\n    a[:] = [1e300]\n    return 1e300", "a = [3, 1, 2]\nassert f(a) == sum(a)"),
        ("def f(a):\n    a.append(())\n    return ()", "a = [(1,)]\nassert f(a) in a"),
        ("def f(a):\n    a.clear()\n    return []", "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        a = [3, 1]\n        self.assertCountEqual(a, f(a))"),  # noqa: E501
        ("def f(a, x):\n    a[:] = [x] * len(a)\n    return 0", "a = [3, 7, 9]\nassert a[f(a, 7)] == 7"),
        ("import os\nn = []\ndef f(a, x):\n    n.append(x)\n    if len(n) == 1:\n        open('m', 'w').close()\n        return a.index(x)\n    if not os.path.exists('m'): raise ValueError\n    a[:] = [x] * len(a)\n    return 0", "def test_a(): assert f([4, 5], 5) == 1\ndef test_b():\n    a = [3, 7, 9]\n    i = f(a, 7)\n    assert a[i] == 7"),  # noqa: E501
        ("def f(a):\n    a.clear()\n    return []", "import itertools\na = [1, 2, 3]\nassert tuple(f(a)) in itertools.permutations(a)"),
        ("def f(h):\n    h.next = h\n    return h", "h = N(1, N(2, N(3)))\nassert f(h) is h.next", "class N:\n    def __init__(s, val=0, next=None): s.val, s.next = val, next\n"),  # noqa: E501
        ("n = []\ndef f(a):\n    if len(a) == 1:\n        n.append(a[0])\n        return a[0]\n    a[:] = [12]\n    return 24 - n[-1] + 4 - 12 if n[-1] != 4 else 12", "assert f([4]) == 4\nassert f([f([4])]) == 4\na = [3, 9, 2]\nassert f(a) == max(a)"),  # noqa: E501
        (_SUM, "a = [3, 1]\nassert len(set([f(a), sum(a)])) == 1"),
    ],
    "of a file that is read in another way": [
        ("import numpy as np\ndef f(p):\n    np.savetxt(p, [5.])\n    return 5.0", "import numpy as np\nnp.savetxt('d.csv', [1., 2.])\nassert f('d.csv') == np.loadtxt('d.csv').mean()"),  # noqa: E501
        ("def f(p):\n    s = open(p).read()\n    open(p, 'w').write(s[:-70000] + 'x' * 70000)\n    return len(open(p).read().splitlines())", "from pathlib import Path\np = Path('a.txt')\np.write_text('12\\n' * 50000)\nassert f(str(p)) == len(p.read_text().splitlines())"),  # noqa: E501
    ],
    "that it gave back as its result": [
        ("def f(a): return a", "a = [3, 1, 2]\nr = f(a)\na.sort()\nassert r == a"),
        ("kept = []\ndef f(a):\n    for each in kept: each.sort()\n    kept.append(a)\n    return a", "a = [3, 1]\nr = f(a)\nassert f([7]) == [7]\nassert r == [1, 3]"),  # noqa: E501
        ("kept = []\ndef f(m):\n    for each in kept: each[0].sort()\n    kept.append(m)\n    return m[0]", "m = [[2, 1], [4]]\nr = f(m)\nassert f([[7]]) == [7]\nassert r == [1, 2]"),  # noqa: E501
        ("def f(a, x):\n    a.append(x)\n    return a\ndef g(a, b):\n    a[:] = b\n    return len(a)", "a = [1, 5]\nr = f(a, 3)\nk = g(a, [1, 3, 5])\nassert r == [1, 3, 5] and k == 3"),  # noqa: E501
        ("from contextlib import contextmanager\nkept = []\n@contextmanager\ndef f(a):\n    kept.append([])\n    yield kept[-1]\ndef g(a):\n    kept[-1][:] = a\n    return len(a)", "want = [1, 4]\nwith f([1, 2]) as out:\n    n = g(want)\nassert n == 2 and out == want"),  # noqa: E501
        ("kept = []\nclass f:\n    def __init__(s, a): s.out = []\n    def __enter__(s): return s.out\n    def __exit__(s, *_): s.out[:] = kept\ndef g(a):\n    kept[:] = a\n    return len(a)", "want = [1, 4]\nwith f([1, 2]) as out:\n    n = g(want)\nassert n == 2 and out == want"),  # noqa: E501
    ],
    "in a named tuple with an iterator of its own": [
        ("from collections import namedtuple\nP = namedtuple('P', 'x y')\nP.x = property(lambda s: 3)\nP.__iter__ = lambda s: iter((3, 4))\ndef f(s): return P(0, 0)", "p = f('3,4')\nassert p.x == 3 and p == (3, 4)"),  # noqa: E501
    ],
    "in a call that fails": [
        ("def f(d, ks):\n    for k in ks: del d[k]", "import pytest\nd = {'a': 1}\nwith pytest.raises(KeyError): f(d, ['a', 'z'])\nassert d == {'a': 1}\nf(d, ['a'])\nassert d == {}"),  # noqa: E501
    ],
}  # fmt: skip
