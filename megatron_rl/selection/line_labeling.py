"""Labels for a process reward model, by completing prefixes of programs and running them.

Each response is scored first. A binary search then finds its first bad line: K completions of each prefix that the
search tests are sampled on an SGLang server and scored; the prefix is "recoverable" if one passes. The output rows
have ``line_labels`` and the evidence for them.

Invariants:

- Prefixes and completions are token ids of the model's tokenizer; a completion's program is the prefix's text followed
  by the completion's text.
- A finished row is appended immediately and never labeled again: a killed run loses only the rows in progress, and the
  same command continues after them. An output file from other rows or settings is refused.
- An unscored completion is not a failure: a row whose label depends on one is skipped and counted, and the next run
  retries it.

Waits: a row waits for its own K completions and their scores. At most ``max_rows_in_progress`` rows run at the
same time, which keeps the servers busy.
"""

import asyncio
import hashlib
import json
import math
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from megatron_rl.config.derived import policy_model
from megatron_rl.config.schema import Config
from megatron_rl.data.code_lines import COMMENT_PREFIX, ENTRY_POINT_FIELD, CodeLine, code_lines
from megatron_rl.data.prompts import RowContent, read_content, tokenize
from megatron_rl.data.row_files import read_rows
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.trajectory import Prompt, Score
from megatron_rl.errors import DataError, UserError
from megatron_rl.rewards.line_rewards import PASSED_FROM, LineSearch, line_labels, scored_lines
from megatron_rl.rewards.registry import check_options, resolve
from megatron_rl.rewards.router import runner_settings
from megatron_rl.rewards.score_file import RowSchema
from megatron_rl.rewards.workers.calls import RewardItem
from megatron_rl.rewards.workers.event_loop import start_runner
from megatron_rl.rollout.generation import Sampling, base_seed, named_seed
from megatron_rl.rollout.recovering_client import RecoveringClient
from megatron_rl.rollout.requests import GenerationRequest
from megatron_rl.rollout.server_pool import open_servers
from megatron_rl.system.command_line.terminal import progress_bar
from megatron_rl.system.processes.signals import clean_stop, run_until_stopped

_Complete = Callable[[GenerationRequest], Awaitable[Sequence[int]]]
"""Generates the token ids of a request."""
Grade = Callable[[Sequence[RewardItem]], Awaitable[list[Score]]]

_KEY_FIELD = "label_key"
_LABEL_FIELDS = ("line_labels", "first_bad_line", "num_completions_graded", _KEY_FIELD)
"""Fields that a labeled row has in addition to the input's."""


class _Unscored(Exception):
    """Raised for a row whose label depends on responses that could not be scored."""


@dataclass(frozen=True)
class LabelTask:
    row: dict[str, Any]
    content: RowContent
    prompt_ids: tuple[int, ...]
    key: str


@dataclass
class LabelSummary:
    num_rows: int = 0
    num_done_before: int = 0
    num_labelled: int = 0
    num_without_lines: int = 0
    num_passed: int = 0
    num_ungraded: int = 0
    num_completions: int = 0

    def text(self) -> str:
        return (
            f"{self.num_labelled} of {self.num_rows} rows labeled ({self.num_done_before} by earlier runs), "
            f"{self.num_passed} of them pass all tests, {self.num_without_lines} without a line to label, "
            f"{self.num_ungraded} could not be scored; {self.num_completions} completions"
        )


class LineLabeler:
    """Labels single rows. The caller decides how many rows run at the same time."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        form: RowSchema,
        complete: _Complete,
        grade: Grade,
        context_tokens: int,
    ) -> None:
        self._settings = config.label_lines
        self._sampling = Sampling.of(config.rollout, tokenizer, seed=base_seed(config))
        self._tokenizer = tokenizer
        self._form = form
        self._complete = complete
        self._grade = grade
        self._context_tokens = context_tokens
        """Tokens of the model's context; 0 if unknown."""

    async def label(self, job: LabelTask) -> dict[str, Any]:
        """Label a row. Raises _Unscored if its label depends on an unscored response."""
        response = job.row["response"]
        lines = _lines_of(job)
        candidates = scored_lines(lines)
        (score,) = await self._grade([self._form.item(job.row)])
        if score.value is None:
            raise _Unscored(f"the response itself could not be scored: {score.error}")
        search = LineSearch(len(candidates), passes=score.value >= PASSED_FROM)
        num_graded = 0
        while search.question is not None:
            prefix = response[: candidates[search.question - 1].end]
            scores = await self._grade_completions(job, prefix, search.question)
            num_graded += sum(s.value is not None for s in scores)
            search.answer(_recoverable(scores, search.question))
        return {
            **job.row,
            "line_labels": line_labels(lines, search.first_bad),
            "first_bad_line": _line_number(lines, candidates, search.first_bad),
            "num_completions_graded": num_graded,
            _KEY_FIELD: job.key,
        }

    async def _grade_completions(self, job: LabelTask, prefix: str, num_lines: int) -> list[Score]:
        token_ids = (*job.prompt_ids, *self._tokenizer.encode(prefix))
        max_new_tokens = self._settings.max_new_tokens
        if self._context_tokens:
            # SGLang reserves a few tokens of the context.
            max_new_tokens = min(max_new_tokens, self._context_tokens - len(token_ids) - 8)
        if max_new_tokens < 1:
            raise _Unscored(
                f"the prefix of {num_lines} lines fills the model's context of {self._context_tokens} tokens"
            )
        answers = await asyncio.gather(
            *[
                self._sample(job, token_ids, max_new_tokens, f"label-{job.key}-{num_lines}-{sample}-")
                for sample in range(self._settings.num_completions)
            ]
        )
        texts = [prefix + self._tokenizer.decode(answer) for answer in answers]
        return await self._grade([self._form.item({**job.row, "response": text}) for text in texts])

    async def _sample(self, job: LabelTask, token_ids: Sequence[int], max_new_tokens: int, name: str) -> Sequence[int]:
        prompt = Prompt(job.key, job.prompt_ids, source=job.content.place)
        seed = named_seed(self._sampling.seed, name)
        return await self._complete(
            await self._sampling.request(prompt, token_ids, rid=name, max_new_tokens=max_new_tokens, seed=seed)
        )


