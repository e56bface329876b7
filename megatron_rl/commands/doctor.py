"""``megatron-rl doctor``: is this machine fit for a run, and what is wrong with a run? A module for each mode:

- without options it looks at the environment and at the ranks (``machine_checks.py``, ``rank_checks.py``), with a recipe or a model
  also at both engines (``engine_checks.py``): a line each, with a remedy for what fails (``all_checks.py``);
- ``--invariance``: do all layouts compute the same (``layout_comparison.py``)?
- ``--mismatch RUN``: which factor makes trainer and servers disagree (``mismatch_runs.py``)?
- ``--hang RUN``: who waits for whom (``hang.py``)?
"""

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

from megatron_rl.desk.doctor.layout_tolerances import DTYPES
from megatron_rl.errors import UserError
from megatron_rl.system.command_line.cli_types import positive_int, positive_number
from megatron_rl.system.processes.signals import clean_stop


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", action="append", default=[], help="YAML recipe whose engines are compared")
    parser.add_argument("--model", help="Hugging Face model folder, in the place of a recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the recipe")
    runs = parser.add_argument_group("look at a run instead")
    runs.add_argument("--hang", metavar="RUN", help="who waits for whom in the run of this output folder, with all stacks")
    runs.add_argument(
        "--mismatch", metavar="RUN", help="which factor makes trainer and servers of this run's recipe and newest checkpoint disagree"
    )
    layouts = parser.add_argument_group("compare layouts instead")
    layouts.add_argument("--invariance", action="store_true", help="compare one update in each layout")
    layouts.add_argument("--layouts", help='such as "tp2,pp2,ep2,cp2,tp2+sp+pp2,pp2+vpp2,dp2"')
    layouts.add_argument("--reference", default="tp1", help="the layout that the others are compared with")
    layouts.add_argument("--role", default="policy", choices=("policy", "critic"))
    layouts.add_argument("--max-tokens-per-microbatch", type=positive_int, default=64)
    layouts.add_argument("--dtype", choices=DTYPES, help="bfloat16 on GPUs with Transformer Engine, else float32")
    layouts.add_argument(
        "--tolerance",
        type=positive_number,
        help="relative, of loss, gradient norm and weights; by default what the device's numbers allow",
    )


def run(arguments: argparse.Namespace) -> int:
    _check_modes(arguments)
    # Ranks and servers that were started here end with this process, also when a scheduler stops it.
    with clean_stop() if "RANK" not in os.environ else nullcontext():
        if arguments.hang:
            from megatron_rl.desk.doctor.hang import print_hang

            return print_hang(Path(arguments.hang))
        if arguments.mismatch:
            from megatron_rl.desk.doctor.mismatch_runs import print_mismatch

            return print_mismatch(Path(arguments.mismatch), arguments.overrides)
        if arguments.invariance:
            from megatron_rl.desk.doctor.layout_comparison import compare_layouts

            return compare_layouts(arguments)
        from megatron_rl.desk.doctor.all_checks import print_lines

        return print_lines(arguments.config, arguments.model, arguments.overrides)


def _check_modes(arguments: argparse.Namespace) -> None:
    """UserError for two at once, and for what a mode would not look at."""
    modes = [f"--{name}" for name in ("hang", "mismatch", "invariance") if getattr(arguments, name)]
    if len(modes) > 1:
        raise UserError(f"doctor: {' and '.join(modes)} are questions of their own; ask one after the other")
    if (arguments.hang or arguments.mismatch) and (arguments.config or arguments.model):
        raise UserError(f"doctor {modes[0]} takes the output folder of a run, which holds its recipe, and no --config or --model")
    if arguments.hang and arguments.overrides:
        raise UserError(f"doctor --hang looks at a run as it is: {arguments.overrides[0]} would change nothing")
