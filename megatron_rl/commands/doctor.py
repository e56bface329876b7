"""``megatron-rl doctor``: checks if this machine is fit for a run, and diagnoses a run. Each mode has a module:

- without options: the environment and the ranks (``machine_checks.py``, ``rank_checks.py``); with a recipe or a model also the
  trainer and its servers (``engine_checks.py``). One line per check, with a remedy if it fails (``all_checks.py``);
- ``--invariance``: do all layouts compute the same (``layout_comparison.py``)?
- ``--mismatch RUN``: which factor makes trainer and servers disagree (``mismatch_runs.py``)?
- ``--hang RUN``: which process waits for which (``hang.py``)?
- ``--template MODEL``: what does the chat template do to conversations of agents (``template_check.py``)?
"""

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

from megatron_rl.errors import UserError
from megatron_rl.system.command_line.terminal import positive_int, positive_number
from megatron_rl.system.processes.signals import clean_stop


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", action="append", default=[], help="YAML recipe whose trainer and servers are compared")
    parser.add_argument("--model", help="Hugging Face model folder, instead of a recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the recipe")
    runs = parser.add_argument_group("diagnose a run instead")
    runs.add_argument("--hang", metavar="RUN", help="output folder of a running run: report which process waits for which, with all stacks")
    runs.add_argument(
        "--mismatch", metavar="RUN", help="output folder of a stopped run: report the factor that makes its trainer and servers disagree"
    )
    template = parser.add_argument_group("examine a chat template instead")
    template.add_argument("--template", metavar="MODEL", help="model folder: effects of its template on tools and thoughts")
    layouts = parser.add_argument_group("compare layouts instead")
    layouts.add_argument("--invariance", action="store_true", help="compare one update in each of --layouts")
    layouts.add_argument("--layouts", help='layouts to compare, such as "tp2,pp2,ep2,cp2,tp2+sp+pp2,pp2+vpp2,dp2"')
    layouts.add_argument("--reference", default="tp1", help="layout that the others are compared with (default: %(default)s)")
    layouts.add_argument("--role", default="policy", choices=("policy", "critic"), help="model to build (default: %(default)s)")
    text = "tokens of one forward pass (default: %(default)s)"
    layouts.add_argument("--max-tokens-per-microbatch", type=positive_int, default=64, help=text)
    layouts.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 with Transformer Engine, otherwise float32")
    layouts.add_argument(
        "--tolerance",
        type=positive_number,
        help="relative tolerance of loss, gradient norm and weights (default: by device and dtype)",
    )


def run(arguments: argparse.Namespace) -> int:
    _check_modes(arguments)
    # Ranks and servers started here end with this process, also when a scheduler stops it.
    with clean_stop() if "RANK" not in os.environ else nullcontext():
        if arguments.hang:
            from megatron_rl.desk.doctor.hang import print_hang

            return print_hang(Path(arguments.hang))
        if arguments.mismatch:
            from megatron_rl.desk.doctor.mismatch_runs import print_mismatch

            return print_mismatch(Path(arguments.mismatch), arguments.overrides)
        if arguments.template:
            from megatron_rl.desk.doctor.template_check import print_template

            return print_template(Path(arguments.template))
        if arguments.invariance:
            from megatron_rl.desk.doctor.layout_comparison import compare_layouts

            return compare_layouts(arguments)
        from megatron_rl.desk.doctor.all_checks import print_lines

        return print_lines(arguments.config, arguments.model, arguments.overrides)


def _check_modes(arguments: argparse.Namespace) -> None:
    """Raise UserError for several modes at the same time, and for arguments that a mode would ignore."""
    modes = [f"--{name}" for name in ("hang", "mismatch", "template", "invariance") if getattr(arguments, name)]
    if len(modes) > 1:
        raise UserError(f"doctor: {' and '.join(modes)} cannot be combined; run them separately")
    if (arguments.hang or arguments.mismatch) and (arguments.config or arguments.model):
        raise UserError(f"doctor {modes[0]} takes the output folder of a run, which contains its recipe, and no --config or --model")
    if arguments.template and (arguments.config or arguments.model or arguments.overrides):
        raise UserError("doctor --template takes a model folder, and no --config, --model or key=value")
    if arguments.hang and arguments.overrides:
        raise UserError(f"doctor --hang inspects a running run: {arguments.overrides[0]} would change nothing")
