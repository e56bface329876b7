"""Generates the policy's responses to every prompt, scores them with the run's rewards, and saves and reads the scores.

The file has one row per response: the prompt's id and ``score``, a number, or null for an unscored response.
``megatron-rl score`` writes such files too.

Invariants: a sample's seed depends only on run.seed, the prompt's id and the sample's index, so a restarted run samples
the same responses as an uninterrupted run; a row is written once, after it was scored; samples in the file are never
generated again; a file made with other settings is refused, never mixed.

A fixed number of prompts is in progress, enough to fill the servers. A prompt waits for its own responses and scores;
then the next prompt starts.
"""

import asyncio
import json
import math
import os
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from megatron_rl.config.schema import Config, DataConfig
from megatron_rl.data.prompts import is_duplicate, read_content
from megatron_rl.data.row_files import Row, describe, is_missing, lookup, read_rows
from megatron_rl.data.trajectory import Prompt, Score
from megatron_rl.errors import DataError, UserError
from megatron_rl.rewards.router import ScoreItem, check_error_rate
from megatron_rl.rollout.generation import Sampling, sample_seed, text_digest
from megatron_rl.rollout.requests import Generation, GenerationRequest
from megatron_rl.selection.selection_rules import PromptScores
from megatron_rl.system.files.atomic_files import atomic_text_file, lock_file


def read_candidates(files: Sequence[str], data: DataConfig) -> tuple[dict[str, str], int]:
    """Read and check all prompts. Returns the types by prompt id, in the order of the files, and the number of duplicate ids.

    Raises:
        DataError: a bad row, a duplicate id (unless ``data`` drops duplicates), or no rows.
    """
    types: dict[str, str] = {}
    sources: dict[str, str] = {}
    num_duplicates = 0
    for row, source in read_rows(files, split=data.split):
        content = read_content(row, source, data)
        if is_duplicate(content, sources, data):
            num_duplicates += 1
        else:
            types[content.id] = content.type
    if not types:
        raise DataError(f"data.train_files: {', '.join(files)}: no rows to select from")
    return types, num_duplicates


def read_scores(path: str, types: Mapping[str, str], *, id_field: str) -> tuple[list[PromptScores], int]:
    """Read the scores of the prompts in ``types`` from ``path``.

    Returns one entry per prompt, in the order of ``types``, and the number of rows whose id belongs to no prompt. Prompts without
    rows have no scores.

    Raises:
        DataError: a row without a valid id or score (reported with file, line and field), or no row of any prompt.
    """
    scores, num_foreign = _collect_scores(read_rows([path]), types, id_field=id_field, path=path)
    prompts = [
        PromptScores(
            id=prompt_id,
            type=prompt_type,
            scores=tuple(score for score in scores.get(prompt_id, ()) if score is not None),
            num_unscored=sum(score is None for score in scores.get(prompt_id, ())),
        )
        for prompt_id, prompt_type in types.items()
    ]
    return prompts, num_foreign


def _collect_scores(
    rows: Iterable[tuple[Row, str]], types: Mapping[str, str], *, id_field: str, path: str
) -> tuple[dict[str, list[float | None]], int]:
    scores: dict[str, list[float | None]] = defaultdict(list)
    num_foreign = 0
    for row, source in rows:
        prompt_id = _prompt_id(row, source, id_field)
        score = _score(row, source)
        if prompt_id in types:
            scores[prompt_id].append(score)
        else:
            num_foreign += 1
    if not scores:
        raise DataError(
            f"{path}: none of {num_foreign} rows has the id of a prompt in data.train_files; rows need the "
            f"prompts' {id_field!r} (or id) and a score"
        )
    return scores, num_foreign


def _prompt_id(row: Row, source: str, id_field: str) -> str:
    value = lookup(row, id_field)
    value = lookup(row, "id") if is_missing(value) else value
    if is_missing(value) or isinstance(value, (dict, list, bool)):
        raise DataError(f"{source}: field {id_field!r}: expected the prompt's id, got {describe(value)}")
    return str(value)


def _score(row: Mapping[str, Any], source: str) -> float | None:
    if "score" not in row:
        raise DataError(f"{source}: field 'score' is missing; write it with megatron-rl score (fields: {sorted(row)})")
    score = row["score"]
    if score is None:
        return None
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not math.isfinite(score):
        raise DataError(f"{source}: field 'score': expected a finite number or null, got {describe(score)}")
    return float(score)


_MIN_RESPONSES_FOR_ALARM = 64
"""Number of scored responses below which the error rate is not checked, because it is not meaningful yet."""

Generate = Callable[[GenerationRequest, str], Awaitable[Generation]]
"""Function (request, prompt id) that returns one response."""
Grade = Callable[[Sequence[ScoreItem]], Awaitable[Sequence[Score]]]


@dataclass(frozen=True)
class SamplingPlan:
    """Number and settings of the responses to generate, equal for all prompts."""

    sampling: Sampling
    decode: Callable[[Sequence[int]], str]
    num_samples: int
    max_new_tokens: int

    async def request(self, prompt: Prompt, sample: int) -> GenerationRequest:
        return await self.sampling.request(
            prompt,
            prompt.token_ids,
            rid=f"select-{text_digest(prompt.id).hex()}-{sample}",
            max_new_tokens=self.max_new_tokens,
            seed=sample_seed(self.sampling.seed, prompt.id, sample),
        )


