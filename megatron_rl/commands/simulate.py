"""`megatron-rl simulate`: predict the times of a run from a recipe and a finished run's measurements."""

import argparse
from pathlib import Path

from megatron_rl.errors import UserError
from megatron_rl.system.command_line.terminal import (
    keep_numbers,
    number_or_word,
    positive_int,
    positive_number,
    split_overrides,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("words", nargs="*", metavar="RECIPE.yaml or key=value", help="recipe or overrides to simulate; with --run, changes to that run")
    add("--config", action="append", default=[], help="YAML recipe; may be repeated, later files override earlier ones")
    add(
        "--run", dest="from_run", type=Path, metavar="RUN", help="folder of a finished run, to take its costs, lengths and keys"
    )
    add("--against", type=Path, metavar="RUN", help="simulate this run's configuration and lengths, and show both next to each other")
    add("--lengths", metavar="LENGTHS", help="response lengths: name:key=value,... or a file or a run's folder (docs/simulate.md)")
    add("--prompts", metavar="LENGTHS", help="prompt lengths (default: those of --run, or fixed:length=200)")
    add("--tool-times", metavar="TOKENS:TIMES", help="tokens per turn, and milliseconds of the environment after it (docs/simulate.md)")
    add("--timing", type=Path, metavar="FILE", help="YAML file of costs, instead of a run's")
    add("--gpu", metavar="NAME", help="estimate the costs of the configuration on this GPU type (docs/estimates.md)")
    add("--save-timing", type=Path, metavar="FILE", help="write the costs in use to this file")
    add("--windows", type=number_or_word, nargs="+", metavar="TOKENS", help="compare these windows with sync")
    add("--steps", type=positive_int, metavar="N", help="steps to simulate (default: until the slots have settled, and 200 more)")
    add("--seed", type=int, default=1, help="random seed for sampling response lengths (default: %(default)s)")
    add("--tokens", type=positive_number, help="also predict the seconds until this many tokens are generated")
    add("--responses", type=positive_number, help="also predict the seconds until this many responses have finished")
    add("--replay", action="store_true", help="replay the run's own stages on the simulated clock, and compare with the real seconds")
    add("--trace", type=Path, metavar="FILE.json", help="write a timeline for Perfetto")
    add("--json", action="store_true", help="print the results as JSON")


def run(arguments: argparse.Namespace) -> int:
    from megatron_rl.desk.simulate.recorded_run import read_run
    from megatron_rl.desk.simulate.simulation_request import make_request, observed, predict_beside, predicted
    from megatron_rl.desk.simulate.simulation_tables import (
        compare_windows,
        note_free_stages,
        show_prediction,
        show_replay,
    )
    from megatron_rl.desk.simulate.timing import write_timing
    from megatron_rl.tracking.timeline import write_trace

    keep_numbers(arguments, "windows")
    named, overrides = split_overrides(arguments.words)
    paths = [*arguments.config, *named]
    source = read_run(arguments.from_run) if arguments.from_run else None
    if arguments.replay:
        if source is None:
            raise UserError("--replay: expected --run RUN, the run to replay")
        return show_replay(source, arguments)
    request = make_request(arguments, source, paths, overrides)
    if arguments.timing and not arguments.json:
        note_free_stages(request)
    if arguments.save_timing:
        write_timing(arguments.save_timing, request.timing)
    if arguments.windows:
        return compare_windows(arguments, request)
    prediction = predicted(arguments, request)
    if arguments.trace:
        write_trace(arguments.trace, prediction.spans)
    real = observed(request.real, request.scenario, request.timing) if request.real and request.real.rounds else None
    show_prediction(arguments, request, prediction, predict_beside(arguments, request, real) if real else None)
    return 0