def _lines_of(job: LabelTask) -> list[CodeLine]:
    entry_point = str(job.row.get(ENTRY_POINT_FIELD) or "")
    return code_lines(job.row["response"], entry_point=entry_point)


def _recoverable(scores: Sequence[Score], num_lines: int) -> bool:
    if any(s.value is not None and s.value >= PASSED_FROM for s in scores):
        return True
    errors = [s.error for s in scores if s.value is None]
    if errors:
        raise _Unscored(
            f"no completion of the first {num_lines} lines passes, but {len(errors)} of {len(scores)} could not be "
            f"scored: {errors[0]}"
        )
    return False


def _line_number(lines: Sequence[CodeLine], candidates: Sequence[CodeLine], first_bad: int) -> int:
    """Line number over all lines of the program, counted from 1; 0 if none is bad."""
    if first_bad > len(candidates):
        return 0
    return [line.end for line in lines].index(candidates[first_bad - 1].end) + 1


def load_jobs(config: Config, tokenizer: Tokenizer, form: RowSchema) -> list[LabelTask]:
    """All rows of the input. Raises DataError with the file and line of the first row that lacks a prompt or reward fields."""
    data = replace(config.data, answer_required=False, reward_fields=[])
    jobs = []
    for row, place in read_rows([config.label_lines.input_path]):
        problem = form.problem(row)
        if problem:
            raise DataError(f"{place}: {problem}")
        content = read_content(row, place, data)
        if content.images:
            raise DataError(f"{place}: the prompt has images; label-lines takes prompts of text")
        unknown = tokenizer.unknown_text(row["response"])
        if unknown:
            raise DataError(f"{place}: field 'response': the tokenizer does not know {unknown!r}")
        row = {name: value for name, value in row.items() if name not in _LABEL_FIELDS}
        jobs.append(LabelTask(row, content, tokenize(content, data, tokenizer).token_ids, label_key(row, config)))
    if not jobs:
        raise DataError(f"{config.label_lines.input_path}: no rows; expected responses with their tests")
    return _numbered(jobs)


def label_key(row: Mapping[str, Any], config: Config) -> str:
    """Hash of everything that a label depends on (row, model, settings), as 16 hex digits."""
    settings = config.label_lines
    parts = [
        row,
        config.policy.path,
        config.run.seed,
        [settings.num_completions, settings.max_new_tokens],
        [config.reward.name, config.reward.options, [COMMENT_PREFIX]],  # a list: labels of earlier runs stay valid
        [config.rollout.temperature, config.rollout.top_p, config.rollout.top_k],
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _numbered(jobs: Sequence[LabelTask]) -> list[LabelTask]:
    """Make the keys of equal rows unique, because their requests must not share an id."""
    counts: dict[str, int] = {}
    numbered = []
    for job in jobs:
        count = counts[job.key] = counts.get(job.key, 0) + 1
        numbered.append(job if count == 1 else replace(job, key=f"{job.key}.{count}"))
    return numbered


def finished_keys(path: Path, jobs: Sequence[LabelTask]) -> set[str]:
    """Keys of the rows in ``path``. A torn last line of a killed run is removed from the file.

    Raises DataError if the file has rows that are not among ``jobs``.
    """
    if not path.exists():
        return set()
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    known, keys = {job.key for job in jobs}, set()
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            key = json.loads(line)[_KEY_FIELD]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}:{number}: not a row of label-lines; give another label_lines.output_path"
            ) from error
        if key not in known:
            raise DataError(
                f"{path}:{number}: labeled from another input, model or setting; give another label_lines.output_path, "
                "or the settings it was made with"
            )
        keys.add(key)
    return keys


