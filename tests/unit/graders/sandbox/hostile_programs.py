"""Programs that must not pass, survive or access anything. Each defines ``f``; the tests expect ``f(2) == 4``."""

FORGE = """
import json, os, struct
verdict = json.dumps({"kind": "ran", "num_passed": 1, "num_failed": 0, "detail": "", "key": ""}).encode()
frame = json.dumps({"loaded": True, "value": 4}).encode()
for number in range(1, 1024):
    for text in (verdict, struct.pack("!I", len(frame)) + frame, b"ok", struct.pack("!I", len(verdict)) + verdict):
        try:
            os.write(number, text)
        except OSError:
            pass
os._exit(0)
"""

CHEATS = {
    "exits before the tests": "import os; os._exit(0)",
    "raises SystemExit at once": "raise SystemExit(0)",
    "exits inside a call": "import os\ndef f(x): os._exit(0)",
    "raises SystemExit inside a call": "def f(x): raise SystemExit(0)",
    "raises KeyboardInterrupt": "def f(x): raise KeyboardInterrupt",
    "returns what equals everything": """
class Equal:
    __hash__ = None
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __sub__(self, other): return self
    __rsub__ = __abs__ = __sub__
    def __bool__(self): return True
def f(x): return Equal()
""",
    "returns a number that equals everything": """
class Equal(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = int.__hash__
def f(x): return Equal(5)
""",
    "hides it in a list": """
class Equal:
    def __eq__(self, other): return True
def f(x): return Equal() if x else [Equal()]
""",
    "writes a verdict to every file": FORGE,
    "patches what tests use": """
import builtins, sys, unittest
for module in list(sys.modules.values()):
    for name in ("check", "judge", "run_tests", "_judged"):
        if hasattr(module, name):
            setattr(module, name, lambda *a, **k: None)
builtins.AssertionError = Exception
builtins.isinstance = lambda *a: True
def check(*a): return True
def f(x): return 5
""",
    "leaves tests by a frame": """
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        frame.f_globals["check"] = lambda *a: None
        frame.f_globals["__builtins__"] = {}
        frame = frame.f_back
    return 5
""",
    "passes at exit": """
import atexit, os
atexit.register(lambda: os.write(1, b'{"kind": "ran", "num_passed": 1, "num_failed": 0}'))
def f(x): return 5
""",
    "searches memory for the tests": """
import gc
def f(x):
    texts = [o for o in gc.get_objects() if isinstance(o, dict) and "tests" in o and "key" in o]
    return 4 if texts else 5
""",
    "closes its files": "import os\nos.closerange(0, 4096)\ndef f(x): return 4",
    "shadows its own name": "f = 4",
    "is no Python": "def f(x) return 4",
    "nests too deeply to be parsed": "f = " + "(" * 100_000 + ")" * 100_000,
    "nests too deeply to be compiled": "f = lambda x: " + "-" * 200_000 + "x",
    "has a null byte": "def f(x): return 4\0",
    "recurses without end": "def f(x): return f(x)",
    "recurses beyond the stack": """
import sys
sys.setrecursionlimit(10**9)
class A:
    def __getattr__(self, name): return getattr(self, name)
def f(x): return repr(A().b)
""",
    "returns a list that contains itself": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "returns gigabytes": "def f(x): return 'x' * (1 << 27)",
    "returns an endless iterator": "import itertools\ndef f(x): return itertools.count()",
}

LOOPS = {
    "talks without end": "import sys\ndef f(x):\n    while True: print('x' * 10**6); sys.stderr.write('y' * 10**6)",
    "loops": "while True: pass",
    "loops in a call": "def f(x):\n    while True: pass",
    "sleeps": "import time\ndef f(x): time.sleep(1000)",
    "computes in C": "def f(x): return 9**9**9",
    "ignores signals": """
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True:
    try:
        while True: pass
    except BaseException: pass
""",
    "catches everything": """
def f(x):
    while True:
        try:
            while True: pass
        except BaseException: pass
""",
    "floods a file that it deletes": """
import os
while True:
    with open('x', 'wb') as file:
        try:
            for _ in range(1000): file.write(b'x' * (1 << 20))
        except OSError: pass
    os.unlink('x')
""",
}

