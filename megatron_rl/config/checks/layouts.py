"""Layouts of policy and critic over the ranks, and servers on the devices of the ranks."""

from collections.abc import Iterator

from megatron_rl.config.layout import layout_problems, of_critic
from megatron_rl.config.schema import Config


def problems(config: Config, world_size: int | None) -> Iterator[str]:
    parallel = config.parallel
    ranks = world_size if world_size is not None else parallel.num_ranks
    if world_size is not None and parallel.num_ranks not in (0, world_size):
        yield (
            f"parallel.num_ranks: the configuration wants {parallel.num_ranks} ranks, but the launcher started {world_size}; "
            "start as many (launch/torchrun.sh: RANKS_PER_NODE), or set parallel.num_ranks=0 to take what the launcher gives"
        )
    yield from layout_problems(parallel, ranks)
    own = config.critic.parallel
    if own is None:
        return
    if own.num_ranks not in (0, parallel.num_ranks):
        yield (
            f"critic.parallel.num_ranks: the critic uses the policy's ranks, parallel.num_ranks={parallel.num_ranks}; "
            f"leave it at 0, got {own.num_ranks}"
        )
    yield from (of_critic(problem) for problem in layout_problems(own, ranks))
