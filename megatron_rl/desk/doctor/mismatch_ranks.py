"""The trials of ``megatron-rl doctor --mismatch``: a run's trainer and its servers, with more and more factors held fixed.

Every rank of a launch runs ``python -m megatron_rl.desk.doctor.mismatch_ranks JOB``; rank 0 writes the trials.
Each trial sends the same prompts to the servers again and compares the servers' log-probs of the new tokens with the
trainer's. The trial of the factor ``WEIGHTS`` publishes the trainer's weights, which attached servers keep afterwards.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import torch

from megatron_rl.algorithms.mismatch import MismatchStats, mismatch_figures
from megatron_rl.config.derived import uses_attached_servers
from megatron_rl.config.load import load_config
from megatron_rl.config.schema import Config, FireConfig
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.trajectory import Prompt, Segment, Trajectory
from megatron_rl.desk.doctor import mismatch_factors as factors
from megatron_rl.desk.doctor.mismatch_factors import Trial
from megatron_rl.desk.doctor.trainer_and_servers import WaitFor, temporary_servers
from megatron_rl.errors import UserError
from megatron_rl.parallel.topology import Topology
from megatron_rl.rollout.generation import Sampling, base_seed, trajectory_seed
from megatron_rl.rollout.requests import Generation, GenerationRequest
from megatron_rl.rollout.service import RolloutService
from megatron_rl.rollout.sglang.wire.protocol import generate_body, parse_generation
from megatron_rl.rollout.sglang.wire.response_validation import returns_routes, route_shape
from megatron_rl.run.checkpoint_folder import candidates
from megatron_rl.step.driver import stall_timeout_s
from megatron_rl.step.packing import window_batch, window_routes, with_routes
from megatron_rl.step.parity import has_expert_layers, parity_bounds, sample_for_parity
from megatron_rl.system.http.json_http import HttpError, HttpSession, bearer
from megatron_rl.training.engine import Engine
from megatron_rl.training.trainer_group import TrainerGroup
from megatron_rl.training.trainer_ranks import build_engine, trainer_ranks
from megatron_rl.weights.bucket_plan import ServerAddress

_PLAIN = {
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}  # fmt: skip
"""Values given in every request, so that no server default applies."""
_METHODS = {
    factors.SAMPLING: "every request has temperature 1, no top-p, top-k, min-p or penalty",
    factors.BATCH_SHAPE: "one request at a time",
    factors.PREFIX_CACHE: "the cache is emptied before each request",
    factors.WEIGHTS: "the trainer's weights are sent to the servers",
    factors.ROUTING: "the trainer follows the servers' choice of experts (R3)",
}
_MAX_FLUSHES, _PAUSE_S = 100, 0.1


@dataclass(frozen=True)
class MismatchJob:
    """Arguments of a launch: the run, and the factors to hold and to try."""

    recipe: str
    run: str
    """The run's output folder; the trainer loads its newest checkpoint."""
    held: list[str]
    """Factors held fixed from the start."""
    tries: list[str]
    """Factors to fix one at a time."""
    name: str
    """Factor name of the first measurement."""
    how: str
    out: str


