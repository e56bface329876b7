"""The sections of single commands, and the commands that sample."""

import math
from dataclasses import dataclass, field
from enum import Enum

from megatron_rl.config.schema.bounds import above, at_least, between, bounded, positive_share
from megatron_rl.config.schema.models import OptimizerConfig

RL_COMMANDS = ("train", "critic-pretrain")
"""Commands that sample responses and score them."""
SERVED_COMMANDS = (*RL_COMMANDS, "evaluate", "select-prompts", "label-lines", "doctor")
"""Commands that sample from SGLang servers."""


class TrainTurns(Enum):
    """Turns of the assistant that `megatron-rl sft` trains in a conversation."""

    all = "all"
    """Every turn of the assistant, except those with weight 0."""
    last = "last"
    """Only the last of these."""


@dataclass
class SftConfig:
    """`megatron-rl sft`: supervised training on data.response_field, or on the assistant's turns of data.messages_field."""

    output_path: str = ""
    """Folder that receives the Hugging Face checkpoint."""
    train_files: list[str] = field(default_factory=list)
    """Files with a reference response or a conversation in every row. Empty: data.train_files."""
    train_turns: TrainTurns = TrainTurns.all
    """Turns of a conversation that are trained."""
    num_steps: int = at_least(1, default=150)
    """Number of updates."""
    stop_at_loss: float = at_least(0, default=0.0)
    """Stop early once the mean loss of the last 10 updates is at most this value. 0: never."""
    batch_size: int = at_least(1, default=256)
    """Sequences per update, over all ranks."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1.0e-3))


@dataclass
class CriticPretrainConfig:
    """`megatron-rl critic-pretrain`: train the critic on returns of the frozen policy until its metrics have converged."""

    output_path: str = ""
    """Folder that receives the critic."""
    num_steps: int = at_least(1, default=20)
    """Largest number of steps, also if the critic has not converged."""
    min_steps: int = at_least(0, default=0)
    """Smallest number of steps, also if the critic converges earlier."""
    settle_window: int = at_least(0, default=0)
    """Steps per window; training ends once value loss and explained variance differ by at most 2 % between two
    consecutive windows. 0: always num_steps."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1.0e-3))


class RewardModelKind(Enum):
    """Kind of reward model."""

    bradley_terry = "bradley_terry"
    """One score per response, trained on preferences; serves the reward reward_model, or becomes critic.path."""
    pairwise = "pairwise"
    """A judge that compares two responses with one word, trained on preferences; serves the rewards pairwise and genrm."""
    process = "process"
    """One score per line of a program, trained on line labels; becomes reward.process.path or critic.path."""


@dataclass
class RewardTrainConfig:
    """`megatron-rl reward-train`: train a reward model on preferences or line labels."""

    kind: RewardModelKind = RewardModelKind.bradley_terry
    """Kind of reward model."""
    output_path: str = ""
    """Folder that receives the model."""
    train_files: list[str] = field(default_factory=list)
    """Preferences {prompt, chosen, rejected}, or for ``process`` the output of label-lines."""
    eval_files: list[str] = field(default_factory=list)
    """Held-out rows of the same form."""
    num_steps: int = at_least(1, default=100)
    """Number of updates."""
    eval_every_steps: int = at_least(0, default=20)
    """Number of updates between two evaluations on eval_files. 0: evaluate only before and after training."""
    batch_size: int = at_least(1, default=64)
    """Pairs (process: responses) per update, over all ranks."""
    max_tokens: int = at_least(1, default=4096)
    """Longest row in tokens; longer rows are skipped and counted."""
    yes_word: str = bounded("a word", bool, default="YES")
    """Judgment of the ``pairwise`` judge that the first response is better; one token."""
    no_word: str = bounded("a word", bool, default="NO")
    """Judgment of the ``pairwise`` judge that the second response is better; one token."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1.0e-5))


class PreferenceLoss(Enum):
    """Loss of a preference pair with the margin m = log-ratio of chosen - log-ratio of rejected."""

    sigmoid = "sigmoid"
    """-log sigmoid(beta * m): DPO (arXiv 2305.18290)."""
    ipo = "ipo"
    """(m - 1 / (2 * beta))^2: IPO (arXiv 2310.12036), commonly with length_normalized."""


@dataclass
class DpoConfig:
    """`megatron-rl dpo`: train the policy on preferences, relative to the policy it starts from."""

    loss: PreferenceLoss = PreferenceLoss.sigmoid
    """Loss of a pair."""
    beta: float = above(0, default=0.1)
    """Strength with which the reference holds the policy."""
    label_smoothing: float = between(0, 0.5, default=0.0)
    """Assumed probability that a pair's label is wrong (conservative DPO)."""
    length_normalized: bool = False
    """Divide the log-ratio of a response by its number of tokens."""
    output_path: str = ""
    """Folder that receives the Hugging Face checkpoint."""
    train_files: list[str] = field(default_factory=list)
    """Preferences {prompt, chosen, rejected}."""
    eval_files: list[str] = field(default_factory=list)
    """Held-out rows of the same form."""
    num_steps: int = at_least(1, default=100)
    """Number of updates."""
    eval_every_steps: int = at_least(0, default=20)
    """Number of updates between two evaluations on eval_files. 0: evaluate only before and after training."""
    batch_size: int = at_least(1, default=64)
    """Pairs per update, over all ranks."""
    max_tokens: int = at_least(1, default=4096)
    """Longest prompt with a response in tokens; longer rows are skipped and counted."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1.0e-6))


@dataclass
class LabelLinesConfig:
    """`megatron-rl label-lines`: label the lines of a program from which a correct program can still be completed."""

    input_path: str = ""
    """Responses with their tests, in the format of `score --reward code`."""
    output_path: str = ""
    """JSONL that receives the rows with their line labels; rows that it already has are not labeled again."""
    num_completions: int = at_least(1, default=20)
    """Completions sampled per prefix; a prefix is recoverable if one of them passes all tests."""
    max_new_tokens: int = at_least(1, default=512)
    """Longest completion in tokens."""


class SelectionRule(Enum):
    """Rule that selects prompts."""

    lowest = "lowest"
    """Keep the lowest fraction of standardized scores within each type (Pre-PPO)."""
    pass_rate = "pass_rate"
    """Keep prompts with a pass rate above 0 and at most max_pass_rate."""
    spread = "spread"
    """Keep prompts whose best response scores above their mean."""


@dataclass
class SelectPromptsConfig:
    """`megatron-rl select-prompts`: select the prompts to train on."""

    rule: SelectionRule = SelectionRule.lowest
    """Rule that selects prompts."""
    output_path: str = ""
    """JSONL that receives the selected rows; the report is written next to it."""
    scores_path: str = ""
    """JSONL with id and score, one row per response. Empty: responses of policy.path are generated and scored."""
    num_samples: int = at_least(1, default=1)
    """Responses per prompt; pass_rate and spread need at least 2 (16 is in use)."""
    keep_share: float = positive_share(default=0.1)
    """Fraction that ``lowest`` keeps within each type."""
    max_pass_rate: float = positive_share(default=0.75)
    """Largest pass rate that ``pass_rate`` keeps."""
    min_spread: float = bounded("more than 0", lambda value: 0 < value < math.inf, default=0.1)
    """Smallest max - mean of a prompt's scores that ``spread`` keeps."""
