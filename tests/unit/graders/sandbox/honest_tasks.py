"""Right programs of many kinds, as responses with their tests: (response, tests). Every one must score 1."""

HONEST_TASKS: dict[str, tuple[str, object]] = {
    "tests ask from threads": (
        "def f(x): return x * x",
        (
            "import threading\ngot = []\nts = [threading.Thread(target=lambda i=i: got.append((i, f(i)))) for i in "
            "range(20)]\nfor t in ts: t.start()\nfor t in ts: t.join()\n"
            "assert sorted(got) == [(i, i * i) for i in range(20)]"
        ),
    ),
    "tests ask from a pool": (
        "def f(x): return x * x",
        (
            "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as pool:\n"
            "    assert list(pool.map(f, range(9))) == [i * i for i in range(9)]"
        ),
    ),
    "a bound method as argument": (
        "def f(g, x): return g(x)",
        "assert f(abs, -1) == 1\nassert f('a-b'.split, '-') == ['a', 'b']",
    ),
    "a method that records": ("def f(g):\n    for x in range(3): g(x)", "a = []\nf(a.append)\nassert a == [0, 1, 2]"),
    "an iterator as argument": (
        "def f(x): return sum(x)",
        "assert f([1]) == 1\nassert f(iter([1, 2])) == 3\nassert f(x for x in (4, 5)) == 9",
    ),
    "a partial as argument": (
        "def f(g): return g()",
        "from functools import partial\nassert f(int) == 0\nassert f(partial(max, 2, 3)) == 3",
    ),
    "an iterator of the program": (
        (
            "class Down:\n    def __init__(s, n): s.n = n\n    def __iter__(s): return s\n    def __next__(s):\n"
            "        if not s.n: raise StopIteration\n        s.n -= 1\n        return s.n"
        ),
        (
            "assert list(Down(3)) == [2, 1, 0]\nd = Down(1)\nassert next(d) == 0\ntry:\n    next(d)\n    assert False\n"
            "except StopIteration:\n    pass"
        ),
    ),
    "fileinput": (
        "import fileinput\nprint(sum(int(line) for line in fileinput.input()))",
        {"inputs": ["1\n2\n", "3\n"], "outputs": ["3", "3"]},
    ),
    "arguments of the script": ("import sys\nprint(len(sys.argv), input())", {"inputs": ["a"], "outputs": ["1 a"]}),
    "open(0)": (
        "f = open(0)\nprint(len(f.read().split()))\ng = lambda: f",
        {"inputs": ["1 2", "1", "1 2 3"], "outputs": ["2", "1", "3"]},
    ),
    "/dev/stdin": ("print(open('/dev/stdin').read().upper())", {"inputs": ["a"], "outputs": ["A"]}),
    "a thread with a large stack": (
        (
            "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 29)\n"
            "def go(n): return 0 if n == 0 else 1 + go(n - 1)\ndef main(): print(go(int(input())))\n"
            "t = threading.Thread(target=main)\nt.start()\nt.join()"
        ),
        {"inputs": ["50000"], "outputs": ["50000"]},
    ),
    "deep recursion through C": (
        (
            "import sys\nfrom functools import lru_cache\nsys.setrecursionlimit(10**6)\n@lru_cache(None)\n"
            "def f(n): return n if n < 1 else f(n - 1)"
        ),
        "assert f(20000) == 0",
    ),
    "many threads": (
        (
            "import threading\ndef f(n):\n    out = []\n    ts = [threading.Thread(target=out.append, args=(i,)) "
            "for i in range(n)]\n    for t in ts: t.start()\n    for t in ts: t.join()\n    return sorted(out)"
        ),
        "assert f(40) == list(range(40))",
    ),
    "a pool of threads": (
        (
            "from concurrent.futures import ThreadPoolExecutor\ndef f(xs):\n"
            "    with ThreadPoolExecutor(max_workers=12) as p:\n        return list(p.map(lambda x: x * x, xs))"
        ),
        "assert f([1, 2, 3]) == [1, 4, 9]",
    ),
    "a coroutine inside": (
        (
            "import asyncio\nasync def g(x):\n    await asyncio.sleep(0)\n    return x\n"
            "def f(x): return asyncio.run(g(x))"
        ),
        "assert f(3) == 3",
    ),
    "big integers": ("def f(n): return 7 ** n", "assert f(20000) == 7 ** 20000 and len(str(f(9000))) == 7606"),
    "backticks in a docstring": (
        '```python\ndef f(x):\n    """Square.\n\n    ```\n    f(2) == 4\n    ```\n    """\n    return x * x\n```',
        "assert f(2) == 4",
    ),
    "backticks at the margin of a docstring": (
        '```python\ndef f(x):\n    """Square.\n```\nf(2)\n```\n    """\n    return x * x\n```',
        "assert f(2) == 4",
    ),
    "tildes": ("So:\n~~~python\ndef f(x):\n    return x * x\n~~~\nDone.", "assert f(2) == 4"),
    "four backticks": ("````python\ndef f(x):\n    s = '''\n```\n'''\n    return x * x\n````\n", "assert f(2) == 4"),
    "attributes of a fence": ("``` {.python .numberLines}\ndef f(x): return x * x\n```", "assert f(2) == 4"),
    "a title of a fence": ('```python title="a.py"\ndef f(x): return x * x\n```\n```text\n4\n```', "assert f(2) == 4"),
    "the version of a fence": ("```Python3.11\ndef f(x): return x * x\n```\n```\n4\n```", "assert f(2) == 4"),
    "inline code before": ("```f``` is simple:\n```py\ndef f(x): return x * x\n```", "assert f(2) == 4"),
    "a helper in its own block": (
        "```python\ndef g(x): return x\n```\nthen\n```python\ndef f(x): return g(x) * x\n```",
        "assert f(2) == 4 and g(1) == 1",
    ),
    "length and text of an instance": (
        (
            "class Stack:\n    def __init__(s): s.a = []\n    def push(s, x): s.a.append(x)\n"
            "    def __len__(s): return len(s.a)\n    def __repr__(s): return f'Stack({s.a})'"
        ),
        "s = Stack()\ns.push(1)\nassert len(s) == 1 and str(s) == 'Stack([1])' and f'{s}' == 'Stack([1])'",
    ),
    "operators of an instance": (
        (
            "class V:\n    def __init__(s, x): s.x = x\n    def __add__(s, o): return V(s.x + o.x)\n"
            "    def __rmul__(s, n): return V(n * s.x)\n    def __neg__(s): return V(-s.x)\n"
            "    def __str__(s): return str(s.x)"
        ),
        "assert (V(1) + V(2)).x == 3 and str(3 * V(2)) == '6' and (-V(1)).x == -1",
    ),
    "items of an instance": (
        (
            "class M:\n    def __init__(s): s.d = {}\n    def __getitem__(s, k): return s.d[k]\n"
            "    def __setitem__(s, k, v): s.d[k] = v\n    def __delitem__(s, k): del s.d[k]\n"
            "    def __iter__(s): return iter(s.d)"
        ),
        (
            "m = M()\nm['a'] = 1\nassert m['a'] == 1 and list(m) == ['a']\ndel m['a']\ntry:\n    m['a']\n"
            "    assert False\nexcept KeyError:\n    pass"
        ),
    ),
    "a context": (
        (
            "class C:\n    log = []\n    def __enter__(s):\n        s.log.append('in')\n        return s\n"
            "    def __exit__(s, *a): s.log.append('out')"
        ),
        "with C() as c:\n    assert c.log == ['in']\nassert c.log == ['in', 'out']",
    ),
    "a list of its own": (
        "class L(list):\n    def last(s): return s[-1]",
        "a = L()\na.append(3)\nassert a.last() == 3 and len(a) == 1 and list(a) == [3]",
    ),
    "an exception of its own": (
        "class Poor(Exception): pass\ndef f(x):\n    if x > 1: raise Poor('too much')\n    return x",
        "assert f(1) == 1\ntry:\n    f(2)\n    assert False\nexcept Poor as e:\n    assert str(e) == 'too much'",
    ),
    "an exception of its own in a test case": (
        "class Poor(ValueError): pass\ndef f(x): raise Poor(x)",
        (
            "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n"
            "        with self.assertRaises(Poor): f(2)\n        with self.assertRaises(ValueError): f(2)"
        ),
    ),
    "fields of named tuples": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)",
        ("assert f().x == 1 and f() == (1, 2) and f()._asdict() == {'x': 1, 'y': 2} and repr(f()) == 'P(x=1, y=2)'"),
    ),
    "methods of named tuples": (
        (
            "from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\n    y: int = 2\n"
            "    def total(self): return self.x + self.y"
        ),
        "assert P(1).total() == 3 and P(1).y == 2 and P(1) == (1, 2)",
    ),
    "named tuples of the tests": (
        "def f(p): return p.x + p[1]",
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\nassert f(P(1, 2)) == 3",
    ),
    "methods of counters": (
        "from collections import Counter\ndef f(s): return Counter(s)",
        "assert f('aab').most_common(1) == [('a', 2)] and f('a') == {'a': 1}",
    ),
    "default dicts": (
        "def f(d):\n    d['a'].append(1)\n    return d['b']",
        "from collections import defaultdict\nd = defaultdict(list)\nassert f(d) == []",
    ),
    "enumerations": (
        "from enum import Enum, IntEnum\nclass C(Enum): A = 1\nclass I(IntEnum): B = 2\ndef f(): return I.B",
        "assert C.A.value == 1 and C.A.name == 'A' and f() == 2 and f().name == 'B'",
    ),
    "numbers with methods": (
        "class Deg(float):\n    def rad(s): return s / 2",
        "d = Deg(4.0)\nassert d.rad() == 2 and d + 1 == 5 and d > 3",
    ),
    "what the tests forgot to import": (
        "import math\ndef f(x): return math.sqrt(x)",
        "assert math.isclose(f(4), 2)\nassert Counter([f(1)]) == Counter([1.0])",
    ),
    "a class with a name of the library": (
        "class Counter:\n    def __init__(s): s.n = 0\n    def add(s): s.n += 1",
        "c = Counter()\nc.add()\nassert c.n == 1",
    ),
    "a function with a name of the library": (
        "def gcd(a, b): return a if not b else gcd(b, a % b)",
        "assert gcd(12, 18) == 6",
    ),
    "all of nothing beside other asserts": (
        "def f(n): return list(range(n))",
        "assert all(x >= 0 for x in f(0))\nassert f(2) == [0, 1]",
    ),
    "nests of tuples": (
        "def f(n):\n    a = ()\n    for _ in range(n): a = (a,)\n    return a",
        "a = f(100)\nfor _ in range(100): a = a[0]\nassert a == ()",
    ),
    "classes of the prompt's kind in a tree": (
        (
            "from dataclasses import dataclass\n@dataclass\nclass Node:\n    v: int\n    next: object = None\n"
            "def f(): return Node(1, Node(2))"
        ),
        "assert f().next.v == 2 and f().next.next is None",
    ),
    "an exception that the program handles": (
        "def f(x): return 1 / x\ndef h(g):\n    try: return g()\n    except ZeroDivisionError: return 7",
        "assert h(lambda: f(0)) == 7",
    ),
    "slices of an instance": (
        "class T:\n    def __getitem__(s, i): return [1, 2, 3][i]",
        "assert T()[1:] == [2, 3] and T()[::-1] == [3, 2, 1]",
    ),
    "closures": (
        "def f():\n    n = 0\n    def g():\n        nonlocal n\n        n += 1\n        return n\n    return g",
        "g = f()\nassert (g(), g()) == (1, 2)",
    ),
    "decorators": (
        "def f(g):\n    def h(*a): return g(*a) + 1\n    return h",
        "@f\ndef k(x): return x\nassert k(2) == 3",
    ),
    "generators that receive": (
        "def f():\n    x = yield 1\n    yield x",
        "g = f()\nassert next(g) == 1 and g.send(5) == 5",
    ),
    "small fractions": ("print(1.5e-10)", {"inputs": [""], "outputs": ["1.5000000001e-10"]}),
    "zero as a fraction": ("print(0.1 + 0.2 - 0.3)", {"inputs": [""], "outputs": ["0.0"]}),
}
