"""Blocks the import of wings, for what has to work without them: ``python tests/no_wings.py desk graders`` tries the core."""

import importlib
import pkgutil
import sys

SITECUSTOMIZE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.startswith({names}):
            raise ModuleNotFoundError(name + " is blocked")

sys.meta_path.insert(0, Blocked())
"""
"""Python imports sitecustomize.py before any other module of a process: a folder with this text on PYTHONPATH is enough."""


def blocking(*wings: str) -> str:
    return SITECUSTOMIZE.format(names=tuple(f"megatron_rl.{wing}" for wing in wings))


def failed_imports(*wings: str) -> list[str]:
    """Modules of the core that cannot be imported without ``wings``, in a process that has imported none of them yet."""
    exec(blocking(*wings), {})
    import megatron_rl

    others = tuple(f"megatron_rl.{name}" for name in ("desk", "graders", "cpu", "commands"))
    failed = []
    for module in pkgutil.walk_packages(megatron_rl.__path__, "megatron_rl.", onerror=lambda name: None):
        if not module.name.startswith(others):
            try:
                importlib.import_module(module.name)
            except ImportError:
                failed.append(module.name)
    return failed


if __name__ == "__main__":
    print(*failed_imports(*sys.argv[1:]), sep="\n")