@dataclass(frozen=True)
class TrainerAndServers:
    config: Config
    group: TrainerGroup
    rollout: RolloutService
    sampling: Sampling
    """The run's sampling parameters."""
    prompts: Sequence[Prompt]
    wait_for: WaitFor
    """Runs a coroutine on another thread until it returns."""
    engine: str = "policy"

    @property
    def has_routes(self) -> bool:
        """True if the servers return the experts that each token went to."""
        return self.sampling.routes is not None

    def measure(self, held: frozenset[str]) -> tuple[MismatchStats, int]:
        """Return (log-prob differences, number of tokens) with the factors ``held`` fixed. Collective. Raises UserError."""
        trajectories = self.wait_for(self._sampled(held))
        batch = replace(window_batch(trajectories, 0, self.sampling.vision), ids=())
        if factors.ROUTING in held:
            batch = with_routes(batch, window_routes(trajectories, 0))
        temperature = 1.0 if factors.SAMPLING in held else self.config.rollout.temperature
        mask = batch.fields["mask"]
        ours = self.group.logprobs(batch, temperature=temperature, engine=self.engine)[mask]
        return mismatch_figures(ours - batch.fields["rollout_logprobs"][mask]), len(ours)

    async def _sampled(self, held: frozenset[str]) -> list[Trajectory]:
        """Sample new responses to the prompts with the factors ``held`` fixed; a prompt has the same server in every trial."""
        trajectories, addresses = sample_for_parity(self.config, self.prompts), self.rollout.addresses()
        async with HttpSession() as http:

            async def answer(trajectory: Trajectory) -> None:
                # Assign by id, so that every trial uses the same server for a prompt.
                address = addresses[trajectory.id % len(addresses)]
                if factors.PREFIX_CACHE in held:
                    await _empty_cache(http, address, self._timeout_s)
                _append(trajectory, await self._generated(http, address, trajectory, held))

            # One request at a time: the batch has one row, and no other request refills the cache.
            if {factors.BATCH_SHAPE, factors.PREFIX_CACHE} & held:
                for trajectory in trajectories:
                    await answer(trajectory)
            else:
                await asyncio.gather(*map(answer, trajectories))
        return trajectories

    async def _generated(
        self, http: HttpSession, address: ServerAddress, trajectory: Trajectory, held: frozenset[str]
    ) -> Generation:
        prompt = trajectory.prompt
        request = await self.sampling.request(
            prompt,
            prompt.token_array,
            rid=f"mismatch-{trajectory.id}",
            max_new_tokens=trajectory.max_response_tokens,
            seed=trajectory_seed(base_seed(self.config), trajectory.id),
        )
        body = generate_body([request], [request.rid])
        if factors.SAMPLING in held:
            body["sampling_params"][0] |= _PLAIN
        return _parsed(request, await post_json(http, address, "/generate", body, self._timeout_s), address.url)

    @property
    def _timeout_s(self) -> float:
        return stall_timeout_s(self.config)


def trials(
    sides: TrainerAndServers, tries: Sequence[str], *, name: str = factors.AS_IT_IS, how: str = "", held: Sequence[str] = ()
) -> Iterator[Trial]:
    """Measure with no factor fixed, then with each of ``tries`` added in turn, until the two sides agree."""
    bounds = parity_bounds(sides.config, on_gpu=torch.cuda.is_available())
    now = frozenset(held)
    sides.measure(now)  # fill the prefix cache with the prompts, so that the next measurement uses it
    figures, num_tokens = sides.measure(now)
    measured = [Trial(name, how, figures, bounds, num_tokens)]
    yield measured[-1]
    for factor in tries:
        if factors.is_settled(measured):
            return
        if factor == factors.ROUTING and not sides.has_routes:
            no_experts = "the model has no experts" if not has_expert_layers(sides.config) else "the servers do not return routes"
            yield Trial(factor, f"not tried: {no_experts}")
            continue
        evidence = _send_weights(sides) if factor == factors.WEIGHTS else ""
        now |= {factor}
        figures, num_tokens = sides.measure(now)
        measured.append(Trial(factor, _METHODS[factor], figures, bounds, num_tokens, evidence))
        yield measured[-1]
        if measured[-1].agrees:
            yield from _hidden_causes(sides, now, [name for name in factors.RELEASED if name in now - {factor, *held}], measured[-1])


def _hidden_causes(sides: TrainerAndServers, held: frozenset[str], tried: Sequence[str], agreed: Trial) -> Iterator[Trial]:
    """Yields factors among ``tried`` that the last factor had masked: releasing one makes the two sides disagree again."""
    released, _ = sides.measure(held - set(tried))
    if replace(agreed, figures=released).agrees:
        return
    for name in tried:
        figures, _ = sides.measure(held - {name})
        if not replace(agreed, figures=figures).agrees:
            yield Trial(name, "released again", evidence=f"mean difference {figures.mean:.2g}", is_at_fault=True)


