"""``megatron-rl doctor`` on a recipe's trainer and servers: servers reply, take the trainer's weights, match its log-probs.

Every rank of a launch calls ``engine_lines``; with ``python -m megatron_rl.desk.doctor.engine_checks JOB`` rank 0
writes the results into a file. Attached servers keep the weights of the check.
"""

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_rl.config.derived import uses_attached_servers, weight_method
from megatron_rl.config.load import load_config
from megatron_rl.config.schema import Config, FireConfig, HealthConfig
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.trajectory import Prompt
from megatron_rl.desk.doctor.machine_checks import FAIL, OK, SKIPPED, WARN, CheckResult
from megatron_rl.desk.doctor.trainer_and_servers import temporary_servers
from megatron_rl.errors import UserError
from megatron_rl.parallel.topology import Topology
from megatron_rl.rollout.service import RolloutService
from megatron_rl.step.parity import EngineMismatch, ParityCheck
from megatron_rl.training.engine import Engine
from megatron_rl.training.trainer_group import TrainerGroup
from megatron_rl.training.trainer_ranks import build_engine, trainer_ranks
from megatron_rl.weights.verify import ChecksumReport

_ANSWER, _SYNC, _CHECKSUMS, _PARITY = "SGLang's reply", "weight sync", "weight checksums", "log-prob parity"
_PROMPT_TOKENS = (8, 40)
_MAX_SHOWN = 5


def main(job_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    lines = engine_lines(load_config(job["config"], job["overrides"]))
    if lines:
        Path(job["out"]).write_text(json.dumps([asdict(line) for line in lines]))


def engine_lines(config: Config) -> list[CheckResult]:
    """Collective over the ranks of the recipe's layout. Returns the results on rank 0, an empty list on the others.

    The first failure ends the check: later checks would fail for the same reason.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-rl-doctor-") as scratch:
        config = _plain(config, scratch)

        def policy_alone(topology: Topology) -> Mapping[str, Engine]:
            return {"policy": build_engine(config, topology, "policy", config.policy, None)}

        with trainer_ranks(config, policy_alone) as group:
            return [] if group is None else list(_lines(config, group))


def _plain(config: Config, scratch: str) -> Config:
    """The configuration without parts that the check does not cover: the run's folder, hot tokens, health actions."""
    return replace(
        config,
        run=replace(config.run, output_dir=scratch),
        rollout=replace(config.rollout, fire=FireConfig()),
        health=HealthConfig(),
    )


def _lines(config: Config, group: TrainerGroup) -> Iterator[CheckResult]:
    # Name of the check in progress, for the line that reports an exception.
    current = _ANSWER
    started_s = time.perf_counter()
    try:
        tokenizer = Tokenizer(config.policy.path)
        with temporary_servers(config, group, tokenizer) as (rollout, wait_for):
            yield from _answer_lines(config, rollout, time.perf_counter() - started_s)
            current = _SYNC
            done = rollout.publish()
            way = weight_method(config.rollout).value
            yield CheckResult(_SYNC, OK, f"{done.num_bytes:,} bytes in {done.seconds:.2f} s ({way})")
            current = _CHECKSUMS
            yield checksum_line(rollout.compare_weights())
            current = _PARITY
            yield _parity_line(config, group, rollout, tokenizer, wait_for)
    except (UserError, TimeoutError) as error:
        yield CheckResult(current, FAIL, str(error) or "no reply in time")


def _answer_lines(config: Config, rollout: RolloutService, seconds: float) -> Iterator[CheckResult]:
    how = "attached to" if uses_attached_servers(config.rollout) else "started"
    urls = ", ".join(rollout.urls)
    yield CheckResult(_ANSWER, OK, f"{how} {urls} in {seconds:.0f} s, {config.policy.dtype.value}")
    for remark in rollout.remarks:
        yield CheckResult("servers' precision", WARN, *remark)


def checksum_line(report: ChecksumReport) -> CheckResult:
    compared = f"{report.num_compared} parameters compared with the {report.reference}'s"
    if report.reference == "servers":
        compared = f"{report.num_compared} parameters compared between servers"
    if report.differing:
        names = sorted({name for names in report.differing.values() for name in names})
        more = " and more" if len(names) > _MAX_SHOWN else ""
        text = f"{compared}: {len(names)} differ: {', '.join(names[:_MAX_SHOWN])}{more}"
        remedy = "start the servers from the same config.json, and let no other process send them weights"
        return CheckResult(_CHECKSUMS, FAIL, text, remedy)
    if not report.num_compared or report.uncompared:
        return CheckResult(_CHECKSUMS, WARN, f"{compared}. {report.note}".strip())
    return CheckResult(_CHECKSUMS, OK, f"{compared}: equal. {report.note}".strip())


def _parity_line(
    config: Config, group: TrainerGroup, rollout: RolloutService, tokenizer: Tokenizer, wait_for: Callable[..., Any]
) -> CheckResult:
    check = ParityCheck(
        config, random_prompts(config, tokenizer), group=group, rollout=rollout, vision=tokenizer.vision, wait_for=wait_for
    )
    if not check.wanted:
        return CheckResult(_PARITY, SKIPPED, "rollout.max_logprob_difference=0")
    try:
        parity = check.compare()
    except EngineMismatch as error:
        return CheckResult(_PARITY, FAIL, str(error))
    return CheckResult(_PARITY, OK, f"{parity.num_tokens} sampled tokens: {parity}")


def random_prompts(config: Config, tokenizer: Tokenizer) -> list[Prompt]:
    """Prompts of random ordinary tokens: they need no data, and the model has not memorized them."""
    draw = random.Random(1)
    banned = set(tokenizer.special_ids) | set(tokenizer.vision.banned_token_ids if tokenizer.vision is not None else ())
    ordinary = [token for token in range(tokenizer.vocab_size) if token not in banned]
    return [
        Prompt(f"random {i}", tuple(draw.choices(ordinary, k=draw.randint(*_PROMPT_TOKENS))))
        for i in range(config.rollout.num_parity_prompts)
    ]


if __name__ == "__main__":
    main(sys.argv[1])
