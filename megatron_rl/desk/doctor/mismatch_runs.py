"""``megatron-rl doctor --mismatch RUN``: which factor makes trainer and servers disagree.

What can be held fixed with one trainer and its servers is tried in one launch of the run's ranks (``mismatch_ranks.py``); what
needs others, expert parallelism and dtype, in a launch of its own, and only while the mismatch is there.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_rl.config.checks import check_config
from megatron_rl.config.derived import uses_attached_servers
from megatron_rl.config.load import config_to_yaml, load_config
from megatron_rl.config.schema import Config, Dtype, Fp8, ParityBoundsConfig, RoutingReplay
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.trajectory import Prompt
from megatron_rl.desk.doctor import mismatch_factors as factors
from megatron_rl.desk.doctor.mismatch_factors import CHAT_TEMPLATE, Trial
from megatron_rl.desk.doctor.rank_launcher import run_ranks
from megatron_rl.errors import DataError, UserError
from megatron_rl.run.recorded_prompts import read_first_prompts
from megatron_rl.run.resume_candidates import candidates
from megatron_rl.system.command_line.terminal import say
from megatron_rl.system.files.atomic_files import is_locked
from megatron_rl.system.http.json_http import HttpError, get_once
from megatron_rl.tracking.metrics_file import read_metrics

_MARGIN_S = 1800.0
"""For loading, publishing and a dozen rounds of sampling, beyond the start of the servers."""
_SERVER_PARALLELISM = ("ep-size", "expert-parallel-size", "moe-a2a-backend", "enable-ep-moe", "enable-deepep-moe")
_BOUNDS = ("rollout.parity_bounds", "rollout.max_logprob_difference")
_SERVER_DTYPE = ("dtype", "quantization", "kv-cache-dtype", "enable-fp32-lm-head")
_SHOWN_TOKENS = 6


def print_mismatch(folder: Path, overrides: Sequence[str]) -> int:
    """The table and the verdict; the exit status: 1 where the two sides disagree."""
    config = load_recipe(folder, overrides)
    found = list(_trials(folder, config))
    if os.environ.get("RANK", "0") != "0":
        return 0
    console = Console(highlight=False)
    console.print(factors.table(found))
    for line in factors.verdict(found):
        console.print(f"=> {line}", soft_wrap=True)
    return int(bool(factors.culprits(found)) or not factors.is_settled(found))


def load_recipe(folder: Path, overrides: Sequence[str]) -> Config:
    """Of the run. Raises UserError for a folder without one, and for a run that goes on."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise UserError(f"doctor --mismatch: {folder} holds no config.yaml; give the output folder of a run (run.output_dir)")
    if is_locked(folder / ".lock"):
        raise UserError(
            f"doctor --mismatch: the run in {folder} goes on, and its servers and devices are busy; stop it, or ask when it has ended"
        )
    config = load_config([path], overrides)
    check_config(config, command="doctor")
    if any(word.startswith(_BOUNDS) for word in overrides):
        return config
    # A run that was let through by wider bounds is what is asked about.
    usual = replace(config.rollout, parity_bounds=ParityBoundsConfig(), max_logprob_difference=None)
    return replace(config, rollout=usual)


def _trials(folder: Path, config: Config) -> Iterator[Trial]:
    found: list[Trial] = [template_trial(folder, config)]
    yield found[0]
    is_launched = "RANK" in os.environ
    own_replay = config.policy.moe.routing_replay is RoutingReplay.R3
    held = [factors.ROUTING] if own_replay else []
    tries = [factor for factor in factors.HELD_HERE if factor not in held]
    say("starting trainer and servers of the run, and sampling from them")
    with tempfile.TemporaryDirectory(prefix="megatron-rl-doctor-") as scratch:
        first = _launched(folder, _with_routes(config), Path(scratch), held, tries, factors.AS_IT_IS, _source(folder))
        found += first
        yield from first
        for factor in (factors.EXPERT_PARALLELISM, factors.DTYPE):
            if factors.is_settled(found):
                return
            other, how = _without_parallelism(config) if factor == factors.EXPERT_PARALLELISM else _in_float32(config)
            if is_launched:
                other, how = None, "a launcher's ranks start once; give parallel.expert_parallel_size=1 or policy.dtype=float32"
            if other is None:
                trial = Trial(factor, f"not tried: {how}")
            else:
                say(f"starting them again: {how}")
                try:
                    all_held = [*factors.HELD_HERE] if own_replay or _has_routes(first) else [
                        name for name in factors.HELD_HERE if name != factors.ROUTING
                    ]
                    (trial,) = _launched(folder, _with_routes(other), Path(scratch), all_held, [], factor, how)
                except UserError as error:
                    trial = Trial(factor, f"not tried: {error}")
            found.append(trial)
            yield trial


def _has_routes(trials: Sequence[Trial]) -> bool:
    return any(trial.factor == factors.ROUTING and trial.figures is not None for trial in trials)


def _source(folder: Path) -> str:
    """What the trainer loads, and what the run saw last."""
    newest = next(iter(candidates(folder / "checkpoints")), None)
    weights = f"weights of checkpoint {newest.name}" if newest else "weights of policy.path: the run has no checkpoint"
    seen = [row.metrics["mismatch/k3"] for row in read_metrics(folder / "metrics.jsonl") if "mismatch/k3" in row.metrics]
    return weights + (f"; the run's last step had mismatch/k3 {seen[-1]:.2g}" if seen else "")


