"""Right programs that use Python in many ways. Rows: (response, tests, prompt code, entry point); a program is fenced."""

from typing import Any

HONEST_USES: dict[str, list[tuple[Any, ...]]] = {
    "what the program prints": [
        ("print('loading')\ndef hello(n):\n    for i in range(n):\n        print('hello', i)\n    return n", "def test_a(capsys):\n    assert hello(2) == 2\n    out, err = capsys.readouterr()\n    assert out == 'hello 0\\nhello 1\\n' and err == ''\n    hello(1)\n    assert capsys.readouterr().out == 'hello 0\\n'"),  # noqa: E501
        ("def hello(n): print('hello', n)", "import io\nfrom contextlib import redirect_stdout\nwith redirect_stdout(io.StringIO()) as out:\n    hello(1)\nassert out.getvalue() == 'hello 1\\n'"),  # noqa: E501
        ("class P:\n    def show(self): print('P!')", "import io, sys\nsys.stdout = io.StringIO()\nP().show()\ntext = sys.stdout.getvalue()\nsys.stdout = sys.__stdout__\nassert text.strip() == 'P!'"),  # noqa: E501
        ("def hello(): print('hello')", "import io, unittest\nfrom unittest.mock import patch\nclass T(unittest.TestCase):\n    @patch('sys.stdout', new_callable=io.StringIO)\n    def test_a(self, out):\n        hello()\n        self.assertEqual(out.getvalue(), 'hello\\n')\n"),  # noqa: E501
        ("import sys\nwrite = sys.stderr.write\ndef f():\n    write('bad\\n')\n    raise ValueError('x')", "import pytest\ndef test_a(capsys):\n    with pytest.raises(ValueError):\n        f()\n    assert capsys.readouterr() == ('', 'bad\\n')"),  # noqa: E501
        ("def f(g):\n    print('a')\n    g()\n    print('c')", "def test_a(capsys):\n    f(lambda: print('b'))\n    assert capsys.readouterr().out == 'a\\nb\\nc\\n'"),  # noqa: E501
    ],
    "mutates and returns": [
        ("```python\ndef f(nums):\n    k = 0\n    for x in nums:\n        if k == 0 or nums[k-1] != x:\n            nums[k] = x\n            k += 1\n    return k\n```", "nums = [1,1,2]\nk = f(nums)\nassert k == 2 and nums[:k] == [1,2]"),  # noqa: E501
        ("```python\ndef f(a):\n    a.sort()\n    return a\n```", "a = [3,1,2]\nf(a)\nassert a == [1,2,3]"),
        ("```python\ndef f(d):\n    d['n'] = d.get('n', 0) + 1\n    return d['n']\n```", "d = {}\nassert f(d) == 1 and f(d) == 2 and d == {'n': 2}"),  # noqa: E501
        ("```python\ndef f(grid):\n    grid[0][0] = 9\n    return True\n```", "g = [[1,2],[3,4]]\nassert f(g)\nassert g == [[9,2],[3,4]]"),
        ("```python\ndef f(s):\n    return s.pop()\n```", "s = [1,2,3]\nassert f(s) == 3\nassert s == [1,2]"),
        ("```python\ndef f(s):\n    s.add(4)\n    return len(s)\n```", "s = {1}\nassert f(s) == 2 and s == {1, 4}"),
        ("```python\nfrom collections import deque\ndef f(q):\n    return q.popleft()\n```", "from collections import deque\nq = deque([1,2])\nassert f(q) == 1 and list(q) == [2]"),  # noqa: E501
        ("```python\nimport heapq\ndef f(h, x):\n    heapq.heappush(h, x)\n    return h[0]\n```", "h = []\nassert f(h, 3) == 3 and f(h, 1) == 1 and sorted(h) == [1,3]"),  # noqa: E501
        ("```python\ndef f(a, memo={}):\n    memo[a] = memo.get(a, 0) + 1\n    return memo[a]\n```", "m = {}\nassert f(1, m) == 1\nassert f(1, m) == 2\nassert m == {1: 2}"),  # noqa: E501
        ("```python\n    cur = node\n    while cur.next: cur = cur.next\n    cur.next = ListNode(9)\n    return node\n```", "n = ListNode(1)\nf(n)\nassert n.next.val == 9", "class ListNode:\n    def __init__(self, val=0, next=None):\n        self.val = val\n        self.next = next\n\ndef f(node):\n", "f"),  # noqa: E501
        ("```python\nimport random\ndef f(a):\n    random.Random(0).shuffle(a)\n    return len(a)\n```", "a = list(range(10))\nassert f(a) == 10\nassert sorted(a) == list(range(10))"),  # noqa: E501
        ("```python\ndef f(b):\n    b.extend(b'xy')\n    return len(b)\n```", "b = bytearray(b'a')\nassert f(b) == 3 and bytes(b) == b'axy'"),  # noqa: E501
        ("```python\nimport numpy as np\ndef f(a):\n    a += 1\n    return a.sum()\n```", "import numpy as np\na = np.zeros(3)\nassert f(a) == 3.0\nassert (a == 1).all()"),  # noqa: E501
        ("```python\ndef f(x):\n    x.clear()\n    return x\n```", "a = [1]\nassert f(a) == []\nassert not a"),
    ],
    "filter and context managers": [
        ("def is_vowel(c): return c in 'aeiou'", "assert list(filter(is_vowel, 'hello')) == ['e', 'o']"),
        ("def f(n): return [0, n]", "assert list(filter(None, f(2))) == [2]"),
        ("from contextlib import contextmanager\n@contextmanager\ndef tag(name, out):\n    out.append('<' + name + '>')\n    yield name\n    out.append('</' + name + '>')", "out = []\nwith tag('b', out) as n:\n    assert n == 'b'\n    out.append('x')\nassert out == ['<b>', 'x', '</b>']"),  # noqa: E501
    ],
    "lists of objects": [
        ("class V:\n    def __init__(s, xs): s.xs = xs\n    def total(s): return sum(s.xs)", "xs = [1, 2]\nv = V(xs)\nassert v.total() == 3\nxs.append(5)\nassert v.total() == 8"),  # noqa: E501
        ("class M:\n    def __init__(s): s.r = [[0, 0], [0, 0]]\n    def row(s, i): return s.r[i]\n    def get(s, i, j): return s.r[i][j]", "m = M()\nm.row(0)[1] = 5\nassert m.get(0, 1) == 5"),  # noqa: E501
        ("class Log:\n    def __init__(s, out): s.out = out\n    def write(s, x): s.out.append(x)", "out = []\nlog = Log(out)\nlog.write(1)\nlog.write(2)\nassert out == [1, 2]"),  # noqa: E501
        ("class G:\n    def __init__(s): s.e = {}\n    def node(s, k): return s.e.setdefault(k, [])", "g = G()\ng.node('a').append('b')\ng.node('a').append('c')\nassert g.node('a') == ['b', 'c']"),  # noqa: E501
        ("```python\nclass Node:\n    def __init__(s, v):\n        s.v = v\n        s.children = []\ndef total(n): return n.v + sum(total(c) for c in n.children)\n```", "r = Node(1)\nr.children.append(Node(2))\nassert total(r) == 3"),  # noqa: E501
        ("```python\nclass Stack:\n    def __init__(s): s.items = []\n    def pop(s): return s.items.pop()\n```", "s = Stack()\ns.items.append(1)\nassert s.pop() == 1"),  # noqa: E501
        ("```python\nclass Graph:\n    def __init__(s): s.adj = {}\n    def degree(s, v): return len(s.adj[v])\n```", "g = Graph()\ng.adj['a'] = ['b', 'c']\nassert g.degree('a') == 2"),  # noqa: E501
        ("```python\nclass Node:\n    def __init__(s, v, l=None, r=None): s.v, s.l, s.r = v, l, r\ndef depth(n): return 0 if n is None else 1 + max(depth(n.l), depth(n.r))\n```", "assert depth(Node(1, Node(2, Node(3)))) == 3\nassert depth(None) == 0"),  # noqa: E501
        ("```python\nclass Cfg:\n    def __init__(s): s.opts = {'a': 1}\n    def get(s, k): return s.opts[k]\n```", "c = Cfg()\nc.opts.update(a=5)\nassert c.get('a') == 5"),  # noqa: E501
        ("```python\nclass Account:\n    def __init__(s, b=0): s.balance = b\n    def deposit(s, x):\n        s.balance += x\n        return s.balance\n```", "a = Account(5)\nassert a.deposit(3) == 8\na.balance += 2\nassert a.balance == 10"),  # noqa: E501
        ("```python\nclass A:\n    n = 0\n    def __init__(s): A.n += 1\n```", "A(); A()\nassert A.n == 2"),
        ("```python\nclass M:\n    def __init__(s, rows): s.rows = rows\n    def __matmul__(s, o): return M([[sum(a*b for a,b in zip(r,c)) for c in zip(*o.rows)] for r in s.rows])\n```", "assert (M([[1,2]]) @ M([[3],[4]])).rows == [[11]]"),  # noqa: E501
    ],
    "prompt's exceptions and enums": [
        ("```python\n    raise Poor('no')\n```", "try:\n    f(1)\n    ok = False\nexcept Poor as e:\n    ok = True\nassert ok", "class Poor(Exception):\n    pass\n\ndef f(x):\n", "f"),  # noqa: E501
        ("```python\n    raise Poor('no')\n```", "import pytest\nwith pytest.raises(Poor):\n    f(1)", "class Poor(ValueError):\n    pass\n\ndef f(x):\n", "f"),  # noqa: E501
        ("```python\n    return Color.RED\n```", "assert f(1) == Color.RED", "from enum import Enum\nclass Color(Enum):\n    RED = 1\n    BLUE = 2\n\ndef f(x):\n", "f"),  # noqa: E501
        ("```python\n    return {P(1), P(2)}\n```", "assert f(1) == {P(1), P(2)}", "class P:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return self.x == o.x\n    def __hash__(self): return hash(self.x)\n\ndef f(x):\n", "f"),  # noqa: E501
        ("```python\n    return {P(1): 'a'}\n```", "assert f(1)[P(1)] == 'a'", "class P:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return self.x == o.x\n    def __hash__(self): return hash(self.x)\n\ndef f(x):\n", "f"),  # noqa: E501
        ("```python\n    return [x, P(2)]\n```", "p = P(1)\nassert f(p) == [P(1), P(2)]\nassert f(p)[0].x == 1", "class P:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return self.x == o.x\n    def __hash__(self): return hash(self.x)\n\ndef f(x):\n", "f"),  # noqa: E501
        ("```python\n    return Q(1, 2)\n```", "assert f(1) == Q(1, 2)", "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Q:\n    a: int\n    b: int = 0\n\ndef f(x):\n", "f"),  # noqa: E501
        ("```python\n    return Q(1, 2)\n```", "assert f(1) == Q(1, 2) and f(1).b == 2 and f(1).s() == 3", "from typing import NamedTuple\nclass Q(NamedTuple):\n    a: int\n    b: int = 0\n    def s(self): return self.a + self.b\n\ndef f(x):\n", "f"),  # noqa: E501
        ("```python\n    return sorted(xs, key=lambda n: n.val)[0]\n```", "assert f([ListNode(3), ListNode(1)]).val == 1", "class ListNode:\n    def __init__(self, val=0, next=None):\n        self.val = val\n        self.next = next\n\ndef f(xs):\n", "f"),  # noqa: E501
        ("```python\n    p = ListNode()\n    p.next = p\n    return p\n```", "n = f()\nassert n.next is n", "class ListNode:\n    def __init__(self, val=0, next=None):\n        self.val = val\n        self.next = next\n\ndef f():\n", "f"),  # noqa: E501
        ("```python\nclass Solution:\n    def rev(self, head):\n        p = None\n        while head: head.next, p, head = p, head, head.next\n        return p\n```", "r = Solution().rev(ListNode(1, ListNode(2)))\nassert r.val == 2 and r.next.val == 1 and r.next.next is None", "class ListNode:\n    def __init__(self, val=0, next=None):\n        self.val = val\n        self.next = next\n\n", ""),  # noqa: E501
        ("```python\n    n = ListNode(0)\n    c = n\n    for i in range(3000):\n        c.next = ListNode(i)\n        c = c.next\n    return n\n```", "n = f()\nc = 0\nwhile n: n = n.next; c += 1\nassert c == 3001", "class ListNode:\n    def __init__(self, val=0, next=None):\n        self.val = val\n        self.next = next\n\ndef f():\n", "f"),  # noqa: E501
        ("```python\nclass Poor(ValueError): pass\ndef f(x):\n    if x < 0: raise Poor('neg')\n    return x\n```", "import pytest\nwith pytest.raises(Poor, match='neg'):\n    f(-1)\nassert f(1) == 1"),  # noqa: E501
        ("```python\n    if x < 0: raise LookupError('a')\n    return x\n```", "import pytest\nwith pytest.raises(LookupError) as e:\n    f(-1)\nassert 'a' in str(e.value)", "def f(x):\n", "f"),  # noqa: E501
    ],
    "callbacks": [
        ("```python\ndef f(visit, acc):\n    visit(acc)\n    return acc\n```", "def visit(a): a.append(1)\nassert f(visit, []) == [1]"),
        ("```python\ndef f(visit):\n    acc = []\n    visit(acc)\n    visit(acc)\n    return acc\n```", "def visit(a): a.append(1)\nassert f(visit) == [1, 1]"),  # noqa: E501
        ("```python\ndef f(g):\n    try:\n        g()\n    except ValueError as e:\n        return str(e)\n```", "def g(): raise ValueError('x')\nassert f(g) == 'x'"),  # noqa: E501
        ("```python\ndef f(g):\n    try:\n        g()\n    except KeyError as e:\n        return e.args[0]\n```", "def g(): return {}['k']\nassert f(g) == 'k'"),  # noqa: E501
        ("```python\nimport functools\ndef f(g):\n    @functools.wraps(g)\n    def h(*a): return g(*a)\n    return h\n```", "def g(x):\n    return x + 1\nassert f(g)(1) == 2\nassert f(g).__name__ == 'g'"),  # noqa: E501
        ("```python\ndef f(g, n):\n    for _ in range(n): g = (lambda h: lambda x: h(h(x)))(g)\n    return g(0)\n```", "assert f(lambda x: x + 1, 3) == 8"),  # noqa: E501
        ("```python\ndef f(it): return it\n```", "assert list(f(iter([1, 2]))) == [1, 2]"),
        ("```python\ndef f(it):\n    a, b = iter(it), 0\n    for x in a: b += x\n    return b\n```", "def gen():\n    yield 1\n    yield 2\nassert f(gen()) == 3"),  # noqa: E501
        ("```python\ndef f(xs, key): return sorted(xs, key=key)\n```", "from operator import itemgetter, attrgetter, methodcaller\nassert f([(1,2),(0,3)], itemgetter(0)) == [(0,3),(1,2)]\nassert f(['b','A'], str.lower) == ['A','b']"),  # noqa: E501
        ("```python\ndef f(a, b, op): return op(a, b)\n```", "import operator\nassert f(1, 2, operator.add) == 3 and f(1, 2, max) == 2 and f(5, 3, lambda x, y: x % y) == 2"),  # noqa: E501
        ("```python\ndef f(gs): return [g() for g in gs]\n```", "assert f([lambda i=i: i for i in range(3)]) == [0, 1, 2]"),
        ("```python\ndef f(d, k, *a, **kw): return d[k](*a, **kw)\n```", "assert f({'s': sum}, 's', [1, 2]) == 3\nassert f({'s': lambda *, b: b}, 's', b=3) == 3"),  # noqa: E501
        ("```python\nclass Bus:\n    def __init__(s): s.h = {}\n    def on(s, n, g): s.h.setdefault(n, []).append(g)\n    def emit(s, n, *a): return [g(*a) for g in s.h.get(n, [])]\n```", "got = []\nb = Bus()\nb.on('x', got.append)\nb.emit('x', 5)\nassert got == [5]"),  # noqa: E501
        ("```python\nclass Lazy:\n    def __init__(s, g): s.g, s.v = g, None\n    def get(s):\n        if s.v is None: s.v = s.g()\n        return s.v\n```", "calls = []\nl = Lazy(lambda: calls.append(1) or 7)\nassert l.get() == 7 and l.get() == 7 and len(calls) == 1"),  # noqa: E501
        ("```python\ndef f(p): return p.x + p.y\n```", "from types import SimpleNamespace\nassert f(SimpleNamespace(x=1, y=2)) == 3"),
        ("```python\nimport time\ndef timer(g):\n    def h(*a, **k):\n        t = time.perf_counter()\n        r = g(*a, **k)\n        h.last = time.perf_counter() - t\n        return r\n    return h\n```", "@timer\ndef k(x): return x * 2\nassert k(4) == 8\nassert k.last >= 0"),  # noqa: E501
        ("```python\ndef curry(g, n): return (lambda x: curry(lambda *a: g(x, *a), n - 1)) if n > 1 else g\n```", "assert curry(lambda a, b, c: a + b + c, 3)(1)(2)(3) == 6"),  # noqa: E501
        ("```python\ndef retry(n):\n    def d(g):\n        def h(*a):\n            for i in range(n):\n                try: return g(*a)\n                except RuntimeError:\n                    if i == n - 1: raise\n        return h\n    return d\n```", "tries = []\n@retry(3)\ndef g():\n    tries.append(1)\n    if len(tries) < 3: raise RuntimeError('x')\n    return 'ok'\nassert g() == 'ok' and len(tries) == 3"),  # noqa: E501
    ],
    "plain subclasses": [
        ("```python\nfrom enum import IntEnum\nclass C(IntEnum):\n    A = 1\ndef f(x): return C.A\n```", {'inputs': [['2']], 'outputs': [1], 'fn_name': 'f'}),  # noqa: E501
        ("```python\nfrom enum import Enum\nclass C(str, Enum):\n    A = 'a'\ndef f(x): return C.A\n```", {'inputs': [['2']], 'outputs': ['a'], 'fn_name': 'f'}),  # noqa: E501
        ("```python\nclass S(str): pass\ndef f(x): return S('a')\n```", {'inputs': [['2']], 'outputs': ['a'], 'fn_name': 'f'}),
        ("```python\nclass L(list): pass\ndef f(x): return L([1])\n```", {'inputs': [['2']], 'outputs': [[1]], 'fn_name': 'f'}),
        ("```python\nfrom collections import namedtuple\nP = namedtuple('P', 'a b')\ndef f(x): return [P(1, 2)]\n```", {'inputs': [['2']], 'outputs': [[[1, 2]]], 'fn_name': 'f'}),  # noqa: E501
        ("```python\nimport numpy as np\ndef f(x): return np.float64(0.5)\n```", {'inputs': [['2']], 'outputs': [0.5], 'fn_name': 'f'}),
        ("```python\nimport numpy as np\ndef f(x): return np.int64(5)\n```", {'inputs': [['2']], 'outputs': [5], 'fn_name': 'f'}),
        ("```python\nfrom collections import OrderedDict, Counter, deque\ndef f(x): return Counter('aab')\n```", {'inputs': [['2']], 'outputs': [{'a': 2, 'b': 1}], 'fn_name': 'f'}),  # noqa: E501
        ("```python\nfrom fractions import Fraction\ndef f(x): return Fraction(1, 2)\n```", {'inputs': [['2']], 'outputs': [0.5], 'fn_name': 'f'}),  # noqa: E501
        ("```python\nfrom decimal import Decimal\ndef f(x): return Decimal('0.5')\n```", {'inputs': [['2']], 'outputs': [0.5], 'fn_name': 'f'}),  # noqa: E501
        ("```python\ndef f(x): return (i for i in [1, 2])\n```", {'inputs': [['2']], 'outputs': [[1, 2]], 'fn_name': 'f'}),
        ("```python\ndef f(x): return map(str, [1, 2])\n```", {'inputs': [['2']], 'outputs': [['1', '2']], 'fn_name': 'f'}),
        ("```python\nimport numpy as np\ndef f(x): return np.array([1, 2])\n```", {'inputs': [['2']], 'outputs': [[1, 2]], 'fn_name': 'f'}),
        ("```python\ndef f(x): return [0.1 + 0.2, None, True]\n```", {'inputs': [['2']], 'outputs': [[0.3, None, True]], 'fn_name': 'f'}),
        ("```python\ndef f(x): return {(1, 2)}\n```", "assert f(1) == {(1, 2)}"),
    ],
    "scripts": [
        ("```python\nimport sys\nprint(*sys.stdin)\n```", {'inputs': ['1\n2\n'], 'outputs': ['1\n 2\n']}),
        ("```python\nimport sys\ndata = sys.stdin.buffer.read().split()\nsys.stdout.buffer.write(b' '.join(data))\n```", {'inputs': ['1 2'], 'outputs': ['1 2']}),  # noqa: E501
        ("```python\nfrom os import read\nprint(len(read(0, 100)))\n```", {'inputs': ['abc'], 'outputs': ['3']}),
        ("```python\nif __name__ == '__main__':\n    print(input())\n```", {'inputs': ['x'], 'outputs': ['x']}),
        ("```python\ndef main():\n    n = int(input())\n    print(n * 2)\nmain()\nexit()\n```", {'inputs': ['4'], 'outputs': ['8']}),
        ("```python\nimport sys\ninput = sys.stdin.readline\nprint(int(input()) + int(input()))\n```", {'inputs': ['1\n2'], 'outputs': ['3']}),  # noqa: E501
        ("```python\nwhile True:\n    try:\n        print(int(input()) ** 2)\n    except EOFError:\n        break\n```", {'inputs': ['2\n3'], 'outputs': ['4\n9']}),  # noqa: E501
        ("```python\nimport threading, sys\nsys.setrecursionlimit(1 << 25)\nthreading.stack_size(256 << 20)\ndef go(n): return n and 1 + go(n - 1)\nt = threading.Thread(target=lambda: print(go(30000)))\nt.start(); t.join()\n```", {'inputs': [''], 'outputs': ['30000']}),  # noqa: E501
        ("```python\nimport sys, io, os\nsys.stdout = io.StringIO()\nprint(5)\nos.write(1, sys.stdout.getvalue().encode())\n```", {'inputs': [''], 'outputs': ['5']}),  # noqa: E501
        ("```python\nimport sys\nsys.stdout.write('a')\nsys.stdout.flush()\nimport os\nos._exit(0)\n```", {'inputs': [''], 'outputs': ['a']}),  # noqa: E501
        ("```python\nimport atexit\natexit.register(lambda: print('bye'))\nprint('hi')\n```", {'inputs': [''], 'outputs': ['hi\nbye']}),
        ("```python\nimport subprocess\nprint(1)\n```", {'inputs': [''], 'outputs': ['1']}),
        ("```python\nprint('\u00e9', '\u6c49', '\ud83d\ude00')\n```", {'inputs': [''], 'outputs': ['é 汉 😀']}),
        ("```python\nimport sys\nfor line in iter(sys.stdin.readline, ''):\n    print(line.strip()[::-1])\n```", {'inputs': ['ab\ncd'], 'outputs': ['ba\ndc']}),  # noqa: E501
        ("```python\nfrom dataclasses import dataclass, field\n@dataclass(order=True)\nclass A:\n    x: int\n    y: int = field(compare=False)\nprint(sorted([A(2, 1), A(1, 2)])[0].y)\n```", {'inputs': [''], 'outputs': ['2']}),  # noqa: E501
        ("```python\nimport pickle\nclass A:\n    def __init__(s): s.x = 1\nprint(pickle.loads(pickle.dumps(A())).x)\n```", {'inputs': [''], 'outputs': ['1']}),  # noqa: E501
        ("```python\nfrom typing import get_type_hints\nclass A:\n    x: 'int'\nprint(get_type_hints(A))\n```", {'inputs': [''], 'outputs': ["{'x': <class 'int'>}"]}),  # noqa: E501
        ("```python\nimport sys\nprint(sys.argv[0] != '', len(sys.argv))\n```", {'inputs': [''], 'outputs': ['True 1']}),
        ("```python\nimport logging\nlogging.warning('x')\nprint(1)\n```", {'inputs': [''], 'outputs': ['1']}),
        ("```python\nimport warnings\nwarnings.warn('x')\nprint(1)\n```", {'inputs': [''], 'outputs': ['1']}),
        ("```python\nimport sys\nprint('dbg', file=sys.stderr)\nprint(1)\n```", {'inputs': [''], 'outputs': ['1']}),
        ("```python\nimport asyncio\nasync def main():\n    await asyncio.gather(*(asyncio.sleep(0) for _ in range(3)))\n    print('ok')\nasyncio.run(main())\n```", {'inputs': [''], 'outputs': ['ok']}),  # noqa: E501
        ("```python\nimport queue, threading\nq = queue.Queue()\nthreading.Thread(target=lambda: q.put(4), daemon=True).start()\nprint(q.get())\n```", {'inputs': [''], 'outputs': ['4']}),  # noqa: E501
        ("```python\nfrom concurrent.futures import ThreadPoolExecutor, as_completed\nwith ThreadPoolExecutor() as p:\n    print(sum(x.result() for x in as_completed([p.submit(pow, i, 2) for i in range(5)])))\n```", {'inputs': [''], 'outputs': ['30']}),  # noqa: E501
        ("```python\nimport multiprocessing\nprint(2)\n```", {'inputs': [''], 'outputs': ['2']}),
        ("```python\nimport tempfile\nwith tempfile.TemporaryFile('w+') as t:\n    t.write('a')\n    t.seek(0)\n    print(t.read())\n```", {'inputs': [''], 'outputs': ['a']}),  # noqa: E501
        ("```python\nopen('a.txt', 'w').write('x')\nprint(open('a.txt').read())\n```", {'inputs': [''], 'outputs': ['x']}),
        ("```python\nimport sqlite3\nc = sqlite3.connect(':memory:')\nprint(c.execute('select 1+1').fetchone()[0])\n```", {'inputs': [''], 'outputs': ['2']}),  # noqa: E501
        ("```python\nimport locale, datetime\nprint(datetime.date(2024, 2, 29).strftime('%A'))\n```", {'inputs': [''], 'outputs': ['Thursday']}),  # noqa: E501
        ("```python\nimport signal\nsignal.alarm(0)\nprint(1)\n```", {'inputs': [''], 'outputs': ['1']}),
        ("```python\nimport sys\nsys.exit(main() if 'main' in dir() else print(7))\n```", {'inputs': [''], 'outputs': ['7']}),
        ("```python\nfrom fileinput import input\nprint(sum(map(int, input())))\n```", {'inputs': ['1\n2'], 'outputs': ['3']}),
        ("```python\nimport fileinput\nwith fileinput.input(files=('-',)) as f:\n    print(len(list(f)))\n```", {'inputs': ['a\nb'], 'outputs': ['2']}),  # noqa: E501
        ("```python\nprint(2**10000 % 10**9, len(str(3**40000)))\n```", {'inputs': [''], 'outputs': ['596709376 19085']}),
        ("```python\nimport math\nprint(math.factorial(3000) % (10**9+7))\n```", {'inputs': [''], 'outputs': ['341406877']}),
    ],
    "fences": [
        ("```python\ndef f(x):\n    return x * x\n```", "assert f(2) == 4"),
        ("```py\ndef f(x):\n    return x * x\n```", "assert f(2) == 4"),
        ("```Python\ndef f(x):\n    return x * x\n```", "assert f(2) == 4"),
        ("```python3\ndef f(x):\n    return x * x\n```", "assert f(2) == 4"),
        ("```PYTHON\ndef f(x):\n    return x * x\n```", "assert f(2) == 4"),
        ("```\ndef f(x):\n    return x * x\n```", "assert f(2) == 4"),
        ("```{python}\ndef f(x):\n    return x * x\n```", "assert f(2) == 4"),
        ("```python {.line-numbers}\ndef f(x):\n    return x * x\n```", "assert f(2) == 4"),
        ("```python showLineNumbers\ndef f(x):\n    return x * x\n```", "assert f(2) == 4"),
        ("```ipython\ndef f(x):\n    return x * x\n```", "assert f(2) == 4"),
        ("```python\n\ndef f(x):\n    return x * x\n```", "assert f(2) == 4"),
        ("~~~py\ndef f(x):\n    return x * x\n~~~", "assert f(2) == 4"),
        ("~~~~python\ndef f(x):\n    return x * x\n~~~~", "assert f(2) == 4"),
        ("   ```python\n   def f(x):\n       return x * x\n   ```", "assert f(2) == 4"),
        ("- step\n\n  ```python\n  def f(x):\n      return x * x\n  ```\n", "assert f(2) == 4"),
        ("1. a\n\n    ```python\n    def f(x):\n        return x * x\n    ```", "assert f(2) == 4"),
        ("> quoted\n\n```python\ndef f(x):\n    return x * x\n```", "assert f(2) == 4"),
        ("def f(x):\n    return x * x", "assert f(2) == 4"),
        ("\n\ndef f(x):\n    return x * x\n\n", "assert f(2) == 4"),
        ("```python\ndef f(x):\n    return x * x", "assert f(2) == 4"),
        ("```python\r\ndef f(x):\r\n    return x * x\r\n```", "assert f(2) == 4"),
        ("<think>\n```python\ndef f(x): return 0\n```\n</think>\n```python\ndef f(x):\n    return x * x\n```", "assert f(2) == 4"),
        ("<think>maybe ``` fence</think>\n```python\ndef f(x):\n    return x * x\n```", "assert f(2) == 4"),
        ("```python\ndef f(x):\n    return x * x\n```\nOutput:\n```\n4\n```", "assert f(2) == 4"),
        ("```bash\npip install x\n```\n```python\ndef f(x):\n    return x * x\n```", "assert f(2) == 4"),
        ("```python\ndef f(x):\n    return x * x\n```\n```json\n{\"a\": 1}\n```", "assert f(2) == 4"),
        ("```python\ndef f(x):\n    return 0\n```\nBetter:\n```python\ndef f(x):\n    return x * x\n```", "assert f(2) == 4"),
        ("```python\ndef g(x):\n    return x\n```\ntext\n```python\ndef f(x):\n    return g(x) * x\n```", "assert f(2) == 4"),
        ("```python\nimport math\n```\n```python\ndef f(x):\n    return int(math.pow(x, 2))\n```", "assert f(2) == 4"),
        ("```python\ndef f(x):\n    \"\"\"Doc.\n\n    ```python\n    f(2)\n    ```\n    \"\"\"\n    return x * x\n```", "assert f(2) == 4"),
        ("```python\ndef f(x):\n    '''\n    ```\n    a\n    ```\n    '''\n    return x * x\n```", "assert f(2) == 4"),
        ("```python\ndef f(x):\n    s = \"```\"\n    return x * x\n```", "assert f(2) == 4"),
        ("```python\ndef f(x):\n    # ``` not a fence\n    return x * x\n```", "assert f(2) == 4"),
        ("`````python\ndef f(x):\n    return x * x\n`````", "assert f(2) == 4"),
        ("```python title=\"f.py\" linenums=\"1\"\ndef f(x):\n    return x * x\n```", "assert f(2) == 4"),
        ("```python:solution.py\ndef f(x):\n    return x * x\n```", "assert f(2) == 4"),
        ("```python,editable\ndef f(x):\n    return x * x\n```", "assert f(2) == 4"),
        ("```python3.12\ndef f(x):\n    return x * x\n```", "assert f(2) == 4"),
        ("Here is `f`:\n\n```python\ndef f(x):\n    return x * x\n```\n\nIt uses ```x * x```.", "assert f(2) == 4"),
        ("```python\ndef f(x):\n    return x * x\n\nif __name__ == '__main__':\n    print(f(3))\n```", "assert f(2) == 4"),
        ("```python\ndef f(x):\n    return x * x\n\nassert f(3) == 9\n```", "assert f(2) == 4"),
        ("```python\ndef f(x):\n    return x * x\nprint(f(2))\n```", "assert f(2) == 4"),
        ("```python\nfrom __future__ import annotations\ndef f(x: int) -> int:\n    return x * x\n```", "assert f(2) == 4"),
        ("```python\ndef f(x):\n\treturn x * x\n```", "assert f(2) == 4"),
        ("```python\nf = lambda x: x * x\n```", "assert f(2) == 4"),
        ("```python\nclass A:\n    @staticmethod\n    def g(x): return x * x\nf = A.g\n```", "assert f(2) == 4"),
        ("```python\nasync def g(x): return x * x\ndef f(x):\n    import asyncio\n    return asyncio.run(g(x))\n```", "assert f(2) == 4"),
        ("```python\ndef f(x, /): return x ** 2\n```", "assert f(2) == 4"),
        ("```python\ndef f(*xs): return xs[0] ** 2\n```", "assert f(2) == 4"),
        ("```python\ndef f(x):\n    match x:\n        case 2: return 4\n        case _: return x * x\n```", "assert f(2) == 4"),
        ("```python\ndef f(x): return (y := x) * y\n```", "assert f(2) == 4"),
        ("```python\nf: 'callable' = lambda x: x * x\n```", "assert f(2) == 4"),
        ("```python\nglobal_state = {}\ndef f(x):\n    global_state[x] = x * x\n    return global_state[x]\n```", "assert f(2) == 4"),
        ("```python\n\uff46 = lambda x: x * x\n```", "assert f(2) == 4"),
        ("```python\ndef f(x):\n    return x * x  # \u00e9 \u6c49\n```", "assert f(2) == 4"),
        ("\ufeff```python\ndef f(x):\n    return x * x\n```", "assert f(2) == 4"),
        ("```python\n#!/usr/bin/env python\n# -*- coding: utf-8 -*-\ndef f(x):\n    return x * x\n```", "assert f(2) == 4"),
    ],
    "numpy": [
        ("```python\nimport numpy as np\ndef f(a): return np.sort(a)\n```", "import numpy as np\nassert np.array_equal(f(np.array([3, 1])), np.array([1, 3]))\nassert f(np.array([])).size == 0"),  # noqa: E501
        ("```python\nimport numpy as np\ndef f(a): return a.mean()\n```", "import numpy as np\nassert np.isclose(f(np.array([1., 2.])), 1.5)"),  # noqa: E501
        ("```python\nimport numpy as np\ndef f(a): return a @ a.T\n```", "import numpy as np\nassert (f(np.eye(2)) == np.eye(2)).all()"),
        ("```python\nimport numpy as np\ndef f(n): return np.arange(n)\n```", "import numpy as np\nassert f(0).tolist() == [] and f(2).tolist() == [0, 1]"),  # noqa: E501
        ("```python\nimport numpy as np\ndef f(a): return a[a > 1]\n```", "import numpy as np\nassert f(np.array([1, 2, 3])).tolist() == [2, 3]\nassert len(f(np.array([]))) == 0"),  # noqa: E501
        ("```python\nimport numpy as np\ndef f(a): return np.where(a > 0, a, np.nan)\n```", "import numpy as np\nr = f(np.array([1., -1.]))\nassert r[0] == 1 and np.isnan(r[1])"),  # noqa: E501
        ("```python\nimport numpy as np\ndef f(a): return a / a.sum()\n```", "import numpy as np\nnp.testing.assert_allclose(f(np.array([1., 3.])), [0.25, 0.75])"),  # noqa: E501
        ("```python\ndef f(xs): return [x for x in xs if x]\n```", "import numpy as np\nassert f([]) == []\nassert np.allclose(f([1, 0]), [1])"),  # noqa: E501
        ("```python\nimport numpy as np\ndef f(a): return a.astype(str)\n```", "import numpy as np\nassert f(np.array([1, 2])).tolist() == ['1', '2']"),  # noqa: E501
        ("```python\nimport numpy as np\ndef f(a): return np.unique(a, return_counts=True)\n```", "import numpy as np\nv, c = f(np.array([1, 1, 2]))\nassert v.tolist() == [1, 2] and c.tolist() == [2, 1]"),  # noqa: E501
        ("```python\nimport numpy as np\ndef f(): return np.float32(0.1)\n```", "import numpy as np\nassert abs(f() - 0.1) < 1e-6 and f().dtype == np.float32"),  # noqa: E501
        ("```python\nimport numpy as np\ndef f(x): return {'a': np.ones(2), 'b': [np.int64(1)]}\n```", "import numpy as np\nr = f(1)\nassert (r['a'] == 1).all() and r['b'] == [1]"),  # noqa: E501
        ("```python\nimport numpy as np\nclass M:\n    def __init__(s): s.w = np.zeros(2)\n    def fit(s, x): s.w += x\n    def predict(s, x): return x @ s.w\n```", "import numpy as np\nm = M()\nm.fit(np.array([1., 2.]))\nassert m.predict(np.array([1., 1.])) == 3"),  # noqa: E501
        ("```python\nimport numpy as np\ndef f(a):\n    a = a.copy()\n    a[0] = 9\n    return a\n```", "import numpy as np\nx = np.zeros(2)\ny = f(x)\nassert x[0] == 0 and y[0] == 9"),  # noqa: E501
        ("```python\nimport numpy as np\ndef f(a): return bool((a > 0).all())\n```", "import numpy as np\nassert f(np.ones(3)) and not f(np.zeros(3))"),  # noqa: E501
        ("```python\nimport numpy as np\ndef f(): return np.array([1+2j])\n```", "import numpy as np\nassert f()[0].imag == 2"),
    ],
    "zips and loops": [
        ("```python\ndef f(xs): return [x * 2 for x in xs]\n```", "for got, want in zip(f([1, 2]), [2, 4]):\n    assert got == want"),
        ("```python\ndef f(xs): return sorted(xs)\n```", "r = f([3, 1, 2])\nassert all(a <= b for a, b in zip(r, r[1:]))\nassert r == [1, 2, 3]"),  # noqa: E501
        ("```python\ndef f():\n    a, b = 0, 1\n    while True:\n        yield a\n        a, b = b, a + b\n```", "assert [x for x, _ in zip(f(), range(5))] == [0, 1, 1, 2, 3]"),  # noqa: E501
        ("```python\ndef f():\n    n = 0\n    while True:\n        yield n\n        n += 1\n```", "for got, want in zip(f(), [0, 1, 2]):\n    assert got == want"),  # noqa: E501
        ("```python\ndef f(xs): return dict(enumerate(xs))\n```", "assert dict(zip(range(2), f(['a', 'b']).values())) == {0: 'a', 1: 'b'}"),
        ("```python\ndef f(a, b): return list(zip(a, b))\n```", "assert f([1, 2], 'ab') == [(1, 'a'), (2, 'b')]"),
        ("```python\ndef f(x): return x + 1\n```", "xs, ys = [1, 2, 3], [2, 3, 4]\nassert all(f(x) == y for x, y in zip(xs, ys))"),
        ("```python\ndef f(x): return x + 1\n```", "assert list(map(f, range(3))) == [1, 2, 3]\nassert list(filter(lambda x: f(x) > 2, range(3))) == [2]"),  # noqa: E501
        ("```python\ndef f(x): return str(x)\n```", "assert ''.join(f(i) for i in range(3)) == '012'\nassert not any(f(i) == 'x' for i in range(3))"),  # noqa: E501
        ("```python\ndef f(n): return [[0] * n for _ in range(n)]\n```", "g = f(2)\nassert len(g) == 2 and all(len(r) == 2 for r in g)\ng[0][0] = 1\nassert g[1][0] == 0"),  # noqa: E501
        ("```python\ndef f(it):\n    it = iter(it)\n    return list(zip(it, it))\n```", "assert f([1, 2, 3, 4]) == [(1, 2), (3, 4)]"),
        ("```python\ndef f(xs): return xs\n```", "import itertools\nassert list(itertools.chain(f([1]), f([]))) == [1]"),
        ("```python\ndef f(n):\n    yield from range(n)\n```", "assert sum(f(4)) == 6 and max(f(4)) == 3 and 2 in list(f(4)) and tuple(f(2)) == (0, 1)"),  # noqa: E501
        ("```python\ndef f(n):\n    while n:\n        n -= 1\n        yield n\n```", "g = f(2)\nassert next(g) == 1\nassert next(g) == 0\nassert next(g, None) is None"),  # noqa: E501
        ("```python\nclass Range:\n    def __init__(s, n): s.n = n\n    def __iter__(s):\n        for i in range(s.n): yield i\n```", "assert list(Range(3)) == [0, 1, 2]\nassert [x for x in Range(2)] == [0, 1]"),  # noqa: E501
        ("```python\nclass C:\n    def __init__(s, n): s.n = n\n    def __len__(s): return s.n\n    def __getitem__(s, i):\n        if i >= s.n: raise IndexError\n        return i * i\n```", "c = C(3)\nassert len(c) == 3 and c[2] == 4 and list(c) == [0, 1, 4]"),  # noqa: E501
        ("```python\ndef f(xs):\n    seen = set()\n    return [x for x in xs if not (x in seen or seen.add(x))]\n```", "assert f([1, 1, 2]) == [1, 2] and f([]) == []"),  # noqa: E501
        ("```python\ndef f(a, b): return [x + y for x, y in zip(a, b, strict=True)]\n```", "assert f([1], [2]) == [3]\ntry:\n    f([1], [])\n    assert False\nexcept ValueError:\n    pass"),  # noqa: E501
    ],
    "several names": [
        ("```python\ndef gcd(a, b):\n    return a if not b else gcd(b, a % b)\ndef lcm(a, b): return a * b // gcd(a, b)\n```", "assert gcd(4, 6) == 2 and lcm(4, 6) == 12\nassert gcd(4, 6) * lcm(4, 6) == 24"),  # noqa: E501
        ("```python\ndef enc(s): return s[::-1]\ndef dec(s): return s[::-1]\n```", "assert dec(enc('abc')) == 'abc'\nassert enc('ab') == 'ba'"),  # noqa: E501
        ("```python\nclass Node:\n    def __init__(s, v, n=None): s.v, s.n = v, n\ndef rev(h):\n    p = None\n    while h: h.n, p, h = p, h, h.n\n    return p\n```", "h = rev(Node(1, Node(2)))\nassert h.v == 2 and h.n.v == 1"),  # noqa: E501
        ("```python\nclass TreeNode:\n    def __init__(s, v, l=None, r=None): s.v, s.l, s.r = v, l, r\ndef is_bst(t, lo=-1e9, hi=1e9): return t is None or (lo < t.v < hi and is_bst(t.l, lo, t.v) and is_bst(t.r, t.v, hi))\n```", "assert is_bst(TreeNode(2, TreeNode(1), TreeNode(3)))\nassert not is_bst(TreeNode(1, TreeNode(2)))"),  # noqa: E501
        ("```python\ndef is_even(n): return n % 2 == 0\ndef is_odd(n): return not is_even(n)\n```", "assert is_even(2) and not is_even(3)\nassert is_odd(3) and not is_odd(2)"),  # noqa: E501
        ("```python\ndef push(s, x): s.append(x)\ndef pop(s): return s.pop()\n```", "s = []\npush(s, 1)\npush(s, 2)\nassert pop(s) == 2 and s == [1]"),  # noqa: E501
        ("```python\ndef area(w, h): return w * h\ndef square(w): return area(w, w)\n```", "assert square(3) == area(3, 3) == 9"),
        ("```python\nclass A:\n    def f(self): return 'A'\nclass B(A):\n    def f(self): return 'B' + super().f()\n```", "assert B().f() == 'BA' and A().f() == 'A'"),  # noqa: E501
        ("```python\nclass Celsius:\n    def __init__(s, t=0): s.t = t\n    @property\n    def f(s): return s.t * 9 / 5 + 32\n    @f.setter\n    def f(s, v): s.t = (v - 32) * 5 / 9\n```", "c = Celsius(100)\nassert c.f == 212\nc.f = 32\nassert c.t == 0"),  # noqa: E501
        ("```python\nclass S:\n    _i = None\n    def __new__(cls):\n        if cls._i is None: cls._i = super().__new__(cls)\n        return cls._i\n```", "assert S() is S()"),  # noqa: E501
        ("```python\nclass Q:\n    def __init__(s): s.a, s.b = [], []\n    def put(s, x): s.a.append(x)\n    def get(s):\n        if not s.b:\n            while s.a: s.b.append(s.a.pop())\n        return s.b.pop()\n    def empty(s): return not s.a and not s.b\n```", "q = Q()\nq.put(1); q.put(2)\nassert q.get() == 1\nassert not q.empty()\nassert q.get() == 2 and q.empty()"),  # noqa: E501
        ("```python\nclass LRU:\n    def __init__(s, n):\n        from collections import OrderedDict\n        s.n, s.d = n, OrderedDict()\n    def get(s, k):\n        if k not in s.d: return -1\n        s.d.move_to_end(k)\n        return s.d[k]\n    def put(s, k, v):\n        s.d[k] = v\n        s.d.move_to_end(k)\n        if len(s.d) > s.n: s.d.popitem(last=False)\n```", "c = LRU(2)\nc.put(1, 1); c.put(2, 2)\nassert c.get(1) == 1\nc.put(3, 3)\nassert c.get(2) == -1 and c.get(3) == 3"),  # noqa: E501
        ("```python\nclass Vec:\n    def __init__(s, *a): s.a = a\n    def dot(s, o): return sum(x * y for x, y in zip(s.a, o.a))\n    def __repr__(s): return f'Vec{s.a}'\n```", "assert Vec(1, 2).dot(Vec(3, 4)) == 11 and repr(Vec(1, 2)) == 'Vec(1, 2)'"),  # noqa: E501
        ("```python\nfrom abc import ABC, abstractmethod\nclass Shape(ABC):\n    @abstractmethod\n    def area(s): ...\nclass Sq(Shape):\n    def __init__(s, a): s.a = a\n    def area(s): return s.a ** 2\n```", "assert Sq(3).area() == 9\ntry:\n    Shape()\n    assert False\nexcept TypeError:\n    pass"),  # noqa: E501
        ("```python\nclass Bank:\n    class Poor(Exception): pass\n    def __init__(s): s.b = 0\n    def take(s, x):\n        if x > s.b: raise Bank.Poor('no')\n        s.b -= x\n```", "b = Bank()\ntry:\n    b.take(1)\n    ok = False\nexcept Exception as e:\n    ok = str(e) == 'no'\nassert ok"),  # noqa: E501
        ("```python\nclass Trie:\n    def __init__(s): s.r = {}\n    def insert(s, w):\n        n = s.r\n        for c in w: n = n.setdefault(c, {})\n        n['$'] = 1\n    def search(s, w):\n        n = s.r\n        for c in w:\n            if c not in n: return False\n            n = n[c]\n        return '$' in n\n    def startsWith(s, w):\n        n = s.r\n        for c in w:\n            if c not in n: return False\n            n = n[c]\n        return True\n```", "t = Trie()\nt.insert('ab')\nassert t.search('ab') and not t.search('a') and t.startsWith('a')"),  # noqa: E501
        ("```python\nclass Solution:\n    def twoSum(self, nums, target):\n        d = {}\n        for i, x in enumerate(nums):\n            if target - x in d: return [d[target - x], i]\n            d[x] = i\n```", {'inputs': [[[2, 7], 9]], 'outputs': [[0, 1]], 'fn_name': 'twoSum'}),  # noqa: E501
        ("```python\nimport dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int\n    y: int = 0\n    def norm(s): return abs(s.x) + abs(s.y)\n```", "p = P(1, y=-2)\nassert p.norm() == 3 and p.x == 1\nassert str(p) == 'P(x=1, y=-2)'"),  # noqa: E501
        ("```python\ndef memo(g):\n    c = {}\n    def h(n):\n        if n not in c: c[n] = g(n)\n        return c[n]\n    h.cache = c\n    return h\n```", "n = []\n@memo\ndef sq(x):\n    n.append(x)\n    return x * x\nassert sq(3) == 9 and sq(3) == 9 and n == [3] and sq.cache == {3: 9}"),  # noqa: E501
        ("```python\nimport inspect\ndef arity(g): return len(inspect.signature(g).parameters)\ndef curry(g):\n    def h(*a): return g(*a) if len(a) >= g.__code__.co_argcount else lambda *b: h(*a, *b)\n    return h\n```", "assert curry(lambda a, b: a + b)(1)(2) == 3\nassert arity(lambda a, b=1: 0) == 2"),  # noqa: E501
        ("```python\nclass Obs:\n    def __init__(s): s.l = []\n    def add(s, g): s.l.append(g)\n    def remove(s, g): s.l.remove(g)\n    def fire(s, x):\n        for g in s.l: g(x)\n```", "got = []\ndef h(x): got.append(x)\no = Obs()\no.add(h)\no.fire(1)\no.remove(h)\no.fire(2)\nassert got == [1]"),  # noqa: E501
    ],
    "numbers": [
        ("```python\ndef f(n): return 2 ** n\n```", "assert f(5000) == 2 ** 5000 and f(64) == 18446744073709551616"),
        ("```python\ndef f(n):\n    r = 1\n    for i in range(2, n + 1): r *= i\n    return r\n```", "import math\nassert f(1000) == math.factorial(1000)"),  # noqa: E501
        ("```python\ndef f(a, b): return divmod(a, b)\n```", "assert f(10**40, 7) == divmod(10**40, 7) and f(-7, 2) == (-4, 1)"),
        ("```python\nfrom fractions import Fraction\ndef f(a, b): return Fraction(a, b)\n```", "from fractions import Fraction\nassert f(1, 3) + f(1, 6) == Fraction(1, 2) and f(2, 4).numerator == 1"),  # noqa: E501
        ("```python\nfrom decimal import Decimal, getcontext\ndef f(n):\n    getcontext().prec = n\n    return Decimal(1) / Decimal(7)\n```", "assert str(f(10)) == '0.1428571429'"),  # noqa: E501
        ("```python\ndef f(x): return complex(x, 1) ** 2\n```", "assert f(2) == 3 + 4j and abs(f(0)) == 1"),
        ("```python\ndef f(s): return int(s, 2)\n```", "assert f('1' * 100) == 2 ** 100 - 1"),
        ("```python\ndef f(n): return str(n)[::-1]\n```", "assert f(10 ** 5000)[-1] == '1'"),
        ("```python\ndef f(): return float('inf')\n```", "assert f() == float('inf')"),
        ("```python\nimport math\ndef f(): return -math.inf\n```", "import math\nassert f() == -math.inf"),
        ("```python\ndef f(): return float('nan')\n```", "import math\nassert math.isnan(f())"),
        ("```python\ndef f(): return [1e308 * 10]\n```", "assert f()[0] == float('inf')"),
        ("```python\ndef f(g, s, d):\n    D = {v: float('inf') for v in g}\n    D[s] = 0\n    for _ in g:\n        for u in g:\n            for v, w in g[u].items(): D[v] = min(D[v], D[u] + w)\n    return D[d]\n```", "assert f({'a': {'b': 2}, 'b': {}}, 'a', 'b') == 2\nassert f({'a': {}, 'b': {}}, 'a', 'b') == float('inf')"),  # noqa: E501
        ("```python\ndef f(x): return 0.1 + x\n```", "assert abs(f(0.2) - 0.3) < 1e-9"),
        ("```python\ndef f(x): return x / 3\n```", "import math\nassert math.isclose(f(1), 1/3, rel_tol=1e-9)"),
        ("```python\ndef f(x): return -0.0\n```", "assert f(1) == 0"),
        ("```python\ndef f(x): return 1e-320\n```", "assert 0 < f(1) < 1e-300"),
        ("```python\ndef f(x): return True\n```", "assert f(1) is True"),
        ("```python\ndef f(n): return n & -n\n```", "assert f(-2**70) == 2**70"),
    ],
    "recursion": [
        ("```python\nimport sys\nsys.setrecursionlimit(100000)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)\n```", "assert f(20000) == 20000"),  # noqa: E501
        ("```python\nimport sys\nsys.setrecursionlimit(10**9)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)\n```", "assert f(30000) == 30000"),  # noqa: E501
        ("```python\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)\n```", "assert f(800) == 800"),
        ("```python\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)\n```", "try:\n    f(10**6)\n    assert False\nexcept RecursionError:\n    pass"),  # noqa: E501
        ("```python\nimport sys\nsys.setrecursionlimit(50000)\nclass N:\n    def __init__(s, n): s.n = n\n    def d(s): return 1 + s.n.d() if s.n else 1\ndef f(k):\n    x = None\n    for _ in range(k): x = N(x)\n    return x.d()\n```", "assert f(10000) == 10000"),  # noqa: E501
        ("```python\ndef f(n):\n    a = []\n    for _ in range(n): a = [a]\n    return a\n```", "a = f(5000)\nn = 0\nwhile a: a = a[0]; n += 1\nassert n == 5000"),  # noqa: E501
        ("```python\ndef f(a):\n    n = 0\n    while a: a = a[0]; n += 1\n    return n\n```", "a = []\nfor _ in range(3000): a = [a]\nassert f(a) == 3000"),  # noqa: E501
        ("```python\nimport sys, threading\ndef f(n):\n    out = []\n    def go(k): return 0 if k == 0 else 1 + go(k - 1)\n    sys.setrecursionlimit(1 << 20)\n    threading.stack_size(128 << 20)\n    t = threading.Thread(target=lambda: out.append(go(n)))\n    t.start(); t.join()\n    return out[0]\n```", "assert f(40000) == 40000"),  # noqa: E501
        ("```python\nfrom functools import cache\n@cache\ndef f(n): return n if n < 2 else f(n - 1) + f(n - 2)\n```", "assert f(90) == 2880067194370816120\nassert f.cache_info().misses == 91"),  # noqa: E501
        ("```python\ndef f(n, m={}):\n    if n not in m: m[n] = n if n < 2 else f(n - 1) + f(n - 2)\n    return m[n]\n```", "assert f(300) % 1000 == 600"),  # noqa: E501
    ],
    "threads": [
        ("```python\nimport threading\nclass C:\n    def __init__(s):\n        s.n = 0\n        s.l = threading.Lock()\n    def inc(s):\n        with s.l: s.n += 1\n```", "import threading\nc = C()\nts = [threading.Thread(target=c.inc) for _ in range(10)]\n[t.start() for t in ts]\n[t.join() for t in ts]\nassert c.n == 10"),  # noqa: E501
        ("```python\nimport threading\nlocal = threading.local()\ndef f(x):\n    local.v = x\n    return local.v\n```", "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(3) as p:\n    assert sorted(p.map(f, range(6))) == list(range(6))"),  # noqa: E501
        ("```python\nimport queue, threading\ndef f(xs):\n    q, out = queue.Queue(), []\n    def w():\n        while (x := q.get()) is not None: out.append(x * 2)\n    t = threading.Thread(target=w)\n    t.start()\n    for x in xs: q.put(x)\n    q.put(None)\n    t.join()\n    return out\n```", "assert f([1, 2]) == [2, 4]"),  # noqa: E501
        ("```python\nfrom concurrent.futures import ThreadPoolExecutor\ndef f(g, xs):\n    with ThreadPoolExecutor(4) as p: return list(p.map(g, xs))\n```", "assert f(lambda x: x + 1, [1, 2, 3]) == [2, 3, 4]"),  # noqa: E501
        ("```python\nimport threading\ndef f():\n    e = threading.Event()\n    threading.Timer(0.01, e.set).start()\n    return e.wait(5)\n```", "assert f() is True"),  # noqa: E501
        ("```python\nimport threading\ndef f(n):\n    b, out = threading.Barrier(n), []\n    def w(i):\n        b.wait()\n        out.append(i)\n    ts = [threading.Thread(target=w, args=(i,)) for i in range(n)]\n    [t.start() for t in ts]; [t.join() for t in ts]\n    return sorted(out)\n```", "assert f(4) == [0, 1, 2, 3]"),  # noqa: E501
        ("```python\nimport asyncio\nasync def w(q, out):\n    while True:\n        x = await q.get()\n        if x is None: return\n        out.append(x)\ndef f(xs):\n    async def main():\n        q, out = asyncio.Queue(), []\n        t = asyncio.create_task(w(q, out))\n        for x in [*xs, None]: await q.put(x)\n        await t\n        return out\n    return asyncio.run(main())\n```", "assert f([1, 2]) == [1, 2]"),  # noqa: E501
        ("```python\nimport time\ndef f(x):\n    time.sleep(0.05)\n    return x\n```", "import time\nt = time.time()\nassert f(3) == 3\nassert time.time() - t >= 0.04"),  # noqa: E501
    ],
    "processes, which are threads": [
        ("```python\nfrom multiprocessing import Pool\ndef g(x): return x*x\nif __name__=='__main__':\n    with Pool(4) as p: print(sum(p.map(g, range(int(input())))))\n```", {'inputs': ['5'], 'outputs': ['30']}),  # noqa: E501
        ("```python\nimport multiprocessing as mp\ndef g(q,x): q.put(x*x)\nif __name__=='__main__':\n    q=mp.Queue(); ps=[mp.Process(target=g,args=(q,i)) for i in range(4)]\n    for p in ps: p.start()\n    for p in ps: p.join()\n    print(sum(q.get() for _ in ps))\n```", {'inputs': [''], 'outputs': ['14']}),  # noqa: E501
        ("```python\nimport multiprocessing as mp\ndef g(v):\n    for _ in range(10):\n        with v.get_lock(): v.value+=1\nv=mp.Value('i',0)\nps=[mp.Process(target=g,args=(v,)) for _ in range(3)]\nfor p in ps: p.start()\nfor p in ps: p.join()\nprint(v.value)\n```", {'inputs': [''], 'outputs': ['30']}),  # noqa: E501
        ("```python\nfrom concurrent.futures import ProcessPoolExecutor\ndef g(x): return x+1\ndef f(xs):\n    with ProcessPoolExecutor() as ex: return list(ex.map(g,xs))\n```", "assert f([1,2])==[2,3]"),  # noqa: E501
        ("```python\nfrom multiprocessing.pool import ThreadPool\nwith ThreadPool(3) as p: print(p.map(lambda x:x*x, range(4)))\n```", {'inputs': [''], 'outputs': ['[0, 1, 4, 9]']}),  # noqa: E501
    ],
    "streams and ends of a script": [
        ("```python\nimport os,sys,threading\ndef main():\n    print(int(input())*2)\n    sys.stdout.flush()\n    os._exit(0)\nt=threading.Thread(target=main); t.start(); t.join()\n```", {'inputs': ['3', '5'], 'outputs': ['6', '10']}),  # noqa: E501
        ("```python\nimport os, sys\nfrom io import BytesIO, IOBase\nBUFSIZE=8192\nclass FastIO(IOBase):\n    newlines=0\n    def __init__(self,file):\n        self._fd=file.fileno()\n        self.buffer=BytesIO()\n        self.writable='x' in file.mode or 'r' not in file.mode\n        self.write=self.buffer.write if self.writable else None\n    def read(self):\n        while True:\n            b=os.read(self._fd,max(os.fstat(self._fd).st_size,BUFSIZE))\n            if not b: break\n            ptr=self.buffer.tell()\n            self.buffer.seek(0,2),self.buffer.write(b),self.buffer.seek(ptr)\n        self.newlines=0\n        return self.buffer.read()\n    def readline(self):\n        while self.newlines==0:\n            b=os.read(self._fd,max(os.fstat(self._fd).st_size,BUFSIZE))\n            self.newlines=b.count(b'\\n')+(not b)\n            ptr=self.buffer.tell()\n            self.buffer.seek(0,2),self.buffer.write(b),self.buffer.seek(ptr)\n        self.newlines-=1\n        return self.buffer.readline()\n    def flush(self):\n        if self.writable:\n            os.write(self._fd,self.buffer.getvalue())\n            self.buffer.truncate(0),self.buffer.seek(0)\nclass IOWrapper(IOBase):\n    def __init__(self,file):\n        self.buffer=FastIO(file)\n        self.flush=self.buffer.flush\n        self.writable=self.buffer.writable\n        self.write=lambda s:self.buffer.write(s.encode('ascii'))\n        self.read=lambda:self.buffer.read().decode('ascii')\n        self.readline=lambda:self.buffer.readline().decode('ascii')\nsys.stdin,sys.stdout=IOWrapper(sys.stdin),IOWrapper(sys.stdout)\ninput=lambda:sys.stdin.readline().rstrip('\\r\\n')\nn=int(input())\nfor _ in range(n): print(int(input())*3)\n```", {'inputs': ['2\n3\n4\n', '1\n5\n'], 'outputs': ['9\n12', '15']}),  # noqa: E501
        ("```python\nimport atexit\natexit.register(print,'bye')\nprint('hi')\n```", {'inputs': [''], 'outputs': ['hi\nbye']}),
        ("```python\nimport threading\nt=threading.Timer(0.05,lambda: print('late'))\nt.start()\nprint('early')\n```", {'inputs': [''], 'outputs': ['early\nlate']}),  # noqa: E501
    ],
    "files of the tests": [
        ("def f(p):\n    t = open(p).read()\n    open(p,'w').write(t.upper())", "open('a','w').write('ab')\nf('a')\nassert open('a').read() == 'AB'"),  # noqa: E501
        ("def f(p):\n    t = open(p).read()\n    open(p,'w').write(t.upper())", "open('a','w').write('ab')\nbefore = open('a').read()\nf('a')\nassert open('a').read() == before.upper()"),  # noqa: E501
        ("def f(p): return len(open(p).read())", "open('a','w').write('ab')\nassert f('a') == len(open('a').read())"),
        ("def save(p, x): open(p,'w').write(x)\ndef load(p): return open(p).read()", "for x in ('a', 'b'):\n    save('c', x)\n    assert open('c').read() == x and load('c') == x"),  # noqa: E501
        ("from collections import namedtuple\nP=namedtuple('P','text count')\ndef f(x): return P(x, len(x))", "assert f('ab').count == 2"),
        ("import heapq\ndef pop(h): return heapq.heappop(h)", "h = [1, 3, 2]\nout = []\nwhile h: out.append(pop(h))\nassert out == [1, 2, 3]"),  # noqa: E501
        ("def f(it): return [next(it) for _ in range(2)]", "it = iter(range(5))\nassert f(it) == [0, 1] and next(it) == 2"),
    ],
    "arguments that right programs change, and oracles that do not see it": [
        ("def push(h, x):\n    h.append(x)\n    h.sort()\ndef pop(h): return h.pop(0)", "data, h, out = [5, 1, 3], [], []\nfor x in data: push(h, x)\nassert h[0] == 1\nwhile h: out.append(pop(h))\nassert out == [1, 3, 5]"),  # noqa: E501
        ("def f(nums):\n    k = 0\n    for x in nums:\n        if not k or nums[k - 1] != x:\n            nums[k], k = x, k + 1\n    return k", "for nums, want in [([1, 1, 2], [1, 2]), ([], [])]:\n    k = f(nums)\n    assert k == len(want)\n    for i in range(k): assert nums[i] == want[i]"),  # noqa: E501
        ("def f(a): a.sort()", "import random\nfor n in range(9):\n    a = [random.randrange(9) for _ in range(n)]\n    want = sorted(a)\n    f(a)\n    assert a == want"),  # noqa: E501
        ("import json\ndef save(d, p): json.dump(d, open(p, 'w'))\ndef load(p): return json.load(open(p))", "import json, os\nd = {'a': [1, 2]}\nsave(d, 'd.json')\nwith open('d.json') as o: assert json.load(o) == d\nassert load('d.json') == d\nassert os.path.exists('d.json')"),  # noqa: E501
        ("def transfer(a, b, x):\n    a['sum'] -= x\n    b['sum'] += x\ndef total(*a): return sum(x['sum'] for x in a)", "a, b = {'sum': 9}, {'sum': 1}\nbefore = total(a, b)\ntransfer(a, b, 4)\nassert a['sum'] == 5 and b['sum'] == 5\nassert total(a, b) == before == 10"),  # noqa: E501
    ],
    "files and arguments that right programs change": [
        ("def f(p):\n    open(p,'w').write('x')", "import os\nf('out')\nassert os.path.exists('out') and open('out').read() == 'x'"),
        ("import os\ndef f(p): os.remove(p)", "import os\nopen('a','w').close()\nf('a')\nassert not os.path.exists('a')"),
        ("import os\ndef f(p):\n    n = len(open(p).read())\n    open(p + '.bak','w').close()\n    return n", "import os\nopen('a','w').write('abc')\nn = f('a')\nassert n == 3\nassert os.path.exists('a.bak')"),  # noqa: E501
        ("def f(a):\n    a.sort()\n    return a", "cases = [([3, 1], [1, 3]), ([2], [2])]\nfor a, want in cases:\n    assert f(a) == want"),
        ("def f(a):\n    a.sort()", "a = [3, 1]\nb = f(a) or a\nassert b == [1, 3]"),
        ("def f(a):\n    k = 0\n    for x in a:\n        if x != 3:\n            a[k] = x\n            k += 1\n    return k", "a = [3, 2, 2, 3]\nk = f(a)\nassert k == 2\nfor i in range(k):\n    assert a[i] == 2"),  # noqa: E501
        ("class Solution:\n    def f(self, a):\n        a.sort()\n        return len(a)", "s = Solution()\na = [3, 1]\nassert s.f(a) == 2 and a == [1, 3]"),  # noqa: E501
        ("def f(it): return next(it)", "it = iter([4, 9])\nstep = it.__next__\nassert f(it) == 4\nassert step() == 9"),
        ("def take(it, n): return [next(it) for _ in range(n)]", "def gen():\n    n = 0\n    while True:\n        yield n\n        n += 1\ng = gen()\nassert take(g, 2) == [0, 1] and next(g) == 2"),  # noqa: E501
    ],
    "exceptions and their parts": [
        ("import sys\ndef f(x): sys.exit(2)", "try:\n    f(1)\n    ok = False\nexcept SystemExit as e:\n    ok = e.code == 2\nassert ok"),
        ("def f(p): return open(p).read()", "import errno\ntry:\n    f('nosuch')\n    ok = False\nexcept OSError as e:\n    ok = e.errno == errno.ENOENT and e.filename == 'nosuch'\nassert ok"),  # noqa: E501
        ("def f(b): return b.decode('ascii')", "try:\n    f(b'\\xff')\n    ok = False\nexcept UnicodeDecodeError as e:\n    ok = e.start == 0\nassert ok"),  # noqa: E501
        ("def f(g):\n    g()", "class Stop(Exception): pass\ndef g(): raise Stop('x')\ntry:\n    f(g)\n    ok = False\nexcept Stop:\n    ok = True\nassert ok"),  # noqa: E501
        ("def f(x):\n    if x < 0: raise ValueError('neg')\n    return x", "assert f(1) == 1\ntry:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass"),  # noqa: E501
        ("def f(x):\n    if x < 0: raise ValueError('neg')\n    return x", "def test_a():\n    try:\n        f(-1)\n    except Exception as e:\n        assert type(e) is ValueError\n    else:\n        assert False"),  # noqa: E501
    ],
    "limits": [
        ("import resource, sys\nresource.setrlimit(resource.RLIMIT_STACK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\nsys.setrecursionlimit(10**6)\ndef d(n): return 0 if not n else 1 + d(n - 1)\nprint(d(int(input())))", {"inputs": ["20000"], "outputs": ["20000"]}),  # noqa: E501
        ("def f(n): return 0 if n == 0 else 1 + f(n - 1)", "import sys\nsys.setrecursionlimit(10**5)\nassert f(5000) == 5000"),
        ("def f(n): return 0 if n == 0 else 1 + f(n - 1)", "import sys\nassert f(10) == 10\nsys.setrecursionlimit(10**5)\nassert f(5000) == 5000"),  # noqa: E501
    ],
    "numbers and texts of cases": [
        ("def f(x): return bin(x)[2:]", {"inputs": [[5]], "outputs": ["101"], "fn_name": "f"}),
        ("def f(x): return x * x", {"inputs": [[2]], "outputs": ["4"], "fn_name": "f"}),
        ("import numpy as np\ndef f(a): return a // 2", "import numpy as np\nassert (f(np.array([4], dtype=np.uint8)) == 2).all()"),
        ("import numpy as np\ndef f(x): return np.int64(x) * 2", "assert f(2) == 4"),
        ("print(input()[::-1])", {'inputs': ['abc\n\n\n', 'x'], 'outputs': ['cba\n\n', 'x\n']}),
        ("def f(x): return x", [{'input': '"4"\n', 'output': '"4"', 'testtype': 'functional'}], "", "f"),
    ],
    "styles of tests": [
        ("def f(d): return d.keys()", "assert f({'a': 1, 'b': 2}) == {'a', 'b'}\nassert list(f({'z': 1})) == ['z']"),
        ("def f(d): return d.items()", "assert list(f({'b': [1], 'a': 2})) == [('b', [1]), ('a', 2)]\nassert len(f({})) == 0"),
        ("def f(x): return type(x)", "assert f('a') is str\nassert f(1) == int"),
        ("def f(x): return x * x", "import unittest\nclass Base(unittest.TestCase):\n    def setUp(self): self.x = 2\nclass T(Base):\n    def test_a(self): self.assertEqual(f(self.x), 4)\nunittest.main()"),  # noqa: E501
        ("def f(x): return x * x", "def main():\n    assert f(2) == 4\nif __name__ == '__main__':\n    main()"),
        ("def f(x): return x * x", "import sys\nif f(2) != 4:\n    sys.exit(1)\nsys.exit(0)"),
        ("def f(x): return x * x", "def test(x, want):\n    assert f(x) == want\ntest(2, 4)"),
        ("def f(n): return f'({n} + 1) * 2'", "assert eval(f(5)) == 12"),
        ("import random\ndef f(xs): return random.choice(xs)", "import random\nrandom.seed(5)\nassert f([1, 2]) in [1, 2]"),
        ("def f(xs): return [x for x in xs if x % 2 == 0]", "for x in f([1, 2]):\n    assert x % 2 == 0\nassert f([]) == []\nassert f([1, 3]) == []"),  # noqa: E501
        ("def f(x): return x * x", "import unittest\nclass T(unittest.TestCase):\n    def same(self, x, y): self.assertEqual(f(x), y)\n    def test_a(self):\n        self.same(2, 4)\n        self.same(3, 9)"),  # noqa: E501
        ("def f(x): return x * x\ndef g(x): return -x", "def both(x):\n    yield f(x)\n    yield g(x)\nassert list(both(2)) == [4, -2]"),
        ("def f(x): return x * x", "import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.x = 2\n    def test_a(self):\n        for x in (2, 3):\n            with self.subTest(x=x):\n                self.assertEqual(f(x), x * x)\n        self.assertEqual(f(self.x), 4)"),  # noqa: E501
        ("def f(x): return x * x", "import time\nt = time.time()\nfor i in range(5):\n    assert f(i) == i * i\nassert time.time() - t < 5"),  # noqa: E501
        ("def f(xs): return sorted(xs)", "import random\nrandom.seed(1)\nfor _ in range(5):\n    xs = [random.random() for _ in range(9)]\n    assert f(xs) == sorted(xs)"),  # noqa: E501
        ("def f(g, xs): return [g(x) for x in xs]", "xs = [1, 2]\nassert f(lambda x: x * 2, xs) == [x * 2 for x in xs]\nif xs:\n    assert f(str, xs) == ['1', '2']"),  # noqa: E501
    ],
    "arguments that right programs sort in place": [
        ("class Solution:\n    def f(self, a):\n        a.sort()\n        return a[0]", {"inputs": [[[3, 1]], [[5, 4]]], "outputs": [1, 4], "fn_name": "f"}),  # noqa: E501
        ("def f(a):\n    a.sort()\n    return a[0]", "CASES = [([3, 1], 1), ([5, 4], 4)]\ndef test_a():\n    for a, want in CASES:\n        assert f(a) == want"),  # noqa: E501
        ("def f(a):\n    a.sort()\n    return a[0]", "def check(candidate):\n    a = [3, 1]\n    assert candidate(a) == 1\n    a = [5, 4]\n    assert candidate(a) == 4", "def f(a):\n", "f"),  # noqa: E501
        ("def f(a):\n    a.sort()\n    return a[0]", "def run(a, want):\n    got = f(a)\n    if got != want: raise AssertionError\nrun([3, 1], 1)\nrun([5, 4], 4)"),  # noqa: E501
        ("def f(a):\n    a.sort()\n    return a[0]", "def run(a, want):\n    if want is None: return\n    assert f(a) == want\nrun([3, 1], 1)"),  # noqa: E501
        ("def f(a):\n    a.sort()\n    return a[0]", "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        for a, want in [([3, 1], 1)]:\n            with self.subTest(a=a):\n                self.assertEqual(f(a), want)"),  # noqa: E501
        ("def f(a):\n    a.sort()\n    return a[0]", "ins, outs = [[3, 1], [5, 4]], [1, 4]\nfor i in range(len(ins)):\n    assert f(ins[i]) == outs[i]"),  # noqa: E501
        ("def f(a):\n    a.sort()\n    return a[0]", "ins, outs = [[3, 1], [5, 4]], [1, 4]\nassert all(f(a) == b for a, b in zip(ins, outs))"),  # noqa: E501
        ("def f(a):\n    a.sort()\n    return a", "import copy\na = [3, 1]\nb = copy.deepcopy(a)\nassert f(a) == sorted(b)"),
        ("def f(a):\n    a.sort()\n    return a", "a = [3, 1]\nb = a[:]\nassert f(a) == sorted(b)"),
        ("def f(a):\n    a.sort()\n    return a", "import random\nrandom.seed(0)\nfor _ in range(5):\n    a = [random.random() for _ in range(4)]\n    want = sorted(a)\n    assert f(a) == want"),  # noqa: E501
    ],
    "forms of pytest": [
        ("def f(x): return x * x", "import pytest\n@pytest.mark.parametrize('x, want', [(2, 4), pytest.param(3, 9)])\n@pytest.mark.parametrize('k', [1])\ndef test_a(x, want, k):\n    assert f(x) * k == want"),  # noqa: E501
        ("def f(x): return x * x", "import pytest\n@pytest.fixture\ndef one(): return 1\n@pytest.fixture\ndef two(one):\n    yield one + 1\n    assert f(3) == 9\ndef test_a(two):\n    assert f(two) == 4"),  # noqa: E501
        ("def f(x): return x * x", "import pytest\nx = 0\n@pytest.fixture(autouse=True)\ndef ready():\n    global x\n    x = 2\ndef test_a():\n    assert f(x) == 4"),  # noqa: E501
        ("def f(x): return x * x", "class TestF:\n    def setup_method(self): self.x = 2\n    def test_a(self):\n        assert f(self.x) == 4\ndef setup_module():\n    assert f(1) == 1"),  # noqa: E501
        ("def f(x): return x * x", "import pytest\n@pytest.mark.skip\ndef test_a():\n    assert f('a') == 1\n@pytest.mark.xfail\ndef test_b():\n    assert f(2) == 5\ndef test_c():\n    assert f(2) == 4"),  # noqa: E501
        ("def f(x): print(x)", "def test_a(capsys):\n    f(2)\n    assert capsys.readouterr().out == '2\\n'"),
        ("def f(g):\n    print('a')\n    g()\n    print('c')", "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n    f(lambda: print('b'))\nassert out.getvalue() == 'a\\nb\\nc\\n'"),  # noqa: E501
    ],
    "random numbers that tests seed": [
        ("import random\ndef f(): return random.randint(1, 6)", "import random\nrandom.seed(42)\nassert f() == 6\nassert f() == 1"),
        ("import numpy as np\ndef f(n): return np.random.rand(n)", "import numpy as np\nnp.random.seed(0)\nwant = np.random.rand(3)\nnp.random.seed(0)\nassert np.allclose(f(3), want)"),  # noqa: E501
    ],
    "values of the standard library and of numpy": [
        ("from array import array\ndef f(n): return array('i', range(n))\ndef g(a): a.append(3)", "from array import array\nassert list(f(3)) == [0, 1, 2]\na = array('b', [1])\ng(a)\nassert a.tolist() == [1, 3]"),  # noqa: E501
        ("from pathlib import Path\ndef f(a, b): return Path(a) / b", "assert str(f('a', 'b')) == 'a/b' and f('/', 'x').name == 'x'"),
        ("import numpy as np\ndef f(): return np.array(['a', 'b'])", "assert list(f()) == ['a', 'b']"),
        ("import numpy as np\ndef f(x): return np.exp(x)", "import numpy as np\nassert np.isclose(f(50), 5.184705528587072e21)\nassert f(0) == 1"),  # noqa: E501
        ("class E:\n    def __init__(s): s.h = []\n    def on(s, f): s.h.append(f)\n    def off(s, f): s.h.remove(f)", "e, got = E(), []\ne.on(got.append)\ne.off(got.append)\nassert len(e.h) == 0"),  # noqa: E501
    ],
    "objects whose own methods are tested": [
        ("class V:\n    def __init__(s, x, y): s.x, s.y = x, y\n    def __abs__(s): return (s.x ** 2 + s.y ** 2) ** 0.5", "assert abs(V(3, 4)) == 5"),  # noqa: E501
        ("class N:\n    def __init__(s, v, n=None): s.v, s.n = v, n\nclass L:\n    def __init__(s): s.head = None\n    def push(s, v): s.head = N(v, s.head)", "a = L()\na.push(1)\na.push(2)\nn, got = a.head, []\nwhile n:\n    got.append(n.v)\n    n = n.n\nassert got == [2, 1]"),  # noqa: E501
        ("class Q:\n    def __init__(s, a): s.a = a\n    def where(s, f): return Q([*filter(f, s.a)])\n    def all(s): return s.a", "assert Q([1, 2, 3]).where(lambda x: x > 1).all() == [2, 3]"),  # noqa: E501
        ("class S:\n    def __init__(s, log): s.log = log\n    def __enter__(s): return s\n    def __exit__(s, t, e, b):\n        s.log.append(str(e))\n        return t is ValueError", "log = []\nwith S(log):\n    raise ValueError('no')\nassert log == ['no']\ntry:\n    with S(log):\n        raise KeyError(3)\nexcept KeyError:\n    log.append('out')\nassert log == ['no', '3', 'out']"),  # noqa: E501
        ("from contextlib import contextmanager\n@contextmanager\ndef f(d):\n    d.append(1)\n    try: yield d\n    finally: d.pop()", "d = []\ntry:\n    with f(d):\n        assert d == [1]\n        raise RuntimeError\nexcept RuntimeError:\n    pass\nassert d == []"),  # noqa: E501
    ],
    "containers that the program goes on changing": [
        ("class S:\n    def __init__(s): s.items = []\n    def push(s, x): s.items.append(x)", "s = S()\nassert s.items == []\ns.push(1)\nassert s.items == [1]\nseen = s.items\ns.push(2)\nassert s.items == [1, 2] and len(seen) > 0"),  # noqa: E501
        ("def put(d, k, v): d.setdefault(k, []).append(v)\ndef get(d): return [*d['a']]", "d = {}\nput(d, 'a', 1)\nput(d, 'a', 2)\nassert d == {'a': [1, 2]}\nassert get(d) == [1, 2]"),  # noqa: E501
        ("def make(): return {}\ndef put(d, k, v): d.setdefault(k, []).append(v)", "d = make()\nput(d, 'a', 1)\nput(d, 'a', 2)\nassert d == {'a': [1, 2]}"),  # noqa: E501
        ("class V:\n    def __init__(s, t): s.p = tuple(map(int, t.split('.')))\n    def up(s): return V('.'.join(map(str, (*s.p[:-1], s.p[-1] + 1))))\n    def __str__(s): return '.'.join(map(str, s.p))", "assert str(V('1.9').up()) == '1.10'"),  # noqa: E501
    ],
    "names imported from the solution": [
        ("TIME = 40\ndef f(x):\n    'Minutes left.'\n    return TIME - x", "import unittest\nfrom solution import TIME, f\nclass A(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(TIME, 40)\n        self.assertEqual(f(10), 30)\n        self.assertIsNotNone(f.__doc__)"),  # noqa: E501
        ("class Under(BufferError): pass\ndef f(s):\n    if not s: raise Under('too few')\n    return s[-1]", "import unittest\nfrom solution import Under, f\nclass A(unittest.TestCase):\n    def test_a(self):\n        with self.assertRaises(Under) as e:\n            f([])\n        self.assertEqual(type(e.exception), Under)\n        self.assertEqual(e.exception.args[0], 'too few')\n        with self.assertRaises(BufferError) as e:\n            f([])\n        self.assertEqual(type(e.exception), Under)\n        self.assertEqual(f([3]), 3)"),  # noqa: E501
    ],
    "the type of a value that is no exception": [
        ("class Leaf:\n    def __init__(s, v): s.value = v\ndef f(x): return Leaf(x)", "from solution import Leaf, f\nassert type(f(2).value) == int\nassert f(2).value == 2 and Leaf(3).value == 3"),  # noqa: E501
    ],
    "what the tests themselves skip or format": [
        ("def f(x): return x * x", "import unittest\nclass A(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(f(2), 4)\n    @unittest.skip('slow')\n    def test_b(self):\n        self.assertEqual(f(3), 9)"),  # noqa: E501
        ("def f(x): return [x, x * x]", "import unittest\nclass A(unittest.TestCase):\n    def test_a(self):\n        got = f(2)\n        text = 'from {} to {}'\n        text = text.format(got[0], got[1])\n        self.assertEqual(got, [2, 4], text)"),  # noqa: E501
    ],
    "names that libraries have, too": [
        ("def f(d, more): d.update(more)", "base, patch = {'a': 1}, {'b': 2}\nf(base, patch)\nassert base == {'a': 1, 'b': 2}\nassert patch == {'b': 2}"),  # noqa: E501
    ],
    "a round trip in another case of letters": [
        ("D = {'S': '...', 'O': '---'}\ndef f(s): return ' '.join(D[c] for c in s.upper())\ndef g(m): return ''.join({v: k for k, v in D.items()}[c] for c in m.split())", "assert f('so') == '... ---'\nassert g(f('sos')) == 'SOS'"),  # noqa: E501
    ],
    "a helper of the tests that is called check": [
        ("def f(x): return x * x", "def check(x, want):\n    got = f(x)\n    assert got == want\ndef test_a():\n    check(2, 4)\n    check(3, 9)"),  # noqa: E501
    ],
    "names of the library that the program defines": [
        ("def gcd(a, b):\n    while b: a, b = b, a % b\n    return a\ndef lcm(a, b): return a * b // gcd(a, b)", "import math\nassert gcd(4, 6) == math.gcd(4, 6)\nassert gcd(4, 6) * lcm(4, 6) == 24"),  # noqa: E501
        ("def log(m): print('LOG', m)", "def test_log(capsys):\n    log('x')\n    assert capsys.readouterr().out == 'LOG x\\n'"),
    ],
    "checks that the tests' own decision skips": [
        ("def f(x): return x * x", "def same(a, b):\n    if isinstance(a, float):\n        assert abs(a - b) < 1e-9\n        return\n    if isinstance(a, list):\n        assert len(a) == len(b)\n    else:\n        assert a == b\nsame(f(2), 4)\nsame(f(3), 9)"),  # noqa: E501
        ("def f(x): return x * x", "import unittest\nDEEP = False\nclass TestF(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(f(2), 4)\n        if DEEP:\n            self.assertEqual(f(3), 9)\n    @unittest.expectedFailure\n    def helper(self):\n        self.assertEqual(f(3), 8)"),  # noqa: E501
        ("def f(x):\n    if x < 0: raise ValueError('negative')\n    return x ** 0.5", "def test_f():\n    for x in (4, -1):\n        try:\n            got = f(x)\n        except ValueError as error:\n            assert x < 0 and 'negative' in str(error)\n        else:\n            assert got == 2\ndef test_g():\n    assert f(9) == 3\ndef test_f():\n    assert f(4) == 2"),  # noqa: E501
    ],
    "objects of the prompt's class next to others": [
        ("class Solution:\n    def f(self, head):\n        last = None\n        while head: head.next, last, head = last, head, head.next\n        return last", "def values(n):\n    out = []\n    while n:\n        out.append(n.val); n = n.next\n    return out\nfor k in (2, 3):\n    h = None\n    for x in range(k): h = ListNode(x, h)\n    assert values(Solution().f(h)) == list(range(k))", "class ListNode:\n    def __init__(self, val=0, next=None):\n        self.val = val\n        self.next = next\n", "Solution().f"),  # noqa: E501
    ],
    "a source of random numbers as an argument": [
        ("def f(a, rng):\n    a = list(a)\n    rng.shuffle(a)\n    return a", "import random\nrng, own = random.Random(3), random.Random(3)\nfor _ in range(3):\n    want = list(range(9))\n    own.shuffle(want)\n    assert f(range(9), rng) == want\nassert rng.random() == own.random()"),  # noqa: E501
        ("class Deck:\n    def __init__(s, rng): s.rng, s.cards = rng, [*range(9)]\n    def draw(s): return s.cards.pop(s.rng.randrange(len(s.cards)))", "import random\na, b = Deck(random.Random(3)), Deck(random.Random(3))\none, other = [a.draw() for _ in range(9)], [b.draw() for _ in range(9)]\nassert one == other\nassert sorted(one) == [*range(9)]"),  # noqa: E501
    ],
    "what a context manager of the program gives": [
        ("class ignoring:\n    def __init__(s, *kinds): s.kinds, s.seen = kinds, []\n    def __enter__(s): return s.seen\n    def __exit__(s, kind, error, _):\n        if kind and issubclass(kind, s.kinds):\n            s.seen.append(str(error))\n            return True", "with ignoring(KeyError) as seen:\n    {}['x']\nassert seen == [\"'x'\"]\nwith ignoring(ZeroDivisionError) as seen:\n    1 / 0\nassert len(seen) == 1"),  # noqa: E501
        ("class Change:\n    def __init__(s, data): s.data = data\n    def __enter__(s):\n        s.work = dict(s.data)\n        return s.work\n    def __exit__(s, kind, *_):\n        if kind is None: s.data.update(s.work)", "data = {'x': 1}\nwith Change(data) as work:\n    work['x'] = 2\n    assert data['x'] == 1\nassert data == {'x': 2}\ntry:\n    with Change(data) as work:\n        work['x'] = 9\n        raise RuntimeError\nexcept RuntimeError:\n    assert data == {'x': 2}"),  # noqa: E501
    ],
    "what is in a part of the tests' own": [
        ("def path(g, a, b): return ['a', 'b', 'd']", "g = {'a': ['b'], 'b': ['d'], 'c': ['d'], 'd': []}\np = path(g, 'a', 'd')\nassert len(p) == 3 and p[0] == 'a' and p[-1] == 'd'\nfor x, y in zip(p, p[1:]):\n    assert y in g[x]"),  # noqa: E501
    ],
    "an iterator that has to end": [
        ("def f(n): yield from range(n)", "it = f(2)\nassert next(it) == 0 and next(it) == 1\nassert next(it, None) is None\nassert next(it, 'end') == 'end'"),  # noqa: E501
    ],
    "shapes of arrays": [
        ("import numpy as np\ndef mean(x): return x.mean(axis=0)\ndef unit(n): return np.eye(n)", "import numpy as np\nx = np.array([[1., 2.], [3., 4.]])\nassert np.allclose((x - mean(x)).sum(axis=0), 0)\nassert np.allclose(mean(x), [2, 3])\nassert (mean(x) - np.array([2, 3]) == 0).all()\nassert ((unit(2) == 0) | (unit(2) == 1)).all() and unit(2).sum() == 2\nassert np.allclose(mean(np.array([[5.]])), [[5.]])"),  # noqa: E501
    ],
    "exceptions of the library, and of two kinds": [
        ("import json\ndef f(s): return json.loads(s)", "import json, pytest\nassert f('[1]') == [1]\nwith pytest.raises(json.JSONDecodeError) as e:\n    f('{')\nassert e.value.pos == 1"),  # noqa: E501
        ("import numpy as np\ndef f(s): return np.linalg.inv(s)", "import numpy as np, pytest\nassert f(np.eye(1)) == 1\nwith pytest.raises(np.linalg.LinAlgError):\n    f(np.zeros((2, 2)))"),  # noqa: E501
        ("from dataclasses import dataclass\n@dataclass(frozen=True)\nclass P:\n    x: int", "import pytest\nfrom dataclasses import FrozenInstanceError\np = P(3)\nassert p.x == 3\nwith pytest.raises(FrozenInstanceError):\n    p.x = 4"),  # noqa: E501
        ("class E(KeyError, ValueError): pass\ndef f(s):\n    if s: raise E(s)\n    return 3", "import pytest\nassert f(0) == 3\nwith pytest.raises(ValueError):\n    f('x')\nwith pytest.raises(KeyError):\n    f('x')"),  # noqa: E501
    ],
    "what a failed call has changed": [
        ("def f(a):\n    while True: a.pop()", "import pytest\na = [1, 2]\nwith pytest.raises(IndexError): f(a)\nassert a == []"),
    ],
    "random numbers that tests seed twice": [
        ("import random\ndef f(x):\n    x = list(x)\n    random.shuffle(x)\n    return x", "import random\nrandom.seed(3)\na = f([1, 2, 3, 4, 5])\nrandom.seed(3)\nb = f([1, 2, 3, 4, 5])\nassert a == b\nassert sorted(a) == [1, 2, 3, 4, 5]"),  # noqa: E501
        ("import numpy as np\ndef f(n): return np.random.rand(n)", "import numpy as np\nnp.random.seed(3)\na = f(4)\nnp.random.seed(3)\nb = f(4)\nassert (a == b).all()\nassert a.shape == (4,) and 0 <= a.min()"),  # noqa: E501
    ],
    "kinds of the prompt's classes": [
        ("def f(): return Pt(1, 2)\ndef g(p): return isinstance(p, Pt)", "r = f()\nassert isinstance(r, Pt) and r == (1, 2) and r.x == 1\nassert g(Pt(1, 2)) is True", "from typing import NamedTuple\nclass Pt(NamedTuple):\n    x: int\n    y: int\n"),  # noqa: E501
        ("def f(): return Perm.R | Perm.W", "assert f() == Perm.R | Perm.W\nassert Perm.R in f()", "from enum import Flag, auto\nclass Perm(Flag):\n    R = auto()\n    W = auto()\n"),  # noqa: E501
        ("def f(a):\n    h = n = Node(a[0])\n    for x in a[1:]:\n        n.next = Node(x)\n        n = n.next\n    return h", "h = f([1, 2])\nassert h.val == 1 and h.next.val == 2 and h.next.next is None", "class Node:\n    next = None\n    def __init__(self, val): self.val = val\n"),  # noqa: E501
        ("def f(p): return p.sq + 1", "p = P(3)\nassert f(p) == 10 and p.sq == 9", "from functools import cached_property\nclass P:\n    def __init__(self, x): self.x = x\n    @cached_property\n    def sq(self): return self.x ** 2\n"),  # noqa: E501
        ("def f(x): return type(x)", "assert f(b'x') is bytes and f(None) is type(None) and f(3) is int"),
        ("def f(ps): return max(ps, key=lambda p: p.norm())\ndef g(p): return Pt(-p.x, -p.y)", "assert f([Pt(1, 2), Pt(-3, 4)]) == Pt(-3, 4) and f([Pt(1, 0)]).norm() == 1\nassert g(Pt(1, 2)) == Pt(-1, -2) and g(Pt(3, 3))._asdict() == {'x': -3, 'y': -3}", "from typing import NamedTuple\nclass Pt(NamedTuple):\n    x: int\n    y: int\n    def norm(self): return abs(self.x) + abs(self.y)\n"),  # noqa: E501
    ],
    "a decorated function that keeps its name": [
        ("import functools\ndef memo(g):\n    known = {}\n    @functools.wraps(g)\n    def own(x):\n        if x not in known: known[x] = g(x)\n        return known[x]\n    return own", "def test_memo():\n    calls = []\n    @memo\n    def square(x):\n        calls.append(x)\n        return x * x\n    assert square(3) == 9 and square(3) == 9\n    assert calls == [3]\n    assert square.__name__ == 'square'"),  # noqa: E501
    ],
    "arguments that come back as results": [
        ("def f(a, x):\n    a.append(x)\n    return a", "a = f([], 1)\na = f(a, 2)\nassert a == [1, 2]\nb = a\nb = f(b, 3)\nassert a == [1, 2, 3] and a is b"),  # noqa: E501
        ("def f(g):\n    for r in g:\n        for i in range(len(r)): r[i] += 1\n    return g", "g = [[0, 0], [0, 0]]\ng = f(g)\nassert g == [[1, 1], [1, 1]]\nfor _ in range(3): g = f(g)\nassert g[0][0] == 4"),  # noqa: E501
    ],
    "functions of the tests that get what the tests gave": [
        ("def walk(n, visit):\n    if n:\n        visit(n)\n        walk(n.left, visit)\n        walk(n.right, visit)", "root = Node(1, Node(2), Node(3))\nseen = []\nwalk(root, seen.append)\nassert seen == [root, root.left, root.right]\nassert [n.val for n in seen] == [1, 2, 3]", "class Node:\n    def __init__(self, val, left=None, right=None):\n        self.val, self.left, self.right = val, left, right\n", "walk"),  # noqa: E501
        ("def order(ns, key): return sorted(ns, key=key)", "a, b = Node(1), Node(2)\nprio = {a: 5, b: 3}\nassert order([a, b], lambda n: prio[n]) == [b, a]", "class Node:\n    def __init__(self, val, left=None, right=None):\n        self.val, self.left, self.right = val, left, right\n", "order"),  # noqa: E501
        ("def each(a, g):\n    for x in a: g(x)", "rows = [[1], [2]]\ndef add(r): r.append(0)\neach(rows, add)\nassert rows == [[1, 0], [2, 0]]"),  # noqa: E501
        ("def f(a, g):\n    a.append(3)\n    g(a)\n    a.append(4)", "rows, seen = [1], []\nf(rows, lambda r: seen.append(list(r)))\nassert seen == [[1, 3]] and rows == [1, 3, 4]"),  # noqa: E501
        ("def f(a, g):\n    b = list(a)\n    a[:] = [7]\n    g(a)\n    a[:] = b\n    return 3", "a = [3, 1]\nr = f(a, lambda x: None)\nassert r == 3 and a == [3, 1]"),  # noqa: E501
        ("def f(g): return g(1, 2)", "import numpy as np\nassert f(np.add) == 3"),
    ],
    "changes beside other ways to hold": [
        ("def f(a):\n    a[:] = dict.fromkeys(a)\n    return a", "a = [1, 2, 1]\nr = f(a)\nassert r is a or r == [1, 2]\nassert a == [1, 2]\nassert f([4, 4]) == [4]"),  # noqa: E501
        ("import shutil\ndef f(a, b): return str(shutil.copy(a, b))", "def test_a(tmp_path):\n    (tmp_path / 'a').write_text('x')\n    assert f(tmp_path / 'a', tmp_path / 'b') == str(tmp_path / 'b')\n    assert (tmp_path / 'b').read_text() == 'x'"),  # noqa: E501
    ],
    "several functions that the prompt begins": [
        ("def f(s): return len(s)\ndef g(s): return s[::-1]", "assert f('ab') == 2\nassert g('ab') == 'ba'", "def f(s):\n    'x'\ndef g(s):\n    'y'\n", "f"),  # noqa: E501
        ("def f(s): return len(s)\ndef g(s): return s[::-1]", "assert f('ab') == 2\nassert g('ab') == 'ba'", "def g(s):\n    raise NotImplementedError\ndef f(s):\n    'x'\n", "f"),  # noqa: E501
    ],
    "exceptions of the program as an argument of assertRaises": [
        ("class E(ValueError): pass\ndef f(s):\n    if s < 0: raise E(s)\n    return s", "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertRaises(E, f, -1)\n        self.assertEqual(f(2), 2)"),  # noqa: E501
    ],
    "bytes on standard output": [
        ("import sys\ndef f():\n    print('a', end='')\n    sys.stdout.buffer.write(b'hi\\n')", "def test_a(capsys):\n    f()\n    assert capsys.readouterr().out == 'ahi\\n'"),  # noqa: E501
    ],
}