def score_settings(config: Config) -> dict[str, Any]:
    """All settings that scores depend on, apart from the prompts; a score file is reused only if they are equal."""
    weights = sorted(Path(config.policy.path).glob("*.safetensors"))
    rollout, reward, data = config.rollout, config.reward, config.data
    settings = {
        "policy.path": str(Path(config.policy.path).resolve()),
        "policy weights (name, bytes, time of change)": [
            [file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in weights
        ],
        "policy.dtype": config.policy.dtype.value,
        "run.seed": config.run.seed,
        "batch.max_response_tokens": config.batch.max_response_tokens,
        "rollout.temperature": rollout.temperature,
        "rollout.top_p": rollout.top_p,
        "rollout.top_k": rollout.top_k,
        "rollout.stop_token_ids": rollout.stop_token_ids,
        "reward.name": reward.name,
        "reward.options": reward.options,
        "reward.by_type": {name: asdict(route) for name, route in reward.by_type.items()},
        "reward.require_think": reward.require_think,
        "data.prompt_field": data.prompt_field,
        "data.use_chat_template": data.use_chat_template,
        "data.system_prompt": data.system_prompt,
        "data.instruction": data.instruction,
    }
    # Through JSON, so that these settings compare equal to settings read from a file.
    return json.loads(json.dumps(settings))


class ScoreFile:
    """File of scored responses, one row each; appended and flushed one prompt at a time."""

    def __init__(self, file: TextIO, path: Path, done: Mapping[str, set[int]]) -> None:
        self._file = file
        self.path = path
        self.done = done
        """Maps prompt ids to the indices of the samples in the file."""

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._file.write("".join(json.dumps(row) + "\n" for row in rows))
        self._file.flush()


@contextmanager
def open_score_file(path: Path, settings: Mapping[str, Any]) -> Iterator[ScoreFile]:
    """Open and lock the score file; an incomplete last line, left by a killed process, is removed.

    Raises UserError if another process has locked the file or if the file was made with other settings.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="utf-8") as file:
        lock_file(file, path)
        _check_settings(path, settings)
        yield ScoreFile(file, path, _read_done(path))
        file.flush()
        os.fsync(file.fileno())


def _check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    settings_path = path.with_suffix(".settings.json")
    if path.stat().st_size == 0:
        with atomic_text_file(settings_path) as file:
            json.dump(settings, file, indent=2)
        return
    try:
        before = json.loads(settings_path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} has scores, but {settings_path.name} next to it does not have their settings ({error}); delete {path} "
            "or set another run.output_dir"
        ) from error
    changed = [key for key in settings if before.get(key) != settings[key]]
    if changed:
        key = changed[0]
        raise UserError(
            f"{path} was made with other settings: {key} was {before.get(key)!r}, now {settings[key]!r}"
            f"{' (and ' + ', '.join(changed[1:]) + ')' if changed[1:] else ''}; delete it or set another run.output_dir"
        )


def _read_done(path: Path) -> dict[str, set[int]]:
    done: dict[str, set[int]] = defaultdict(set)
    num_good_bytes = 0
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break  # incomplete: the process was killed while writing
            row = json.loads(line)
            done[row["id"]].add(row["sample"])
            num_good_bytes += len(line)
    if num_good_bytes < path.stat().st_size:
        os.truncate(path, num_good_bytes)
    return done


def missing_samples(prompts: Sequence[Prompt], num_samples: int, done: Mapping[str, set[int]]) -> dict[str, list[int]]:
    """Maps prompt ids to the indices of samples that are not in ``done``; complete prompts are omitted."""
    missing = {p.id: [i for i in range(num_samples) if i not in done.get(p.id, ())] for p in prompts}
    return {prompt_id: samples for prompt_id, samples in missing.items() if samples}


async def generate_scores(
    prompts: Sequence[Prompt],
    plan: SamplingPlan,
    scores: ScoreFile,
    *,
    generate: Generate,
    grade: Grade,
    num_prompts_in_progress: int,
    max_error_rate: float,
    on_scored: Callable[[int], None] = lambda responses: None,
) -> None:
    """Generate, score and save the samples missing from the file. Raises RewardError if too many cannot be scored."""
    missing = missing_samples(prompts, plan.num_samples, scores.done)
    # A shared iterator is the queue: each worker takes the next prompt when it is free.
    queue = iter([prompt for prompt in prompts if prompt.id in missing])
    all_scores: list[Score] = []

    async def work() -> None:
        for prompt in queue:
            samples = missing[prompt.id]
            requests = [await plan.request(prompt, i) for i in samples]
            generations = await asyncio.gather(*[generate(request, prompt.id) for request in requests])
            texts = [plan.decode(generation.token_ids.tolist()) for generation in generations]
            new_scores = await grade([_item(prompt, text) for text in texts])
            # Written after scoring, because samples in the file are never generated again.
            columns = zip(samples, texts, generations, new_scores, strict=True)
            scores.append([_row(prompt, *row) for row in columns])
            all_scores.extend(new_scores)
            on_scored(len(new_scores))
            if len(all_scores) >= _MIN_RESPONSES_FOR_ALARM:
                check_error_rate(all_scores, max_error_rate, what="the prompts so far")

    workers = [asyncio.create_task(work()) for _ in range(num_prompts_in_progress)]
    try:
        await asyncio.gather(*workers)
    finally:
        # After a failure the other workers must not write to the score file, which the caller closes.
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    if all_scores:
        check_error_rate(all_scores, max_error_rate, what="the prompts")


def _item(prompt: Prompt, response: str) -> ScoreItem:
    return ScoreItem(
        response=response, answer=prompt.answer, prompt=prompt.text, type=prompt.type, fields=prompt.fields
    )


def _row(prompt: Prompt, sample: int, response: str, generation: Generation, score: Score) -> dict[str, Any]:
    return {
        "id": prompt.id,
        "type": prompt.type,
        "sample": sample,
        "score": score.value,
        "detail": score.detail,
        "error": score.error,
        "finish_reason": generation.finish_reason,
        "num_tokens": len(generation.token_ids),
        "response": response,
    }