def _launched(
    folder: Path, config: Config, scratch: Path, held: Sequence[str], tries: Sequence[str], name: str, how: str
) -> list[Trial]:
    """Raises UserError where the ranks end without a result."""
    from megatron_rl.desk.doctor.mismatch_ranks import MismatchJob, run_job

    recipe, out = scratch / "recipe.yaml", scratch / "trials.json"
    recipe.write_text(config_to_yaml(config))
    job = MismatchJob(str(recipe), str(folder.resolve()), list(held), list(tries), name, how, str(out))
    if "RANK" in os.environ:
        return run_job(job)
    out.unlink(missing_ok=True)
    job_file = scratch / "job.json"
    job_file.write_text(json.dumps(asdict(job)))
    reason = run_ranks(
        "megatron_rl.desk.doctor.mismatch_ranks",
        job_file,
        _num_ranks(folder, config),
        scratch / "ranks.log",
        config.rollout.start_timeout_s + _MARGIN_S,
    )
    if not out.exists():
        raise UserError(f"the ranks of the trials ended without a result: {reason}")
    return [Trial.from_json(values) for values in json.loads(out.read_text())]


def _num_ranks(folder: Path, config: Config) -> int:
    with suppress(OSError, ValueError):
        return config.parallel.num_ranks or len(json.loads((folder / "processes.json").read_text()))
    return max(1, config.parallel.num_ranks)


def _with_routes(config: Config) -> Config:
    """Servers that start here say which experts tokens went to."""
    from megatron_rl.step.parity_bounds import has_expert_layers

    if uses_attached_servers(config.rollout) or not has_expert_layers(config):
        return config
    return replace(config, policy=replace(config.policy, moe=replace(config.policy.moe, routing_replay=RoutingReplay.R3)))


def _without_parallelism(config: Config) -> tuple[Config | None, str]:
    """(the run with experts whole on every rank and server, or None; how or why not)."""
    args, parallel = config.rollout.server_args, config.parallel
    if parallel.expert_parallel_size == 1 and not _given(args, _SERVER_PARALLELISM):
        return None, "there is none"
    rollout = replace(config.rollout, server_args=_less(args, _SERVER_PARALLELISM))
    other = replace(config, parallel=replace(parallel, expert_parallel_size=1, expert_tensor_parallel_size=0), rollout=rollout)
    return other, "experts are whole on every rank and server"


def _in_float32(config: Config) -> tuple[Config | None, str]:
    args, policy = config.rollout.server_args, config.policy
    if uses_attached_servers(config.rollout):
        return None, "attached servers keep the dtype that they were started with: attach to some with another --dtype"
    if policy.dtype is Dtype.float32 and policy.fp8 is Fp8.none and not _given(args, _SERVER_DTYPE):
        return None, "both sides compute in float32"
    rollout = replace(config.rollout, server_args=_less(args, _SERVER_DTYPE))
    other = replace(config, policy=replace(policy, dtype=Dtype.float32, fp8=Fp8.none), rollout=rollout)
    return other, "trainer and servers compute in float32"


def _given(args: dict[str, Any], names: Sequence[str]) -> bool:
    return len(_less(args, names)) < len(args)


def _less(args: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in args.items() if name.lstrip("-").replace("_", "-") not in names}


def template_trial(folder: Path, config: Config) -> Trial:
    """The tokens of the run's first prompts as it recorded them, as policy.path makes them now, and as the saved policy and the
    servers' folders do. Raises DataError where policy.path or the data cannot be read."""
    tokenizer = Tokenizer(config.policy.path)
    now = _prompts(config, tokenizer)
    recorded = read_first_prompts(folder)
    problems: list[str] = []
    places: list[str] = []
    if recorded:
        places.append("the run's record")
        problems += _differing(recorded, now, tokenizer, "the run began with")
    for name, path in _other_folders(folder, config):
        try:
            theirs = _prompts(config, Tokenizer(path))
        except DataError as error:
            problems.append(f"{name}: {error}")
            continue
        places.append(name)
        problems += _differing(theirs, now, tokenizer, f"{name} makes")
    if not places:
        return Trial(CHAT_TEMPLATE, "nothing to compare with: the run recorded no prompts and saved no policy")
    held = f"tokens of {len(now)} prompts compared with those of {', '.join(places)}"
    return Trial(CHAT_TEMPLATE, held, evidence="; ".join(problems) or "equal", is_at_fault=bool(problems))


def _prompts(config: Config, tokenizer: Tokenizer) -> dict[str, Sequence[int]]:
    """Token ids by place of the row; too long ones too, so that a template that adds much is seen."""
    loaded = load_prompts(config.data.train_files, config.data, tokenizer, max_prompt_tokens=1 << 30)
    return {_place(prompt): prompt.token_ids for prompt in loaded.prompts}


def _place(prompt: Prompt) -> str:
    return prompt.source or prompt.id


def _differing(
    theirs: Mapping[str, Sequence[int]], ours: Mapping[str, Sequence[int]], tokenizer: Tokenizer, whose: str
) -> Iterator[str]:
    """One sentence for all prompts that differ."""
    off = [place for place, ids in theirs.items() if place in ours and list(ids) != list(ours[place])]
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
