"""Prompts (files, columns, mixtures, images), rewards that score responses, and environments that reply in a dialogue."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megatron_rl.config.schema.bounds import above, at_least, bounded, items_at_least, prompt_template, share


@dataclass
class RewardRouteConfig:
    """The reward of one prompt type."""

    name: str = ""
    """An entry of the reward registry, package.module:function or path/file.py:function."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the reward, checked against its signature."""
    timeout_s: float = at_least(0, default=0.0)
    """Time limit for scoring one response of this type, in seconds. 0: reward.timeout_s."""
    rescale_to: list[float] = field(default_factory=list)
    """[low, high]: the reward's range is mapped linearly to this range. Empty: no rescaling."""


@dataclass
class ProcessRewardConfig:
    """Dense rewards at line ends from a process reward model; needs schedule.mode=sync."""

    path: str = ""
    """Folder of the process reward model. Empty: no process rewards."""
    weight_if_failed: float = at_least(0, default=0.25)
    """Largest sum of the line rewards of a response that fails its tests."""
    weight_if_passed: float = at_least(0, default=0.025)
    """Largest sum of the line rewards of a response that passes its tests."""


@dataclass
class RewardConfig:
    """The reward functions that score responses, with their time limits."""

    name: str = "math"
    """An entry of the reward registry, package.module:function or path/file.py:function."""
    by_type: dict[str, RewardRouteConfig] = field(default_factory=dict)
    """Rewards by prompt type; they replace ``name``, and every type needs an entry."""
    require_think: bool = False
    """Score a response 0 unless its form is <think>...</think>solution; the reward gets only the solution."""
    process: ProcessRewardConfig = field(default_factory=ProcessRewardConfig)
    num_workers: int = at_least(1, default=2)
    """Reward workers (processes) of a reward that computes on the CPU."""
    timeout_s: float = above(0, default=5.0)
    """Time limit for scoring one response, in seconds; past it, scoring is killed and the response is masked and counted."""
    max_error_rate: float = share(default=0.1)
    """Largest fraction of a step's responses that may stay unscored; a larger one stops the run (health.reward_errors)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the reward, checked against its signature."""
    max_concurrency: int = at_least(1, default=256)
    """Requests in progress of a reward that calls a server."""
    max_retries: int = at_least(0, default=1)
    """Retries per response after its reward worker exited or its server failed."""
    memory_limit_mb: int = at_least(64, default=2048)
    """Largest allocation of one reward worker, in MB."""
    start_timeout_s: float = above(0, default=60.0)
    """Time limit for importing the reward, in seconds."""


@dataclass
class EnvironmentConfig:
    """The environment that replies to the policy's turns in a dialogue."""

    name: str = ""
    """A registered environment (pag, calculator) or package.module:Class. Empty: one response, no dialogue."""
    max_turn_tokens: int = at_least(0, default=0)
    """Generated tokens per turn. 0: the rest of the budget."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment, checked against its signature."""
    call_timeout_s: float = above(0, default=600.0)
    """Time limit for one reply of an environment that waits (``async def respond``), in seconds. A dialogue whose reply is late
    ends unscored: it is masked and counted."""
    episode_timeout_s: float = above(0, default=3600.0)
    """Time limit for a whole dialogue of an environment that waits, in seconds. A resumed run starts the count again."""
    step_wait_s: float = at_least(0, default=5.0)
    """Seconds that a window waits for the environment after the last response has stopped to grow. Then the step trains without
    the dialogues that wait; they continue in a later window. Full responses (schedule.mode=sync) wait to the end."""


class DuplicateIds(Enum):
    """Treatment of rows whose id an earlier row has."""

    error = "error"
    """Raise an error with the rows' locations (file:line)."""
    drop = "drop"
    """Keep the first row; count the others."""


@dataclass
class CurriculumPhase:
    """A mixture for the first steps."""

    until_step: int = 0
    """The phase covers the steps before this one; larger than in the previous phase."""
    mixture: dict[str, float] = field(default_factory=dict, metadata=items_at_least(0))
    """Weight of each prompt type in this phase."""


@dataclass
class DataConfig:
    """The prompts of a run: files, names of columns, mixture."""

    train_files: list[str] = field(default_factory=list)
    """Training prompts: JSONL or Parquet files, folders of local Hugging Face datasets, or names of downloaded ones
    (owner/name, or a folder in it)."""
    eval_files: list[str] = field(default_factory=list)
    """Evaluation prompts, in the same formats."""
    id_field: str = "id"
    """Column of a row's id. Optional in the file; the location file:line replaces it."""
    prompt_field: str = bounded("the name of a column", bool, default="prompt")
    """Column of the prompt: text, or a list of chat messages."""
    answer_field: str = bounded("the name of a column", bool, default="answer")
    """Column of the ground truth that the reward compares with."""
    answer_required: bool = True
    """Refuse rows without the ground truth; false: a judge scores such rows."""
    response_field: str = bounded("the name of a column", bool, default="response")
    """Column of the reference response that sft trains on."""
    messages_field: str = ""
    """Column of a whole conversation, OpenAI's messages or ShareGPT's, whose assistant turns sft trains on. Rows without
    it have a prompt and a response. Empty: no column."""
    type_field: str = "type"
    """Column of the prompt's type or domain, which selects mixture weight, KL coefficient and reward. Optional in the file."""
    reward_fields: list[str] = field(default_factory=list)
    """Additional columns that the reward reads; nested names such as reward_model.ground_truth are allowed."""
    split: str = "train"
    """Split of a Hugging Face dataset folder."""
    duplicate_ids: DuplicateIds = DuplicateIds.error
    """Treatment of rows whose id an earlier row has."""
    mixture: dict[str, float] = field(default_factory=dict, metadata=items_at_least(0))
    """Weight of each prompt type. Empty: every prompt once per epoch."""
    curriculum: list[CurriculumPhase] = field(default_factory=list)
    """Mixtures of the first steps, in order; ``mixture`` applies after the last phase."""
    shuffle: bool = True
    """Shuffle the prompts in each epoch; false: keep the order of the files."""
    instruction: str = prompt_template(default="")
    """Text around each prompt, for example a demanded form of the answer; {prompt} is the place of the row's text. A prompt of
    messages remains as it is."""
    use_chat_template: bool = False
    """Wrap the prompt as a user message in the tokenizer's chat template."""
    system_prompt: str = ""
    """System message before the prompt; needs use_chat_template."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template for every prompt that uses it, for example {enable_thinking: false}."""
    chat_template_kwargs_field: str = "chat_template_kwargs"
    """Column of a row's own chat-template arguments, which override chat_template_kwargs. Optional in the file. Empty: no column."""
    tools_field: str = "tools"
    """Column of the tools that the chat template shows for a row, a list of JSON schemas. Optional in the file. Empty: no column."""
    images_field: str = "images"
    """Column of the images for the <image> marks of a text prompt. Optional in the file."""
    image_dir: str = ""
    """Folder that image paths are relative to. Empty: the folder of the data file."""
    max_video_tokens: int = at_least(1, default=81_920)
    """Largest number of visual tokens per video: frames get coarser first, then fewer (arXiv 2505.07062)."""
    video_frame_tokens: list[int] = field(default_factory=lambda: [640, 512, 384, 256, 160, 128], metadata=items_at_least(1))
    """Possible numbers of tokens per frame; a video uses the largest one at which all frames fit."""
