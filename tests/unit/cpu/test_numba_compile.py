"""Laws of megatron_rl/cpu/numba_compile.py: an upgrade of the package does not trip over compiled loops of the version before."""

import subprocess
import sys
from pathlib import Path

LOOP = """
import collections, sys
sys.path.insert(0, {folder!r})
import loops
print(loops.total(loops.{name}(2.0, 3.0)))
"""
MODULE = """
from typing import NamedTuple
from megatron_rl.cpu.numba_compile import compiled

class {name}(NamedTuple):
    a: float
    b: float

@compiled
def total(pair):
    return pair.a + pair.b
"""


def test_cached_loops_of_a_renamed_type_are_compiled_again(tmp_path: Path) -> None:
    for name in ("Pair", "Couple"):
        (tmp_path / "loops.py").write_text(MODULE.format(name=name))
        command = [sys.executable, "-c", LOOP.format(folder=str(tmp_path), name=name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stdout) == (0, "5.0\n"), done.stderr
