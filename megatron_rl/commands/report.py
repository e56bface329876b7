"""`megatron-rl report`: write the report of a run, or compare several runs on one page, from their files so far.

    megatron-rl report outputs/run                          # outputs/run/report.html
    megatron-rl report outputs/a outputs/b outputs/c        # comparison.html
"""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder (run.output_dir); several are compared")
    parser.add_argument("--output", metavar="FILE", help="output file (default: report.html in the run's folder, or ./comparison.html)")


def run(arguments: argparse.Namespace) -> int:
    from megatron_rl.desk.report.run_comparison import write_comparison
    from megatron_rl.desk.report.run_report import write_report

    if len(arguments.runs) == 1:
        print(write_report(arguments.runs[0], arguments.output))
    else:
        print(write_comparison(arguments.runs, arguments.output or "comparison.html"))
    return 0
