"""Sections of the commands besides `megatron-rl train`."""

from dataclasses import dataclass, field
from enum import Enum

from megatron_rl.config.schema.optimizer import OptimizerConfig


@dataclass
class SftConfig:
    """`megatron-rl sft`: supervised warm start on data.response_field."""

    output_path: str = ""
    """Folder that receives the Hugging Face checkpoint."""
    train_files: list[str] = field(default_factory=list)
    """Files with a reference response in every row; empty: data.train_files."""
    num_steps: int = 150
    stop_at_loss: float = 0.0
    """End early once the mean loss of the last 10 steps is at most this; 0 means never."""
    batch_size: int = 256
    """Sequences in one optimizer step, over all ranks."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1.0e-3))


@dataclass
class CriticPretrainConfig:
    """`megatron-rl critic-pretrain`: regress the critic onto returns of the frozen policy until it has settled."""

    output_path: str = ""
    """Folder that receives the critic."""
    num_steps: int = 20
    """At most."""
    min_steps: int = 0
    """At least."""
    settle_window: int = 0
    """Steps over which value loss and explained variance must have stopped changing; 0: always num_steps."""
    settle_tolerance: float = 0.02
    """Relative change between two windows that counts as settled."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1.0e-3))


class RewardModelKind(Enum):
    bradley_terry = "bradley_terry"
    pairwise = "pairwise"
    process = "process"


@dataclass
class RewardTrainConfig:
    """`megatron-rl reward-train`: a reward model from preferences or line labels."""

    kind: RewardModelKind = RewardModelKind.bradley_terry
    output_path: str = ""
    """Folder that receives the model."""
    train_files: list[str] = field(default_factory=list)
    """Preferences {prompt, chosen, rejected}, or for ``process`` what label-lines writes."""
    eval_files: list[str] = field(default_factory=list)
    num_steps: int = 100
    eval_every_steps: int = 20
    batch_size: int = 64
    """Pairs (process: responses) in one optimizer step, over all ranks."""
    max_tokens: int = 4096
    """Longer rows are left out and counted."""
    yes_word: str = "YES"
    no_word: str = "NO"
    """The judgement words of ``pairwise``; each must be one token."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1.0e-5))


@dataclass
class LabelLinesConfig:
    """`megatron-rl label-lines`: which lines of a program can still be completed to a right one."""

    input_path: str = ""
    """Responses with their tests, as `score --reward code` takes them."""
    output_path: str = ""
    num_completions: int = 20
    max_new_tokens: int = 512


class SelectionRule(Enum):
    lowest = "lowest"
    """The lowest share of standardised scores inside each type (Pre-PPO)."""
    pass_rate = "pass_rate"
    """Prompts that are solved sometimes."""
    spread = "spread"
    """Prompts whose best response is better than their mean one."""


@dataclass
class SelectPromptsConfig:
    """`megatron-rl select-prompts`: which prompts are worth training on."""

    rule: SelectionRule = SelectionRule.lowest
    output_path: str = ""
    """JSONL that receives the kept rows; the report lies beside it."""
    scores_path: str = ""
    """JSONL with id and score, one row a response; empty: responses of policy.path are generated and graded."""
    num_samples: int = 1
    """Responses to a prompt."""
    keep_share: float = 0.1
    """Share kept inside each type by ``lowest``."""
    max_pass_rate: float = 0.75
    """``pass_rate`` keeps prompts above 0 and up to this."""
    min_spread: float = 0.1
    """``spread`` keeps prompts with max - mean of at least this."""
