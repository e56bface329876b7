"""``--lengths`` and ``--prompts`` of a command: a named distribution, a file of lengths, or a run's folder."""

from pathlib import Path

from megatron_rl.config.load import load_config
from megatron_rl.config.schedule_facts import Overlap, overlap_of
from megatron_rl.config.schema import Config
from megatron_rl.desk.simulate.lengths import LengthDistribution, named_lengths, read_lengths
from megatron_rl.desk.simulate.recorded_run import RecordedRun, read_run, response_lengths
from megatron_rl.errors import UserError

DEFAULT_PROMPTS = "fixed:length=200"
"""Prompt lengths of a run that does not record its prompts."""


def config_of_run(run: RecordedRun) -> Config:
    return load_config(run.folder / "config.yaml")


def parse_lengths(words: str) -> LengthDistribution:
    path = Path(words)
    if path.is_dir():
        return load_lengths(read_run(path))
    if path.name in ("metrics.jsonl", "timeline.json"):
        return load_lengths(read_run(path.parent))
    return read_lengths(path) if path.is_file() else named_lengths(words)


def load_lengths(run: RecordedRun) -> LengthDistribution:
    if not run.rounds:
        raise UserError(f"{run.folder}: the run's timeline does not say how long its responses were; give --lengths")
    return response_lengths(run, carries=overlap_of(config_of_run(run).schedule) > Overlap.nothing)
