"""One rank of test_stage_sync.py: a mixture of experts on PP 2 x EP 2, published to two servers of two workers each.

argv: a model folder and a folder that receives ``results.json``. Rank 0 starts the servers and goes through the
scenario; the results are what it saw after each publish.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import requests
import torch

from megatron_rl.config.derived import WeightMethod
from megatron_rl.config.schema import Config, ParallelConfig, Placement, PolicyConfig, RolloutConfig
from megatron_rl.data.batch import PackedBatch
from megatron_rl.parallel import topology as topologies
from megatron_rl.rollout.server_pool import ServerPool
from megatron_rl.rollout.sglang.process.options import ServerOptions
from megatron_rl.rollout.weight_sources import TrainerWeights
from megatron_rl.system.processes.signals import die_with_parent
from megatron_rl.training.engine import Engine
from megatron_rl.training.trainer_group import TrainerGroup
from megatron_rl.training.trainer_rank import Call, TrainerRank
from megatron_rl.weights.bucket_plan import ServerAddress
from megatron_rl.weights.publish import WeightPublisher, WeightSyncError

NUM_RANKS, TP_SIZE = 4, 2
SECOND_STAGE = 2
"""First rank of the second pipeline stage."""
PROMPT = [3 + i % 60 for i in range(20)]
NUM_TOKENS = 6


def change(rank: TrainerRank, engine: Engine, batch: list[PackedBatch]) -> None:
    with torch.no_grad():
        for chunk in engine.chunks:
            for parameter in chunk.parameters():
                parameter.mul_(1.02)


def fail(rank: TrainerRank, engine: Engine, batch: list[PackedBatch]) -> None:
    """One rank's next stream fails."""
    if rank.topology.rank == SECOND_STAGE:
        engine.export_weights = failing(engine, engine.export_weights)


def failing(engine: Engine, export: Callable[..., Iterator]) -> Callable[..., Iterator]:
    """The next stream ends in an error, after all of its collectives."""

    def stream(*arguments: Any, **keywords: Any) -> Iterator:
        engine.export_weights = export
        items = export(*arguments, **keywords)
        yield next(items)
        for _ in items:
            pass
        raise OSError("a broken rank")

    return stream


class Driver:
    def __init__(self, config: Config, group: TrainerGroup, servers: ServerPool) -> None:
        self.config, self.group, self.servers = config, group, servers
        self.version = 0
        self.results: dict[str, Any] = {}

    def change(self) -> None:
        self.group.transport.call(Call("change", change, "policy"))

    def publish(self, publisher: WeightPublisher, placement: Placement = Placement.disaggregated) -> None:
        self.version += 1
        config = replace(self.config, rollout=replace(self.config.rollout, placement=placement))
        TrainerWeights(config, self.group, "policy").publish(publisher, self.addresses(), self.version)

    def addresses(self) -> list[ServerAddress]:
        return [
            ServerAddress(server.url, TP_SIZE, server.incarnation, first_rank=TP_SIZE * i)
            for i, server in enumerate(self.servers.servers)
        ]

    def compare(self, name: str) -> None:
        """Largest difference of log-probs and the version, by server."""
        seen = []
        for server in self.servers.servers:
            sampling = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
            body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
            answer = requests.post(f"{server.url}/generate", json=body, timeout=120).json()
            tokens = torch.tensor(PROMPT + answer["output_ids"])
            mask = torch.arange(len(tokens)) >= len(PROMPT)
            batch = PackedBatch(tokens, torch.tensor([0, len(tokens)]), {"mask": mask})
            ours = self.group.logprobs(batch, temperature=1.0)[mask]
            theirs = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
            seen.append(((ours - theirs).abs().max().item(), answer["meta_info"]["weight_version"]))
        self.results[name] = {"seen": seen, "version": str(self.version)}

    def expect_failure(self, name: str, publisher: WeightPublisher, *placement: Placement) -> None:
        try:
            self.publish(publisher, *placement)
        except WeightSyncError as error:
            self.results[name] = str(error)

    def kill_during_export(self) -> str:
        """The next publish finds one server gone after its first tensors; returns that server's URL."""
        victim, export = self.servers.servers[1], self.group.export_weights

        def killing(*arguments: Any, **keywords: Any) -> Iterator:
            self.group.export_weights = export
            for i, item in enumerate(export(*arguments, **keywords)):
                if i == 20:
                    os.killpg(victim.pid, signal.SIGKILL)
                yield item

        self.group.export_weights = killing
        return victim.url


def scenario(driver: Driver, bucket_bytes: int) -> None:
    by_stage = WeightPublisher(bucket_bytes, 60.0)
    driver.publish(by_stage)
    driver.compare("first publish")
    driver.change()
    driver.compare("without a publish")
    driver.publish(by_stage)
    driver.compare("second publish, same groups")
    driver.group.transport.call(Call("fail", fail, "policy"))
    driver.expect_failure("failing rank", by_stage)

    by_memory = WeightPublisher(bucket_bytes, 60.0, method=WeightMethod.colocated)
    driver.change()
    driver.publish(by_memory, Placement.colocated)
    driver.compare("colocated")
    surplus = {**driver.group.expected_weights("policy"), "absent": (1,)}
    driver.group.expected_weights = lambda engine: surplus
    driver.expect_failure("colocated, missing tensor", by_memory, Placement.colocated)
    del driver.group.expected_weights
    driver.change()
    driver.publish(by_memory, Placement.colocated)
    driver.compare("colocated, after the failure")

    driver.results["killed"] = driver.kill_during_export()
    driver.expect_failure("killed server", by_stage)
    driver.servers.servers = driver.servers.servers[:1]
    driver.publish(by_stage)
    driver.compare("after the failures")
    by_stage.close()


def main() -> None:
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    bucket_bytes = 40_000
    config = Config(
        policy=PolicyConfig(path=str(model)),
        parallel=ParallelConfig(
            num_ranks=NUM_RANKS, pipeline_parallel_size=2, expert_parallel_size=2, collective_timeout_s=120.0
        ),
        rollout=RolloutConfig(bucket_bytes=bucket_bytes, weight_sync_timeout_s=60.0, tensor_parallel_size=TP_SIZE),
    )
    die_with_parent()
    topology = topologies.initialize(config.parallel, seed=1)
    engine = Engine("policy", model, parallel=config.parallel, topology=topology, optimizer=None)
    worker = TrainerRank(config, topology, {"policy": engine})
    if topology.rank == 0:
        options = ServerOptions(
            str(model), load_weights=False, tensor_parallel_size=TP_SIZE, server_args={"max-total-tokens": 4000}
        )
        group = TrainerGroup(worker)
        num_servers = NUM_RANKS // TP_SIZE
        with ServerPool.start(options, num_servers, out, while_waiting=group.heartbeat) as started:
            driver = Driver(config, group, ServerPool(started.servers))
            scenario(driver, bucket_bytes)
        group.stop()
        (out / "results.json").write_text(json.dumps(driver.results))
    else:
        worker.serve()
    topologies.destroy()


if __name__ == "__main__":
    main()