def _send_weights(sides: TrainerAndServers) -> str:
    """Publish the trainer's weights. Returns a description of the parameters that differed before."""
    names = sides.rollout.differing_weights()
    sides.rollout.publish()
    return f"{len(names)} parameters differed: {', '.join(names[:3])}{' and more' if len(names) > 3 else ''}" if names else "none differed"


async def _empty_cache(http: HttpSession, address: ServerAddress, timeout_s: float) -> None:
    """Flush the server's cache. Retries, because a server refuses while it is still releasing its last request."""
    for _ in range(_MAX_FLUSHES):
        try:
            await post_json(http, address, "/flush_cache", {}, timeout_s)
            return
        except UserError as error:
            problem = error
            await asyncio.sleep(_PAUSE_S)
    raise problem


async def post_json(http: HttpSession, address: ServerAddress, path: str, body: Any, timeout_s: float) -> bytes:
    """Content of one server's reply. Raises UserError if there is none or its status is not 200."""
    try:
        content = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        reply = await http.post(address.url + path, content, timeout_s=timeout_s, headers=bearer(address.api_key))
    except HttpError as error:
        raise UserError(f"server {address.url} does not reply to {path}: {error}; see its log") from error
    if reply.status != 200:
        raise UserError(f"server {address.url} replies to {path} with {reply.status}: {reply.text[:300]}")
    return reply.content


def _parsed(request: GenerationRequest, content: bytes, url: str) -> Generation:
    try:
        (sample,) = orjson.loads(content)
    except ValueError as error:
        raise UserError(f"server {url} returned no sample: {content[:200]!r}") from error
    return parse_generation(request, sample)


def _append(trajectory: Trajectory, answer: Generation) -> None:
    trajectory.segments.append(Segment(answer.token_ids, answer.logprobs, 0, answer.finish_reason, step=0))
    if answer.routes is not None:
        trajectory.routes = 0, answer.routes


# ---------------------------------------------------------------------------------------------------------- a launch


def main(job_file: str) -> None:
    job = MismatchJob(**json.loads(Path(job_file).read_text()))
    measured = run_job(job)
    if measured:
        Path(job.out).write_text(json.dumps([trial.as_json() for trial in measured]))


def run_job(job: MismatchJob) -> list[Trial]:
    """Collective over the ranks of the recipe's layout. Returns the trials on rank 0, an empty list on others. Raises UserError."""
    config = load_config([job.recipe])
    config = replace(config, rollout=replace(config.rollout, fire=FireConfig()))
    saved = next(iter(candidates(Path(job.run) / "checkpoints")), None)

    def policy_alone(topology: Topology) -> Mapping[str, Engine]:
        optimizer = config.policy.optimizer if saved else None  # a training checkpoint also contains the optimizer state
        return {"policy": build_engine(config, topology, "policy", config.policy, optimizer)}

    with trainer_ranks(config, policy_alone) as group, tempfile.TemporaryDirectory(prefix="megatron-rl-doctor-") as scratch:
        if group is None:
            return []
        if saved:
            group.load_state("policy", str(saved / "policy"))
        return list(_session(replace(config, run=replace(config.run, output_dir=scratch)), group, job))


def _session(config: Config, group: TrainerGroup, job: MismatchJob) -> Iterator[Trial]:
    tokenizer = Tokenizer(config.policy.path)
    loaded = load_prompts(config.data.train_files, config.data, tokenizer, max_prompt_tokens=config.batch.max_prompt_tokens)
    with temporary_servers(config, group, tokenizer) as (rollout, wait_for):
        if not uses_attached_servers(config.rollout) or factors.WEIGHTS in job.held:
            rollout.publish()
        sampling = Sampling.of(config.rollout, tokenizer, seed=base_seed(config))
        sampling = replace(sampling, routes=route_shape(config.policy.path) if returns_routes(config) else None)
        sides = TrainerAndServers(config, group, rollout, sampling, loaded.prompts, wait_for)
        yield from trials(sides, job.tries, name=job.name, how=job.how, held=job.held)


if __name__ == "__main__":
    main(sys.argv[1])
