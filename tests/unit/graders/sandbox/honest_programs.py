"""Programs and tests that must pass: supported and unsupported uses of a program that runs in another process."""

HONEST = {
    "arguments change in place": (
        "def f(a):\n    a.sort()\n    a[0].append(9)",
        "a = [[3], [1]]; b = a[1]\nf(a)\nassert a == [[1, 9], [3]]",
    ),
    "keyword arguments change in place": (
        "def f(a, *, into):\n    into.update(a)",
        "d = {}\nf({'x': (1, 2)}, into=d)\nassert d == {'x': (1, 2)}",
    ),
    "other names see the change": ("def f(a):\n    a[0].append(9)", "b = [1]; a = [b]\nf(a)\nassert b == [1, 9]"),
    "a function of the tests is called back": (
        "def f(g, xs):\n    return [g(x) for x in xs]",
        "y = 3\nassert f(lambda x: x + y, [1, 2]) == [4, 5]",
    ),
    "a function of the tests calls the program": (
        "def f(g, x):\n    return g(x)\ndef h(x): return x + 1",
        "assert f(lambda x: h(x) * 2, 1) == 4",
    ),
    "a function of the tests raises": (
        "def f(g):\n    try:\n        return g()\n    except ZeroDivisionError:\n        return 7",
        "assert f(lambda: 1 / 0) == 7",
    ),
    "built-in functions are the program's own": (
        "def f(g):\n    return g(-3)",
        "assert f(abs) == 3 and f(str) == '-3'",
    ),
    "library functions too": ("def f(g):\n    return g(4)", "import math\nassert f(math.sqrt) == 2"),
    "generators": ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2]\nassert sum(f(4)) == 6"),
    "endless iterators": (
        "import itertools\ndef f(): return itertools.count()",
        "g = f()\nassert [next(g), next(g)] == [0, 1]",
    ),
    "views": ("def f(): return {1: 'a'}.items()", "assert list(f()) == [(1, 'a')]"),
    "objects": (
        "class S:\n    def __init__(self): self.a = []\n    def push(self, x): self.a.append(x); return self",
        "s = S()\ns.push(1).push(2)\nassert s.a == [1, 2]\ns.a = 5\nassert s.a == 5",
    ),
    "subclasses of plain types": (
        "class L(str): pass\nclass I(int):\n    def __eq__(self, other): return False\n    __hash__ = int.__hash__\n"
        "def f(): return L('a'), I(3)",
        "assert f() == ('a', 3) and f()[0] + 'b' == 'ab'",
    ),
    "named tuples": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)",
        "assert f() == (1, 2)\nx, y = f()\nassert x == 1",
    ),
    "data classes": (
        "from dataclasses import dataclass\n@dataclass\nclass D:\n    x: int = 1",
        "assert D().x == 1 and D(2).x == 2",
    ),
    "counters": (
        "from collections import Counter, defaultdict, deque\ndef f(): return Counter('aab'), defaultdict(int, x=1), deque([1])",
        "from collections import deque\nassert f() == ({'a': 2, 'b': 1}, {'x': 1}, deque([1]))",
    ),
    "exceptions": (
        "def f(x):\n    raise ValueError('no ' + str(x))",
        "try:\n    f(1)\nexcept ValueError as e:\n    assert str(e) == 'no 1'\nelse:\n    raise AssertionError",
    ),
    "bases of exceptions": (
        "class E(KeyError): pass\ndef f(): raise E('k')",
        "try:\n    f()\nexcept KeyError:\n    pass\nelse:\n    raise AssertionError",
    ),
    "plain values": (
        "def f(): return 10**400, 2.5, float('inf'), 1j, b'x', '\\ud800', None, True, frozenset([1]), range(3), {1, 2}",
        "assert f() == (10**400, 2.5, float('inf'), 1j, b'x', '\\ud800', None, True, frozenset([1]), range(3), {1, 2})\n"
        "assert type(f()[7]) is bool and f()[5] != 'x'",
    ),
    "exact numbers": (
        "from decimal import Decimal\nfrom fractions import Fraction\ndef f(): return Decimal('0.1'), Fraction(1, 3)",
        "from fractions import Fraction\nassert f()[1] == Fraction(1, 3) and str(f()[0]) == '0.1'",
    ),
    "dates": (
        "import datetime\ndef f(d): return d + datetime.timedelta(days=1)",
        "import datetime\nassert f(datetime.date(2024, 2, 28)) == datetime.date(2024, 2, 29)",
    ),
    "constants": ("LIMIT = 7", "assert LIMIT == 7 and LIMIT + 1 == 8 and 6 < LIMIT"),
    "test functions": (
        "def f(x): return x * x",
        "def test_a():\n    assert f(2) == 4\ndef test_b():\n    assert f(3) == 9",
    ),
    "test cases": (
        "def f(x): return x * x",
        "import unittest\nclass TestF(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(f(2), 4)",
    ),
    "the program as a module": ("def f(x): return x * x", "from solution import f\nassert f(2) == 4"),
    "a comparison without assert": ("def f(x): return x * x", "f(2) == 4"),
    "the candidate": ("def f(x): return x * x", "assert candidate(2) == 4"),
    "chance": ("import random\nx = random.random()\ndef f(): return x", "import random\nassert f() == random.random()"),
    "a main program is not run": ("def f(): return 1\nif __name__ == '__main__': f = None", "assert f() == 1"),
    "files of the tests": (
        "def f(path):\n    with open(path) as file:\n        return file.read()",
        "with open('x', 'w') as file:\n    file.write('a')\nassert f('x') == 'a'",
    ),
    "numpy": (
        "import numpy as np\ndef f(a): return np.array(a) * 2, np.float64(0.5), np.int64(3)",
        "import numpy as np\na, b, c = f([1, 2])\nassert (a == [2, 4]).all() and b == 0.5 and c == 3\n"
        "assert np.allclose(f(np.ones(2))[0], 2)",
    ),
}  # fmt: skip
"""Maps the required feature to (program, tests)."""

