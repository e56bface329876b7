"""`megatron-rl <command>`: parses the arguments and returns the exit status.

0: done, 1: failed, 2: user error, 75: stopped by a signal and resumable, 130: interrupted.
"""

import argparse
import difflib
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

from megatron_rl import __version__
from megatron_rl.commands import COMMANDS, EXAMPLES, WITHOUT_TORCH
from megatron_rl.errors import UserError
from megatron_rl.system.command_line.terminal import say
from megatron_rl.system.processes.gc_pauses import gc_disabled
from megatron_rl.system.processes.signals import INTERRUPTED, STOPPED, StopRequested

_ENGINES = ("torch", "megatron-core", "sglang")
_EXIT_STATUSES = f"""\
exit statuses: 0 done, 1 failed, 2 the user's error, {STOPPED} stopped by a signal and resumable (run.resume=auto),
  {INTERRUPTED} interrupted"""


def main(argv: Sequence[str] | None = None) -> int:
    try:
        arguments = _parse(sys.argv[1:] if argv is None else argv)
        # Deprecations and notes of libraries do not help users of this package; our own messages are errors and log lines.
        warnings.filterwarnings("ignore", module=r"(torch|megatron|sglang|transformers|mlflow)\b")
        return arguments.run(arguments)
    except BrokenPipeError:  # the reader of our output has exited, such as `head`
        return 1
    except (UserError, OSError) as error:
        place = isinstance(error, OSError) and error.filename and error.strerror
        say(f"error: {error.filename}: {error.strerror}" if place else f"error: {error}")  # type: ignore[union-attr]
        return 2
    except ModuleNotFoundError as error:
        if not (problem := missing_package(error)):
            raise
        say(f"error: {problem}")
        return 2
    except StopRequested as stop:
        if os.environ.get("RANK", "0") == "0":
            say(f"stopped: {stop}. Resume with run.resume=auto (exit status {STOPPED})")
        return STOPPED
    except KeyboardInterrupt:
        if "RANK" not in os.environ:
            say("interrupted: everything this run started has been stopped")
        return INTERRUPTED


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    name = argv[0] if argv else ""
    if name and name[0] != "-" and name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        raise UserError(f"{name!r} is not a command; {f'did you mean {close[0]}?' if close else '`megatron-rl --help` lists them'}")
    parser, command = _parsers(name)
    # Keys and files may be on both sides of an option.
    return command.parse_intermixed_args(argv[1:]) if command else parser.parse_args(argv)


def _parsers(name: str) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser | None]:
    """The parser of the program, and that of the command ``name``, whose file alone is imported."""
    parser = argparse.ArgumentParser(
        prog="megatron-rl",
        description="Reinforcement learning with Megatron Core and SGLang.",
        epilog=f"example: {EXAMPLES['train']}\n{_EXIT_STATUSES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions of this package and its engines, and exit")
    commands = parser.add_subparsers(required=True, metavar="command")
    chosen = None
    for other, text in COMMANDS.items():
        epilog = f"example: {EXAMPLES[other]}\n{_EXIT_STATUSES}"
        command = commands.add_parser(
            other, help=text, description=text, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if other == name:
            if name in WITHOUT_TORCH:
                from megatron_rl.system.command_line.torch_placeholder import install

                install()
            with gc_disabled():
                module = import_module(f"megatron_rl.commands.{name.replace('-', '_')}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
            chosen = command
    return parser, chosen


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(_version_text())
        parser.exit()


def complete() -> None:
    """Answer the shell's request for completions (argcomplete), which calls this program with the line typed so far."""
    import argcomplete

    words = os.environ.get("COMP_LINE", "").split()
    parser, command = _parsers(words[1] if len(words) > 1 else "")
    for action in command._actions if command else ():
        if action.dest in ("overrides", "words"):
            action.completer = _complete_keys  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)


def _complete_keys(prefix: str, **_: object) -> list[str]:
    from megatron_rl.config.keys import sections

    return [f"{key.name}=" for section in sections() for key in section.keys if key.name.startswith(prefix)]


def _version_text() -> str:
    """One line per package: this one, Python, and the engines that are installed."""
    from importlib.metadata import PackageNotFoundError, version

    lines = [f"megatron-rl {__version__}", f"python {sys.version.split()[0]}"]
    for name in _ENGINES:
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            lines.append(f"{name} not installed")
    return "\n".join(lines)


def missing_package(error: ModuleNotFoundError) -> str:
    """The problem and its remedy in one line; "" if the missing module is none of another package."""
    package = (error.name or "").partition(".")[0]
    if not package or package == "megatron_rl" or package in sys.stdlib_module_names:
        return ""
    return (
        f"this command needs {package}, which is not installed: `megatron-rl examples DIR && bash DIR/launch/setup.sh` installs it here; "
        "pip install 'megatron_rl[cpu]' omits SGLang, pip install 'megatron_rl[gpu]' Transformer Engine"
    )


def run() -> int:
    """The entry point of the program."""
    if "_ARGCOMPLETE" in os.environ:
        complete()
    return main()


if __name__ == "__main__":
    sys.exit(run())
