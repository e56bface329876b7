"""The parallel layout of a model over the trainer ranks."""

from dataclasses import dataclass, field

from megatron_rl.config.schema.bounds import above, at_least


@dataclass
class ParallelConfig:
    """The layout of a model over the trainer ranks; the remaining factor replicates the model (data parallelism)."""

    num_ranks: int = at_least(0, default=0)
    """Trainer ranks (processes). 0: all that the launcher started; without a launcher, more than 1 starts torchrun."""
    tensor_parallel_size: int = at_least(1, default=1)
    """Ranks that share each matrix of a layer. They exchange the most data, so keep them on one node."""
    pipeline_parallel_size: int = at_least(1, default=1)
    """Consecutive stages that the layers are split into, for models that do not fit one node."""
    sequence_parallel: bool = False
    """Shard activations outside attention and MLP over the tensor-parallel group."""
    context_parallel_size: int = at_least(1, default=1)
    """Ranks that share the tokens of each sequence (zigzag: every rank has an early and a late span)."""
    expert_parallel_size: int = at_least(1, default=1)
    """Ranks that share the experts of a layer, taken from the data-, context- and tensor-parallel ranks."""
    expert_tensor_parallel_size: int = at_least(0, default=0)
    """Ranks that share one expert. 0: tensor_parallel_size."""
    virtual_pipeline_size: int = at_least(1, default=1)
    """Model chunks per pipeline rank; more than 1 interleaves them (smaller bubbles, more messages)."""
    pipeline_layers: list[int] = field(default_factory=list)
    """Layers of each stage in the model's order, pipeline x virtual values. Empty: the same number everywhere."""
    collective_timeout_s: float = above(0, default=600.0)
    """Time limit of a collective in seconds; after it the collective fails and names the rank that did not join."""
