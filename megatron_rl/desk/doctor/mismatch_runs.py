"""``megatron-rl doctor --mismatch RUN``: which factor makes trainer and servers disagree.

Factors that one trainer and its servers can fix are tried in a single launch of the run's ranks
(``mismatch_ranks.py``). Expert parallelism and dtype need other ranks or servers: each is tried in a separate
launch, and only while the mismatch persists.
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
from megatron_rl.desk.doctor.rank_checks import run_ranks
from megatron_rl.errors import DataError, UserError
from megatron_rl.run.checkpoint_folder import candidates
from megatron_rl.run.output import read_first_prompts
from megatron_rl.system.command_line.terminal import say
from megatron_rl.system.files.atomic_files import is_locked
from megatron_rl.system.http.json_http import HttpError, get_once
from megatron_rl.tracking.metrics_file import read_metrics

_MARGIN_S = 1800.0
"""Time for loading, publishing and about a dozen rounds of sampling, in addition to the start of the servers."""
_SERVER_PARALLELISM = ("ep-size", "expert-parallel-size", "moe-a2a-backend", "enable-ep-moe", "enable-deepep-moe")
_BOUNDS = ("rollout.parity_bounds", "rollout.max_logprob_difference")
_SERVER_DTYPE = ("dtype", "quantization", "kv-cache-dtype", "enable-fp32-lm-head")
_SHOWN_TOKENS = 6


def print_mismatch(folder: Path, overrides: Sequence[str]) -> int:
    """Print the table and the conclusions. Returns the exit status: 1 if the two sides disagree."""
    config = load_recipe(folder, overrides)
    trials = list(_trials(folder, config))
    if os.environ.get("RANK", "0") != "0":
        return 0
    console = Console(highlight=False)
    console.print(factors.table(trials))
    for line in factors.verdict(trials):
        console.print(f"=> {line}", soft_wrap=True)
    return int(bool(factors.culprits(trials)) or not factors.is_settled(trials))


def load_recipe(folder: Path, overrides: Sequence[str]) -> Config:
    """The run's configuration. Raises UserError for a folder without one, and for a run that is still running."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise UserError(f"doctor --mismatch: {folder} has no config.yaml; give the output folder of a run (run.output_dir)")
    if is_locked(folder / ".lock"):
        raise UserError(
            f"doctor --mismatch: the run in {folder} is still running, and its servers and devices are busy; "
            "stop it or wait until it has ended"
        )
    config = load_config([path], overrides)
    check_config(config, command="doctor")
    if any(word.startswith(_BOUNDS) for word in overrides):
        return config
    # Wider bounds may have let this run start: measure it against the default bounds.
    usual = replace(config.rollout, parity_bounds=ParityBoundsConfig(), max_logprob_difference=None)
    return replace(config, rollout=usual)


def _trials(folder: Path, config: Config) -> Iterator[Trial]:
    trials: list[Trial] = [template_trial(folder, config)]
    yield trials[0]
    is_launched = "RANK" in os.environ
    own_replay = config.policy.moe.routing_replay is RoutingReplay.R3
    # A run that replays routes has this factor fixed from the start.
    held = [factors.ROUTING] if own_replay else []
    tries = [factor for factor in factors.HELD_HERE if factor not in held]
    say("starting the run's trainer and servers, and sampling from them")
    with tempfile.TemporaryDirectory(prefix="megatron-rl-doctor-") as scratch:
        first = _launched(folder, _with_routes(config), Path(scratch), held, tries, factors.AS_IT_IS, _source(folder))
        trials += first
        yield from first
        for factor in (factors.EXPERT_PARALLELISM, factors.DTYPE):
            if factors.is_settled(trials):
                return
            other, how = _without_parallelism(config) if factor == factors.EXPERT_PARALLELISM else _in_float32(config)
            if is_launched:
                other, how = None, "ranks of a launcher start only once; give parallel.expert_parallel_size=1 or policy.dtype=float32"
            if other is None:
                trial = Trial(factor, f"not tried: {how}")
            else:
                say(f"restarting them: {how}")
                try:
                    all_held = [*factors.HELD_HERE] if own_replay or _has_routes(first) else [
                        name for name in factors.HELD_HERE if name != factors.ROUTING
                    ]
                    (trial,) = _launched(folder, _with_routes(other), Path(scratch), all_held, [], factor, how)
                except UserError as error:
                    trial = Trial(factor, f"not tried: {error}")
            trials.append(trial)
            yield trial


def _has_routes(trials: Sequence[Trial]) -> bool:
    return any(trial.factor == factors.ROUTING and trial.figures is not None for trial in trials)


def _source(folder: Path) -> str:
    """Describes the weights that the trainer loads, and the run's newest mismatch."""
    newest = next(iter(candidates(folder / "checkpoints")), None)
    weights = f"weights of checkpoint {newest.name}" if newest else "weights of policy.path: the run has no checkpoint"
    seen = [row.metrics["mismatch/k3"] for row in read_metrics(folder / "metrics.jsonl") if "mismatch/k3" in row.metrics]
    return weights + (f"; the run's last step has mismatch/k3 {seen[-1]:.2g}" if seen else "")


def _launched(
    folder: Path, config: Config, scratch: Path, held: Sequence[str], tries: Sequence[str], name: str, how: str
) -> list[Trial]:
    """Run one launch. Raises UserError if the ranks exit without a result."""
    from megatron_rl.desk.doctor.mismatch_ranks import MismatchJob, run_job

    recipe, out = scratch / "recipe.yaml", scratch / "trials.json"
    recipe.write_text(config_to_yaml(config))
    job = MismatchJob(str(recipe), str(folder.resolve()), list(held), list(tries), name, how, str(out))
    if "RANK" in os.environ:
        return run_job(job)
    # Remove the result of an earlier launch, so that an existing file means success.
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
        raise UserError(f"the ranks of the trials exited without a result: {reason}")
    return [Trial.from_json(values) for values in json.loads(out.read_text())]


def _num_ranks(folder: Path, config: Config) -> int:
    with suppress(OSError, ValueError):
        return config.parallel.num_ranks or len(json.loads((folder / "processes.json").read_text()))
    return max(1, config.parallel.num_ranks)


def _with_routes(config: Config) -> Config:
    """The configuration with routing replay (servers return each token's experts); unchanged for attached servers or dense models."""
    from megatron_rl.step.parity import has_expert_layers

    if uses_attached_servers(config.rollout) or not has_expert_layers(config):
        return config
    return replace(config, policy=replace(config.policy, moe=replace(config.policy.moe, routing_replay=RoutingReplay.R3)))


def _without_parallelism(config: Config) -> tuple[Config | None, str]:
    """Returns (configuration with experts whole on every rank and server, or None; method or reason)."""
    args, parallel = config.rollout.server_args, config.parallel
    if parallel.expert_parallel_size == 1 and not _given(args, _SERVER_PARALLELISM):
        return None, "the run has no expert parallelism"
    rollout = replace(config.rollout, server_args=_less(args, _SERVER_PARALLELISM))
    other = replace(config, parallel=replace(parallel, expert_parallel_size=1, expert_tensor_parallel_size=0), rollout=rollout)
    return other, "experts are whole on every rank and server"


def _in_float32(config: Config) -> tuple[Config | None, str]:
    args, policy = config.rollout.server_args, config.policy
    if uses_attached_servers(config.rollout):
        return None, "attached servers keep the dtype that they were started with: attach to servers with another --dtype"
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
    return {_row_source(prompt): prompt.token_ids for prompt in loaded.prompts}


def _row_source(prompt: Prompt) -> str:
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