NODES = """class Node:
    def __init__(self, value, next=None): self.value, self.next = value, next
def build(xs):
    node = None
    for x in reversed(xs): node = Node(x, node)
    return node
def values(node):
    out = []
    while node: out.append(node.value); node = node.next
    return out
"""
"""A prompt with a class of its own."""

OPERATED = {
    "equality": ("class V:\n    def __eq__(s, o): return True", "assert V() == V()"),
    "order": ("class V:\n    def __lt__(s, o): return True", "assert sorted([V(), V()])"),
    "arithmetic that gives a number": ("class V:\n    def __sub__(s, o): return 0", "assert abs(V() - 4) < 1e-6"),
    "truth": ("class V:\n    def __bool__(s): return True", "assert V()"),
    "membership": ("class V:\n    def __contains__(s, o): return True", "assert 3 in V()"),
    "hashing": ("class V: pass", "assert len({V(), V()}) == 2"),
    "length of another object": ("class V:\n    def __len__(s): return 3\ndef f(): return V()", "assert len(f()) == 3"),
    "items of another object": ("class V:\n    def __getitem__(s, i): return i\ndef f(): return V()", "assert f()[3] == 3"),
    "iteration over another object": ("class V:\n    def __iter__(s): return iter([1])\ndef f(): return V()", "assert list(f()) == [1]"),
    "format of another object": ("class V:\n    def __str__(s): return 'v'\ndef f(): return V()", "assert f'{f():>3}' == '  v'"),
    "equality of a list of its own": ("class V(list): pass", "assert V([1]) == [1]"),
}  # fmt: skip
"""Correct programs that are unscored, because only their objects could decide the tests."""

INSEPARABLE = {
    "classes": ("class V: pass", "assert isinstance(V(), V)"),
    "bases": ("class V: pass", "class W(V): pass\nassert W().x == 1"),
    "coroutines": ("async def f(x): return x", "import asyncio\nassert asyncio.run(f(1)) == 1"),
    "objects of the tests": ("def f(node): return node.value", "class Node:\n    value = 3\nassert f(Node()) == 3"),
    "a missing module": ("def f(): return 1", "assert f() == 1\nimport nosuchmodule"),
    "a missing file": ("def f(): return 1", "a = open('nosuchfile').read()\nassert f() == 1"),
    "a missing name": ("def f(): return 1", "assert f() == EXPECTED"),
    "nothing asked": ("def f(): return 1", "assert 1 == 1"),
    "their own fault": ("def f(): return 1", "x = [][1]\nassert f() == 1"),
}  # fmt: skip
"""Tests that cannot run with any program; the response is unscored."""
