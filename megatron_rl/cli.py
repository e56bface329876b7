"""`megatron-rl <command>`: parses the arguments and returns the exit status.

0: done, 1: failed, 2: user error, 75: stopped by a signal and resumable, 130: interrupted.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

from megatron_rl.commands import COMMANDS
from megatron_rl.errors import UserError
from megatron_rl.system.command_line.terminal import say
from megatron_rl.system.processes.gc_pauses import gc_disabled
from megatron_rl.system.processes.signals import INTERRUPTED, STOPPED, StopRequested


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    # Deprecations and notes of libraries do not help users of this package; our own messages are errors and log lines.
    warnings.filterwarnings("ignore", module=r"(torch|megatron|sglang|transformers|mlflow)\b")
    try:
        return arguments.run(arguments)
    except BrokenPipeError:  # the reader of our output has exited, such as `head`
        return 1
    except (UserError, OSError) as error:
        say(f"error: {error}")
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
    parser = argparse.ArgumentParser(
        prog="megatron-rl", description="Reinforcement learning with Megatron Core and SGLang."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name in argv[:1]:  # do not import the files of other commands
            with gc_disabled():
                module = import_module(f"megatron_rl.commands.{name.replace('-', '_')}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
            # Keys and files may be on both sides of an option.
            return command.parse_intermixed_args(argv[1:])
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
