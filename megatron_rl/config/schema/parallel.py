"""How a model is laid out over the trainer ranks."""

from dataclasses import dataclass, field

from megatron_rl.config.schema.bounds import above, at_least


@dataclass
class ParallelConfig:
    """How a model is laid out over the trainer ranks; what is left over replicates it (data parallelism)."""

    num_ranks: int = at_least(0, default=0)
    """Trainer ranks (processes). 0: as many as the launcher started; without a launcher, more than 1 starts torchrun."""
    tensor_parallel_size: int = at_least(1, default=1)
    """Ranks that share each matrix of a layer; they talk most, so keep them on one machine."""
    pipeline_parallel_size: int = at_least(1, default=1)
    """Stages that the layers are cut into, one after the other; for models that do not fit one machine."""
    sequence_parallel: bool = False
    """Shard activations outside attention and MLP over the tensor-parallel group."""
    context_parallel_size: int = at_least(1, default=1)
    """Ranks that share the tokens of each sequence (zigzag: every rank holds an early and a late part)."""
    expert_parallel_size: int = at_least(1, default=1)
    """Ranks that share the experts of a layer; they are taken from the data-, context- and tensor-parallel ranks."""
    expert_tensor_parallel_size: int = at_least(0, default=0)
    """Ranks that share one expert; 0 means tensor_parallel_size."""
    virtual_pipeline_size: int = at_least(1, default=1)
    """Model chunks of a pipeline rank: more than 1 interleaves them (smaller bubbles, more messages)."""
    pipeline_layers: list[int] = field(default_factory=list)
    """Layers of each stage in the model's order, pipeline x virtual numbers; empty: the same number everywhere."""
    collective_timeout_s: float = above(0, default=600.0)
    """A collective that waits longer fails and names the rank that it waited for."""