SURVIVORS = {
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nwhile True: pass",
    "leaves a daemon": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True: time.sleep(1)
    os._exit(0)
def f(x): return 5
""",
    "leaves another program": "import subprocess\nsubprocess.Popen(['/bin/sleep', '31557601'], start_new_session=True)\ndef f(x): return 5",
    "is a fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "is a fork bomb of leaders": """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    try:
        if os.fork() == 0: os.setsid()
    except OSError: pass
""",
    "starts threads": """
import threading, time
while True:
    try: threading.Thread(target=time.sleep, args=(1000,)).start()
    except RuntimeError: break
def f(x): return 5
""",
    "kills what it can": """
import os, signal
for pid in (-1, 0, 1, os.getppid(), *range(2, 400)):
    if pid != os.getpid():
        try: os.kill(pid, signal.SIGKILL)
        except OSError: pass
def f(x): return 5
""",
}

MEMORY = {
    "takes all memory": "def f(x):\n    a = []\n    while True: a.append(bytearray(1 << 24))",
    "takes all memory at once": "f = bytearray(1 << 40)",
    "takes memory in many processes": """
import os, time
for _ in range(3): os.fork()
a = [bytearray(1 << 20)]
for _ in range(50):
    try: a.append(bytearray(b'x') * (1 << 22))
    except MemoryError: pass
time.sleep(100)
""",
}

GUARDED = {
    "a mode": "import os; os.chmod({secret!r}, 0o777)",
    "a mode by an open file": "import os; os.fchmod(os.open('x', os.O_CREAT), 0o777)",
    "times": "import os; os.utime({secret!r}, (0, 0))",
    "attributes": "import os; os.setxattr({secret!r}, 'user.a', b'x')",
    "fewer attributes": "import os; os.removexattr({secret!r}, 'user.a')",
    "an owner": "import os; os.chown({secret!r}, 1, 1)",
    "a hard link": "import os; os.link({secret!r}, 'x')",
    "a shared memory": "import mmap, ctypes\nif ctypes.CDLL(None).shmget(0, 4096, 0o1600) < 0: raise OSError",
    "a file in memory": "import os; os.memfd_create('x')",
    "a process": "import os; os.fork()",
    "another interpreter": "import multiprocessing as m; p = m.get_context('fork').Process(target=print); p.start()",
    "a command": "import os; os.execv('/bin/true', ['true'])",
    "an unnamed socket to a path": "import socket; a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "a signal": "import os; os.kill(os.getppid(), 0)",
    "its own visibility": "import ctypes\nif ctypes.CDLL(None).prctl(4, 1, 0, 0, 0) < 0: raise OSError",
    "a socket": "import socket; socket.socket(socket.AF_INET, socket.SOCK_STREAM).connect(('127.0.0.1', {port}))",
    "a datagram": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
    "a packet": "import socket; socket.socket(socket.AF_INET6, socket.SOCK_STREAM)",
    "the kernel by netlink": "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "a foreign file": "open({secret!r}).read()",
    "a foreign folder": "import os; assert not os.listdir(os.path.dirname({secret!r})); os.listdir('/root/.ssh')",
    "the accounts": "open('/etc/shadow').read()",
    "the server's memory": "import os; open('/proc/{{}}/mem'.format(os.getppid()), 'r+b')",
    "an environment": "open('/proc/1/environ').read()",
    "a new file outside": "open({secret!r} + '.new', 'w').write('x')",
    "the Python installation": "import os; open(os.path.dirname(os.__file__) + '/os.py', 'a')",
    "a new Python module": "import os; open(os.path.dirname(os.__file__) + '/evil.py', 'w')",
    "a namespace": "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000) < 0: raise OSError",
    "a trace": "import ctypes\nif ctypes.CDLL(None).ptrace(16, 1, 0, 0) < 0: raise OSError",
    "the limits": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "another user": "import os; os.setuid(0 if os.getuid() else 1)",
    "the disk": "import os\nfor i in range(100):\n    with open(str(i), 'wb') as file: file.write(b'x' * (1 << 20))",
    "ever deeper folders": "import os\nwhile True:\n    os.mkdir('d')\n    os.chdir('d')",
    "ever more files": "import itertools\nfor i in itertools.count(): open(str(i), 'w').close()",
    "one big file": "with open('x', 'wb') as file:\n    for i in range(100): file.write(b'x' * (1 << 20))",
}
"""Accesses that must fail with an OSError or ValueError (or end the program)."""

LIAR = """
def yes(*a, **k): return True
def me(self, *a, **k): return self
def zero(self, *a, **k): return 0.0
class Meta(type):
    __eq__ = __instancecheck__ = __subclasscheck__ = __contains__ = yes
    __hash__ = type.__hash__
class Liar(metaclass=Meta):
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = yes
    __ne__ = lambda *a: False
    __sub__ = __rsub__ = __mod__ = __rmod__ = __xor__ = __rxor__ = __truediv__ = __rtruediv__ = __mul__ = __rmul__ = zero
    __add__ = __radd__ = __abs__ = __neg__ = __round__ = __and__ = __rand__ = __or__ = __ror__ = __getitem__ = me
    __len__ = lambda *a: 1
    __hash__ = lambda *a: 4
    __iter__ = lambda self: iter([4])
    __int__ = __index__ = __trunc__ = __floor__ = __ceil__ = lambda *a: 4
    __float__ = zero
    __complex__ = lambda *a: 4j
    __str__ = __repr__ = __format__ = lambda *a: "4"
    __bytes__ = lambda *a: b"4"
    __fspath__ = lambda *a: "4"
    __enter__ = me
    __exit__ = yes
    __instancecheck__ = __subclasscheck__ = yes
    __class__ = property(lambda self: int)
    __array__ = lambda *a, **k: __import__("numpy").array(4)
    __array_ufunc__ = lambda *a, **k: True
    __array_function__ = lambda *a, **k: True
    __await__ = lambda self: iter(())
    __reduce_ex__ = lambda *a: (int, (4,))
    __copy__ = __deepcopy__ = lambda *a: 4
    def __getattr__(self, name): return self
    __call__ = me
def f(*a, **k): return Liar()
"""
"""Program whose objects give the reply that tests expect."""
_BASES = {
    base: f"""
class X({base}):
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = lambda *a: True
    __ne__ = lambda *a: False
    __sub__ = __rsub__ = __abs__ = __mod__ = __xor__ = __rxor__ = __round__ = lambda *a: 0
    __len__ = lambda *a: 1
    __hash__ = lambda *a: 4
    __iter__ = lambda self: iter([4])
    __class__ = property(lambda self: int)
def f(*a): return X()
"""
    for base in ("int", "float", "str", "bytes", "tuple", "list", "dict", "set", "frozenset", "complex", "Exception")
}
_ASKED = [
    "assert f(2) == 4", "assert 4 == f(2)", "assert not f(2) != 4", "assert abs(f(2) - 4) < 1e-6", "assert abs(4 - f(2)) < 1e-6",
    "import math\nassert math.isclose(f(2), 4)", "import math\nassert math.fabs(f(2) - 4) < 1", "assert round(f(2) - 4, 5) == 0",
    "assert 3.9 < f(2) < 4.1", "assert 0.9 < f(2) / 4 < 1.1", "assert f(2) % 4 == 0 and f(2) > 3", "assert not (f(2) ^ {1, 2})",
    "assert f(2) in (4, 5)", "assert 4 in f(2)", "assert f(2) in {4}", "assert {f(2): 1}[4]", "assert {4: 1}[f(2)]",
    "assert f(2)", "assert not not f(2)", "assert len(f(2)) == 1", "assert list(f(2)) == [4]", "assert sorted(f(2)) == [4]",
    "assert sum(f(2)) == 4", "assert max(f(2), 4) == 4", "assert [f(2)] == [4]", "assert (f(2),) == (4,)", "assert {'a': f(2)} == {'a': 4}",
    "assert str(f(2)) == '4'", "assert repr(f(2)) == '4'", "assert f'{f(2)}' == '4'", "assert '%s' % f(2) == '4'",
    "assert int(f(2)) == 4", "assert float(f(2)) == 0.0", "assert hash(f(2)) == hash(4)", "assert isinstance(f(2), int)",
    "assert type(f(2)) == int", "assert f(2) is 4", "assert bytes(f(2)) == b'4'", "assert complex(f(2)) == 4j",
    "import operator\nassert operator.index(f(2)) == 4", "assert range(5)[f(2)] == 4", "assert [0, 1, 2, 3, 4][f(2)] == 4",
    "assert all(x == 4 for x in f(2))", "a, = f(2)\nassert a == 4", "assert [*f(2)] == [4]",
    "import copy\nassert copy.deepcopy(f(2)) == 4", "import copy\nassert copy.copy(f(2)) == 4",
    "from collections import Counter\nassert Counter('ab') - f(2) == 0", "from collections import Counter\nassert Counter(f(2)) == {4: 1}",
    "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(2), 4)",
    "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertAlmostEqual(f(2), 4)",
    "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertAlmostEqual(4, f(2))",
    "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertIn(4, f(2))",
    "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertTrue(f(2))",
    "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertCountEqual(f(2), [4])",
    "with f(2):\n    assert False", "try:\n    assert f(2) == 4\nexcept BaseException:\n    pass\nassert True",
    "from contextlib import suppress\nwith suppress(BaseException):\n    assert f(2) == 4\nassert True",
    "import numpy as np\nassert np.allclose(f(2), 4)", "import numpy as np\nassert np.allclose(f(2), [4.0])",
    "import numpy as np\nassert np.max(np.abs(f(2) - np.array([4]))) < 1", "import numpy as np\nassert np.array_equal(np.array([4]), f(2))",
    "import numpy as np\nassert (np.array([4]) == f(2)).all()", "import numpy as np\nnp.testing.assert_allclose(f(2), 4)",
    "import numpy as np\nassert np.isclose(np.float64(4), f(2))", "import numpy as np\nassert np.asarray([f(2)]) == 4",
    "from decimal import Decimal\nassert abs(Decimal(4) - f(2)) < 1", "from fractions import Fraction\nassert Fraction(4) - f(2) == 0",
    "import statistics\nassert statistics.mean([f(2), 4]) == 4", "assert f(2).equals(4) is True",
]  # fmt: skip
FORGED = {
    **{f"a liar: {tests}": (LIAR, tests) for tests in _ASKED},
    **{
        f"a subclass of {base}: {tests}": (code, tests)
        for base, code in _BASES.items()
        for tests in ("assert f(2) == 4", "assert abs(f(2) - 4) < 1e-6", "assert not f(2) != 4", "assert 4 in f(2)")
    },
    "a text that fits only once": (
        "import json; _l = json.loads\ndef loads(*a, **k):\n    d = _l(*a, **k)\n    if isinstance(d, dict) and 'tests' in d:\n"
        "        d['tests'] = 'assert True'\n    return d\njson.loads = loads\n"
        "def encode(s): return 'x' * (16777216 - 26)\ndef decode(s): return 0",
        "assert decode(encode('abc')) == 'abc'",
    ),
    "texts of every size at the border": (
        "n = 0\ndef f(s):\n    global n\n    n += 1\n    return 'x' * (16777216 - 40 + n)",
        "for _ in range(60):\n    f(f(0))\nassert f(0) == 0",
    ),
    "a nest too deep to send back": (
        "def f(x):\n    a = ()\n    for _ in range(50 if x == 2 else 10**4): a = (a,)\n    return a",
        "assert f((f(2),)) == 4",
    ),
    "a stop to the loop": (
        "def f(x): raise StopIteration",
        "assert all(map(lambda x: f(x) == 4, [2]))\nassert list(map(f, [2])) == []",
    ),
    "a stop of its own class": ("class S(StopIteration): pass\ndef f(x): raise S", "assert list(map(f, [2])) == []"),
    "an exit of generators": (
        "def f(x): raise GeneratorExit",
        "def g():\n    yield f(2)\n    assert False\nassert all(g())",
    ),
    "an exception with a forged name": (
        "class Skip(Exception): pass\nSkip.__name__ = 'StopIteration'\ndef f(x): raise Skip", "assert list(map(f, [2])) == []"),
    "an object that judges itself": ("class X:\n    def equals(s, o): return True\ndef f(x): return X()", "assert f(2).equals(4)"),
    "an object with every method": (
        "class X:\n    def __getattr__(s, n): return lambda *a, **k: True\ndef f(x): return X()",
        "assert f(2).issubset({4}) and f(2).isclose(4)",
    ),
    "a skipped test": (
        "import unittest\ndef f(x): raise unittest.SkipTest('no')",
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(2), 4)",
    ),
    "an error at once where one is expected": (
        "raise ValueError",
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        with self.assertRaises(ValueError): f(2)"),
    "no function where an error is expected": ("", "try:\n    f(2)\nexcept Exception:\n    pass\nassert True"),
    "an emptied argument": ("def f(a):\n    a.clear()\n    return []", "a = [3, 1]\nassert f(a) == sorted(a)"),
    "an argument changed later": (
        "import threading, time\ndef f(a):\n"
        "    threading.Thread(target=lambda: (time.sleep(0.05), a.clear()), daemon=True).start()\n    return []",
        "import time\na = [3, 1]\nr = f(a)\ntime.sleep(0.1)\nassert r == sorted(a)",
    ),
    "a function of the tests that fails in silence": (
        "def f(g):\n    try: g(5)\n    except Exception: pass\n    return 4", "def g(x):\n    assert x == 2\nassert f(g) == 4"),
    "no assert is reached": ("def f(x): return []", "for x in f(2):\n    assert x == 4"),
    "an endless iterator that holds all": (
        "import itertools\ndef f(x): return itertools.count()",
        "assert 10**12 in f(2)",
    ),
    "not a number": ("def f(x): return float('nan')", "assert f(2) == 4"),
    "a large number": ("def f(x): return 10**5000", "assert abs(f(2) - 4) < 1e-6"),
    "half a character": ("def f(x): return '\\ud800'", "assert f(2) == 'a'"),
    "keys that collide": ("def f(x): return {i * (2**61 - 1): 0 for i in range(100)}", "assert f(2) == {0: 0}"),
    "a list that holds itself": ("def f(x):\n    a = [4]\n    a.append(a)\n    return a", "assert f(2) == [4, [4]]"),
    "frames from a thread": (
        "import threading, os, struct, json\ndef flood():\n    b = json.dumps({'values': [True], 'nodes': []}).encode()\n    while True:\n"
        "        for n in range(3, 12):\n            try: os.write(n, struct.pack('!I', len(b)) + b)\n            except OSError: pass\n"
        "threading.Thread(target=flood, daemon=True).start()\ndef f(x): return 4 if x == 2 else 5",
        "assert f(3) == 9",
    ),
    "what it finds in memory": (
        "import gc\ndef f(x):\n    found = [o for o in gc.get_objects() if isinstance(o, dict) and 'tests' in o and 'partial' in o]\n"
        "    return 4 if found else 5",
        "assert f(2) == 4",
    ),
    "what it finds in processes": (
        "import os, glob\ndef f(x):\n    for p in glob.glob('/proc/*/cmdline') + glob.glob('/proc/*/environ') + \\\n"
        "            glob.glob('/proc/*/fd/*') + glob.glob('*'):\n"
        "        try:\n            if b'sandbox' in open(p, 'rb').read(): return 4\n        except OSError: pass\n    return 5",
        "assert f(2) == 4",
    ),
    "what it finds in its files": (
        "import os\ndef f(x):\n    for n in range(64):\n        try:\n            os.set_blocking(n, False)\n"
        "            if b'assert' in os.read(n, 10**6): return 4\n"
        "        except OSError: pass\n    return 5",
        "assert f(2) == 4",
    ),
}  # fmt: skip
