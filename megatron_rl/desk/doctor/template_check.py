"""Checks that prompts still become the tokens that a run started with. Part of ``megatron-rl doctor --mismatch``."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron_rl.config.schema import Config
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.trajectory import Prompt
from megatron_rl.desk.doctor.mismatch_factors import CHAT_TEMPLATE, Trial
from megatron_rl.errors import DataError
from megatron_rl.run.recorded_prompts import read_first_prompts
from megatron_rl.system.http.json_http import HttpError, get_once

_SHOWN_TOKENS = 6


def template_trial(folder: Path, config: Config) -> Trial:
    """Compare tokens of the run's first prompts: as recorded, by policy.path now, by the saved policy and by the servers' folders.

    Raises DataError if policy.path or the data cannot be read.
    """
    tokenizer = Tokenizer(config.policy.path)
    now = _prompts(config, tokenizer)
    recorded = read_first_prompts(folder)
    problems: list[str] = []
    compared: list[str] = []
    if recorded:
        compared.append("the run's record")
        problems += _differing(recorded, now, tokenizer, "the run started with")
    for name, path in _other_folders(folder, config):
        try:
            theirs = _prompts(config, Tokenizer(path))
        except DataError as error:
            problems.append(f"{name}: {error}")
            continue
        compared.append(name)
        problems += _differing(theirs, now, tokenizer, f"{name} makes")
    if not compared:
        return Trial(CHAT_TEMPLATE, "nothing to compare with: the run recorded no prompts and saved no policy")
    held = f"tokens of {len(now)} prompts compared with {', '.join(compared)}"
    return Trial(CHAT_TEMPLATE, held, evidence="; ".join(problems) or "equal", is_at_fault=bool(problems))


def _prompts(config: Config, tokenizer: Tokenizer) -> dict[str, Sequence[int]]:
    """Token ids by source of the row. Overlong prompts are included, so that a template that adds much is noticed."""
    loaded = load_prompts(config.data.train_files, config.data, tokenizer, max_prompt_tokens=1 << 30)
    return {_source(prompt): prompt.token_ids for prompt in loaded.prompts}


def _source(prompt: Prompt) -> str:
    return prompt.source or prompt.id


def _differing(
    theirs: Mapping[str, Sequence[int]], ours: Mapping[str, Sequence[int]], tokenizer: Tokenizer, whose: str
) -> Iterator[str]:
    """Yields one sentence about all prompts that differ."""
    off = [source for source, ids in theirs.items() if source in ours and list(ids) != list(ours[source])]
    if off:
        first, other = list(ours[off[0]]), list(theirs[off[0]])
        at = next((i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other)))
        yield (
            f"{len(off)} of {len(theirs)} prompts differ: for {off[0]}, {whose} {_shown(other, at, tokenizer)} at token {at}, "
            f"policy.path now {_shown(first, at, tokenizer)}"
        )


def _shown(ids: Sequence[int], at: int, tokenizer: Tokenizer) -> str:
    part = list(ids[at : at + _SHOWN_TOKENS])
    return f"{part} ({tokenizer.raw_text(part)!r})" if part else "nothing more"


def _other_folders(folder: Path, config: Config) -> Iterator[tuple[str, Path]]:
    saved = folder / "policy"
    if (saved / "tokenizer_config.json").is_file():
        yield "the saved policy", saved
    for url in config.rollout.urls:
        try:
            info = json.loads(get_once(f"{url}/model_info", timeout_s=10.0).text)
            path = Path(str(info.get("tokenizer_path") or info.get("model_path")))
        except (HttpError, ValueError, AttributeError):
            continue
        if (path / "tokenizer_config.json").is_file() and path.resolve() != Path(config.policy.path).resolve():
            yield f"server {url}", path
