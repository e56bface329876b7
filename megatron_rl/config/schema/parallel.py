"""How a model is laid out over the trainer ranks."""

from dataclasses import dataclass, field


@dataclass
class ParallelConfig:
    num_ranks: int = 0
    """Trainer ranks (processes). 0: as many as the launcher started; without a launcher, more than 1 starts torchrun."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    sequence_parallel: bool = False
    """Shard activations outside attention and MLP over the tensor-parallel group."""
    context_parallel_size: int = 1
    """Ranks that share the tokens of each sequence (zigzag: every rank holds an early and a late part)."""
    expert_parallel_size: int = 1
    """Ranks that share the experts of a layer; they are taken from the data-, context- and tensor-parallel ranks."""
    expert_tensor_parallel_size: int = 0
    """Ranks that share one expert; 0 means tensor_parallel_size."""
    virtual_pipeline_size: int = 1
    """Model chunks of a pipeline rank: more than 1 interleaves them (smaller bubbles, more messages)."""
    pipeline_layers: list[int] = field(default_factory=list)
    """Layers of each stage in the model's order, pipeline x virtual numbers; empty: the same number everywhere."""
    collective_timeout_s: float = 600.0
    """A collective that waits longer fails and says so."""
