"""The sections of single commands, and which commands need what."""

import math
from dataclasses import dataclass, field
from enum import Enum

from megatron_rl.config.schema.bounds import at_least, bounded, positive_share
from megatron_rl.config.schema.optimizers import OptimizerConfig

RL_COMMANDS = ("train", "critic-pretrain")
"""They sample responses and score them."""
SERVED_COMMANDS = (*RL_COMMANDS, "evaluate", "select-prompts", "label-lines", "doctor")
"""They sample from SGLang servers."""


@dataclass
class SftConfig:
    """`megatron-rl sft`: supervised warm start on data.response_field."""

    output_path: str = ""
    """Folder that receives the Hugging Face checkpoint."""
    train_files: list[str] = field(default_factory=list)
    """Files with a reference response in every row; empty: data.train_files."""
    num_steps: int = at_least(1, default=150)
    """Optimizer steps."""
    stop_at_loss: float = at_least(0, default=0.0)
    """End early once the mean loss of the last 10 steps is at most this; 0 means never."""
    batch_size: int = at_least(1, default=256)
    """Sequences in one optimizer step, over all ranks."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1.0e-3))


@dataclass
class CriticPretrainConfig:
    """`megatron-rl critic-pretrain`: regress the critic onto returns of the frozen policy until it has settled."""

    output_path: str = ""
    """Folder that receives the critic."""
    num_steps: int = at_least(1, default=20)
    """Most steps, whether or not the critic has settled."""
    min_steps: int = at_least(0, default=0)
    """Fewest steps, even if the critic settles earlier."""
    settle_window: int = at_least(0, default=0)
    """Steps over which value loss and explained variance must have stopped changing; 0: always num_steps."""
    settle_tolerance: float = at_least(0, default=0.02)
    """Relative change between two windows that counts as settled."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1.0e-3))


class RewardModelKind(Enum):
    """What a reward model scores."""

    bradley_terry = "bradley_terry"
    """One score per response, from preferences; becomes critic.path."""
    pairwise = "pairwise"
    """A judge that compares two responses with one word, from preferences; serves the rewards pairwise and genrm."""
    process = "process"
    """A score per line of a program, from line labels; becomes reward.process.path or critic.path."""


@dataclass
class RewardTrainConfig:
    """`megatron-rl reward-train`: a reward model from preferences or line labels."""

    kind: RewardModelKind = RewardModelKind.bradley_terry
    """What the model scores."""
    output_path: str = ""
    """Folder that receives the model."""
    train_files: list[str] = field(default_factory=list)
    """Preferences {prompt, chosen, rejected}, or for ``process`` what label-lines writes."""
    eval_files: list[str] = field(default_factory=list)
    """Rows of the same form that are held out."""
    num_steps: int = at_least(1, default=100)
    """Optimizer steps."""
    eval_every_steps: int = at_least(0, default=20)
    """Measure on eval_files every so many steps; 0 means only before and after."""
    batch_size: int = at_least(1, default=64)
    """Pairs (process: responses) in one optimizer step, over all ranks."""
    max_tokens: int = at_least(1, default=4096)
    """Longer rows are left out and counted."""
    yes_word: str = bounded("a word", bool, default="YES")
    """What the ``pairwise`` judge says when the first response is better; one token."""
    no_word: str = bounded("a word", bool, default="NO")
    """What the ``pairwise`` judge says when the second response is better; one token."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1.0e-5))


@dataclass
class LabelLinesConfig:
    """`megatron-rl label-lines`: which lines of a program can still be completed to a right one."""

    input_path: str = ""
    """Responses with their tests, as `score --reward code` takes them."""
    output_path: str = ""
    """JSONL that receives the rows with their line labels; what it already holds is not labelled again."""
    num_completions: int = at_least(1, default=20)
    """Completions that are sampled per question; a prefix is recoverable if one of them passes all tests."""
    max_new_tokens: int = at_least(1, default=512)
    """Longest completion."""


class SelectionRule(Enum):
    """Which prompts are kept."""

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
    """Which prompts are kept."""
    output_path: str = ""
    """JSONL that receives the kept rows; the report lies next to it."""
    scores_path: str = ""
    """JSONL with id and score, one row per response; empty: responses of policy.path are generated and graded."""
    num_samples: int = at_least(1, default=1)
    """Responses per prompt; pass_rate and spread need at least 2 (16 is in use)."""
    keep_share: float = positive_share(default=0.1)
    """Share kept inside each type by ``lowest``."""
    max_pass_rate: float = positive_share(default=0.75)
    """``pass_rate`` keeps prompts above 0 and up to this."""
    min_spread: float = bounded("more than 0", lambda value: 0 < value < math.inf, default=0.1)
    """``spread`` keeps prompts with max - mean of at least this."""