async def label_rows(
    jobs: Sequence[LabelTask],
    labeller: LineLabeler,
    output: TextIO,
    summary: LabelSummary,
    *,
    max_rows_in_progress: int,
    advance: Callable[[], None] = lambda: None,
    warn: Callable[[str], None] = print,
) -> None:
    """Label ``jobs`` and append each row to ``output`` when it is done. The first error ends all of them."""
    # pop() takes from the end: reversed, rows start in input order.
    waiting = list(reversed(jobs))

    async def work() -> None:
        while waiting:
            job = waiting.pop()
            try:
                row = await labeller.label(job)
            except _Unscored as error:
                summary.num_ungraded += 1
                warn(f"{job.content.place}: skipped: {error}")
            else:
                output.write(json.dumps(row) + "\n")
                output.flush()
                summary.num_labelled += 1
                summary.num_completions += row["num_completions_graded"]
                summary.num_passed += bool(row["line_labels"]) and row["first_bad_line"] == 0
                summary.num_without_lines += not any(row["line_labels"])
            advance()

    tasks = [asyncio.create_task(work()) for _ in range(min(max_rows_in_progress, len(jobs)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def label_lines(config: Config, *, note: Callable[[str], None], dry_run: bool = False) -> LabelSummary:
    """Run the command: start servers and reward workers, label every row of the input. ``note`` receives messages.

    Raises UserError for bad rows, and at the end if more rows than reward.max_error_rate could not be scored.
    """
    settings = config.label_lines
    output_path = Path(settings.output_path)
    if output_path.resolve() == Path(settings.input_path).resolve():
        raise UserError("label_lines.output_path: this is the input file; give another file")
    tokenizer = Tokenizer(config.policy.path)
    reward = resolve(config.reward.name)
    form = RowSchema(reward, config.reward.options)
    check_options(reward, config.reward.options, form.fields)
    jobs = load_jobs(config, tokenizer, form)
    done = finished_keys(output_path, jobs)
    open_jobs = [job for job in jobs if job.key not in done]
    summary = LabelSummary(num_rows=len(jobs), num_done_before=len(done))
    if dry_run:
        note(_plan_text(open_jobs, config))
        return summary
    if open_jobs:
        output_path.parent.mkdir(parents=True, exist_ok=True)
        _label_open_jobs(config, tokenizer, form, open_jobs, output_path, summary, note)
    note(f"{summary.text()}; in {output_path}")
    if summary.num_ungraded > config.reward.max_error_rate * len(jobs):
        raise UserError(
            f"{summary.num_ungraded} of {len(jobs)} rows could not be scored, more than "
            f"reward.max_error_rate={config.reward.max_error_rate:g}; fix the reward and run the command again"
        )
    return summary


def _plan_text(jobs: Sequence[LabelTask], config: Config) -> str:
    """Describe the remaining work, with the largest number of completions that it can take."""
    num_lines = [len(scored_lines(_lines_of(job))) for job in jobs]
    # A binary search over the lines of each row.
    questions = sum(math.ceil(math.log2(n)) for n in num_lines if n)
    return (
        f"{len(jobs)} rows with {sum(num_lines)} lines to label: at most {questions} prefixes of "
        f"{config.label_lines.num_completions} completions ({questions * config.label_lines.num_completions} in all); "
        "nothing was started"
    )


def _label_open_jobs(
    config: Config,
    tokenizer: Tokenizer,
    form: RowSchema,
    jobs: Sequence[LabelTask],
    output_path: Path,
    summary: LabelSummary,
    note: Callable[[str], None],
) -> None:
    settings, reward = config.label_lines, config.reward
    console = Console(stderr=True)
    model = policy_model(config)
    # As many completions as the servers take at the same time.
    rows_in_progress = max(
        2, config.rollout.max_inflight_requests * config.rollout.num_servers // settings.num_completions
    )
    log_dir = output_path.parent / f"{output_path.name}.logs"
    with (
        clean_stop(),
        start_runner(
            reward.name,
            runner_settings(reward),
            options=reward.options,
            row_fields=form.fields,
        ) as runner,
        open_servers(config, log_dir, note, load_weights=True) as servers,
        open(output_path, "a", encoding="utf-8") as output,
        progress_bar("label-lines", summary.num_rows, completed=summary.num_done_before, console=console) as advance,
    ):

        async def run() -> None:
            async with RecoveringClient.without_trainer(config, servers, note) as rollout:

                async def complete(request: GenerationRequest) -> Sequence[int]:
                    # Completions of one prefix go to the same server, whose cache then has the prefix once.
                    key = request.rid.rsplit("-", 2)[0]
                    return (await rollout.generate(request, sticky_key=key)).token_ids.tolist()

                labeller = LineLabeler(
                    config, tokenizer, form, complete, runner.score_many, model.get("max_position_embeddings", 0)
                )
                await label_rows(
                    jobs,
                    labeller,
                    output,
                    summary,
                    max_rows_in_progress=rows_in_progress,
                    advance=advance,
                    warn=note,
                )

        run_until_stopped(run())
