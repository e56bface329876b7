"""Programs that must not pass, survive, see or reach anything. Each defines ``f``; the tests want ``f(2) == 4``."""

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
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nwhile True: pass",
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
"""What must fail with an OSError or ValueError (or end the program) when a program tries it."""
