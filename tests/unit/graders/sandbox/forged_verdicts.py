"""Programs that are wrong and try to be judged right, by the kind of lie. Rows: (code, tests, prompt code)."""

_CHANNEL = """
import sys
def channel():
    frame = sys._getframe()
    while frame:
        for value in frame.f_locals.values():
            if type(value).__name__ == "ProgramProcess": return value._wire
        frame = frame.f_back
"""
_END = _CHANNEL + "def f(*a):\n    channel().send({'end': True})\n    return 5\n"
_POINT = "class Point:\n    def __init__(self, x): self.x = x\n    def same(self, o): return self.x == o.x\n"
_POINT += "    def __eq__(self, o): return self.same(o)\n    def size(self): return abs(self.x)\n\n\ndef f(x):\n"
_CASES = "def check(case):\n    return f(case[0]) == case[1]\ncases = [(2, 4), (3, 9)]\n"


def _sent(reply: str) -> str:
    return _CHANNEL + f"def f(*a):\n    channel().send({reply})\n    return 5\n"


FORGERIES: dict[str, list[tuple[str, ...]]] = {
    "ends a loop of the tests": [
        (_END, f"{_CASES}assert all(map(check, cases))"),
        (_END, "assert sum(map(f, [2, 3])) == 0"),
        (_END, "assert all(a == b for a, b in zip(map(f, [2, 3]), [4, 9]))"),
        (_END, f"{_CASES}assert list(filter(lambda case: not check(case), cases)) == []"),
        (_END, "for got, want in zip(map(f, [2]), [4]):\n    assert got == want\nassert True"),
        (_END, "import itertools\nassert all(itertools.starmap(lambda x, y: f(x) == y, [(2, 4)]))"),
        ("def f(x):\n    return iter([])", "assert all(map(lambda x: next(f(x)) == x * x, [2, 3]))"),
        ("def f(x):\n    return iter([])", "assert not list(filter(lambda x: next(f(x)) != x * x, [2, 3]))"),
        ("def f(x): raise StopIteration", f"{_CASES}assert all(map(check, cases))"),
    ],
    "hides an exception, or brings the value that it is compared with": [
        (
            "def f(i): raise IndexError",
            "class Wanted:\n    def __getitem__(self, i): return f(i) == i * i\nassert all(Wanted())\n"
            "try:\n    f('x')\nexcept IndexError: pass",
        ),
        (
            "def f(i): raise AttributeError",
            "class Wanted:\n    def __getattr__(self, name): return f(2) == 4\nassert getattr(Wanted(), 'x', True)\n"
            "try:\n    f('x')\nexcept AttributeError: pass",
        ),
        ("class F:\n    want = 5\n    def __call__(self, x): return 5\nf = F()", "assert f(2) == f.want"),
        ("class F:\n    want = 5\n    def __call__(self, x): return 5\nf = F()", "assert f.want == f(2)\nassert f(3) > 1"),
    ],
    "sends a reply that nobody asked for": [
        (_sent("{'values': [4], 'nodes': [], 'callback': 0}"), "assert f(2) == 4"),
        (_sent("{'values': [[['tuple', [4]], 0]], 'nodes': []}"), "assert f(2) == 4"),
        (_sent("{'raise': ['StopIteration', [], '']}"), "assert list(map(f, [2])) == []"),
        (_sent("{'raise': ['GeneratorExit', ['BaseException'], '']}"), "assert list(map(f, [2])) == []"),
        (_sent("{'values': [], 'nodes': []}"), "assert f(2) == 4"),
        (_sent("{'values': [None], 'nodes': [['list', [1]]]}"), "a = [3, 1]\nf(a)\nassert a == [1, 3]"),
        (_sent("{}"), "try:\n    f(2)\nexcept Exception:\n    pass\nassert True"),
    ],
    "shadows methods of the prompt's class": [
        ("    p = Point(5)\n    p.same = lambda o: True\n    return p", "assert f(2) == Point(4)", _POINT),
        ("    p = Point(5)\n    p.size = lambda: 4\n    return p", "assert f(2).size() == 4", _POINT),
        ("    class A:\n        __eq__ = lambda *a: True\n    return Point(A())", "assert f(2) == Point(4)", _POINT),
        (
            "    p = Point(5)\n    p.__dict__['__class__'] = int\n    p.size = None\n    return p",
            "assert f(2).x == 4",
            _POINT,
        ),
        ("    Point.__eq__ = lambda *a: True\n    return Point(5)", "assert f(2) == Point(4)", _POINT),
        ("    class L(list):\n        pass\n    return Point(L.__eq__)", "assert f(2) == Point(4)", _POINT),
        ("    p = Point(5)\n    p.same = print\n    return [p]", "assert f(2) == [Point(4)]", _POINT),
    ],
    "defines what the tests forgot to import": [
        ("class math: fabs = lambda x: 0\ndef f(x): return 5", "assert math.fabs(f(2) - 4) < 1e-6"),
        ("class math: isclose = lambda *a, **k: True\ndef f(x): return 5", "assert math.isclose(f(2), 4)"),
        ("class np: allclose = lambda *a: True\ndef f(x): return 5", "assert np.allclose(f(2), 4)"),
        (
            "class T: assert_allclose = lambda *a: None\nclass np: testing = T\ndef f(x): return 5",
            "np.testing.assert_allclose(f(2), 4)",
        ),
        ("def Counter(x): return 0\ndef f(x): return [5]", "assert Counter(f(2)) == Counter([4])"),
        ("class copy: deepcopy = lambda x: 5\ndef f(x): return 5", "assert copy.deepcopy(4) == f(2)"),
        ("def deepcopy(x): return 5\ndef f(x): return 5", "assert deepcopy(4) == f(2)"),
        ("def isclose(*a): return True\ndef f(x): return 5", "assert isclose(f(2), 4)"),
        ("class re: match = lambda *a: True\ndef f(x): return 'a'", "assert re.match('b', f(2))"),
        ("pi = 5\ndef f(x): return 5", "assert f(2) == pi"),
        ("WANT = 5\ndef f(x): return 5", "assert f(2) == WANT", "# f returns WANT"),
        ("WANT = 5\ndef f(x): return 5", "w = WANT\nassert f(2) == w", "# f returns WANT"),
        ("def Fraction(*a): return 0\ndef f(x): return 5", "assert Fraction(f(2)) == Fraction(4)"),
    ],
    "gives nothing": [
        (
            "import numpy as np\ndef f(x): return np.zeros((0, 3))",
            "import numpy as np\nassert (f(2) == np.array([4, 5, 6])).all()",
        ),
        ("def f(x): return []", "import numpy as np\nassert np.allclose(f(2), [4.0])"),
        ("def f(x): return []", "import numpy as np\nnp.testing.assert_allclose(f(2), 4)"),
        ("def f(x): return [[], []]", "import numpy as np\nassert (np.array([[4], [5]]) == np.array(f(2))).all()"),
        ("def f(x): return ()", "import numpy as np\nassert np.abs(np.array(f(2)) - 4).sum() < 1e-6"),
        ("def f(a): a.clear()", "import numpy as np\na = [3.0]\nf(a)\nassert np.allclose(a, [4.0])"),
        ("def f(x): return []", "assert all(x == 4 for x in f(2))"),
        ("def f(x): return {}", "def test_a():\n    assert all(f(2)[key] == 4 for key in f(2))"),
        ("def f(x): return []", "for x in f(2):\n    assert x == 4"),
    ],
    "raises what the tests' own protocol hides": [
        ("def f(x): raise IndexError", "class S:\n    def __getitem__(self, i): return f(i)\nassert list(S()) == []"),
        (
            "def f(x): raise AttributeError",
            "class S:\n    @property\n    def a(self): return f(2) == 4\nassert getattr(S(), 'a', True)",
        ),
    ],
    "is not a number": [
        ("def f(x): return float('nan')", "assert not abs(f(2) - 4) > 1e-6"),
        (
            "import numpy as np\ndef f(x): return np.full(3, np.nan)",
            "import numpy as np\nassert not (np.abs(f(2) - 4) > 1e-6).any()",
        ),
    ],
    "lets the tests swallow a failure": [
        (
            "def f(x): return 5",
            "import unittest\nclass T(unittest.TestCase):\n    @unittest.skipIf(f(2) == 5, 'x')\n"
            "    def test_a(self): self.assertEqual(f(2), 4)",
        ),
        (
            "def f(x): return 5",
            "import threading\ndef g():\n    assert f(2) == 4\nt = threading.Thread(target=g)\nt.start()\nt.join()",
        ),
        (
            "def f(x): return 5",
            "def test_a():\n    try:\n        assert f(2) == 4\n    except Exception:\n        pass",
        ),
        (
            "def f(x): raise AssertionError",
            "from contextlib import suppress\nwith suppress(Exception):\n    assert f(2) == 4",
        ),
        ("raise AssertionError", "try:\n    f(2)\nexcept AssertionError:\n    pass\nassert True"),
    ],
    "is an object that decides": [
        ("class Text(str):\n    upper = lambda s: s", "assert Text('a').upper() == 'A'"),
        ("class Number(int):\n    __eq__ = lambda *a: True\n    __hash__ = int.__hash__", "assert Number(5) == 4"),
        (
            "class Vector:\n    __eq__ = lambda *a: True\n    def __init__(s, *a): pass\n    __add__ = lambda s, o: s",
            "assert Vector(1) + Vector(2) == Vector(3)",
        ),
        ("class Money:\n    def __init__(s, x): pass\n    __sub__ = lambda *a: 0", "assert Money(5) - 4 == 0"),
        ("class Bag:\n    __contains__ = lambda *a: True", "assert 4 in Bag()"),
        ("class Bag:\n    __bool__ = lambda *a: True", "assert Bag()"),
        ("class Bag(list):\n    __eq__ = lambda *a: True", "assert Bag() == [4]"),
        ("class Bag:\n    __lt__ = lambda *a: True", "assert Bag() < 4"),
        (
            "class Bag:\n    __len__ = lambda *a: True\n    __str__ = lambda s: Text()\nclass Text(str):\n    __eq__ = lambda *a: True",
            "assert str(Bag()) == '4'",
        ),
        (
            "class Guard:\n    __enter__ = lambda s: s\n    __exit__ = lambda *a: True\n    def f(s): return 5",
            "with Guard() as g:\n    assert g.f() == 4",
        ),
        (
            "class X:\n    isdigit = startswith = lambda *a: True\ndef f(x): return X()",
            "assert f(2).isdigit() and f(2).startswith('4')",
        ),
        (
            "class X:\n    all = lambda s: True\n    __eq__ = lambda s, o: s\ndef f(x): return X()",
            "assert (f(2) == 4).all()",
        ),
        ("class X:\n    __class__ = property(lambda s: int)\ndef f(x): return X()", "assert isinstance(f(2), int)"),
        (
            "class E(Exception):\n    __eq__ = lambda *a: True\ndef f(x): raise E('a')",
            "try:\n    f(2)\nexcept Exception as e:\n    assert e == 4",
        ),
        ("class T(tuple):\n    __eq__ = lambda *a: True\ndef f(x): return T((5,))", "assert f(2) == (4,)"),
        (
            "import collections\nP = collections.namedtuple('P', 'x y')\nP.__eq__ = lambda *a: True\ndef f(x): return P(1, 2)",
            "assert f(2) == (4, 5)",
        ),
        (
            "import collections\nclass C(collections.Counter):\n    __eq__ = lambda *a: True\ndef f(x): return C('a')",
            "assert f(2) == {'b': 1}",
        ),
    ],
}

FORGED_OUTPUTS = [
    ("print(0)", "5e-10"),
    ("print('inf')", "infinity"),
    ("print(120000)", "12e4"),
    ("print('nan')", "nano"),
    ("print(1e-12)", "2.5e-12"),
    ("print(1000000.4)", "1000000"),
    ("print('1_0.0')", "10.0"),
    ("print('Infinity')", "inf"),
    ("print(0.0)", "1e-9"),
    ("print('0x10')", "16.0"),
    ("print(1e5)", "1e5x"),
    ("print(True)", "1"),
    ("print('+4')", "4"),
    (
        "import sys\nclass Out:\n    def write(s, t): pass\n    def flush(s): raise SystemExit(0)\nsys.stdout = Out()",
        "4",
    ),
    ("import os\nos._exit(0)", "4"),
    ("import sys\nsys.exit(0)", "4"),
]
"""Scripts that print a wrong text, and the expected text."""
