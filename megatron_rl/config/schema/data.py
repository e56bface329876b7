"""Prompts: files, fields, mixtures, images."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megatron_rl.config.schema.bounds import at_least, items_at_least


class DuplicateIds(Enum):
    """What becomes of rows whose id an earlier row has."""

    error = "error"
    """They are refused with their places."""
    drop = "drop"
    """The first row stays; the others are counted."""


@dataclass
class CurriculumPhase:
    """A mixture of the first steps."""

    until_step: int = 0
    """The phase covers the steps before this one; more than the phase before has."""
    mixture: dict[str, float] = field(default_factory=dict, metadata=items_at_least(0))
    """Weight of each prompt type in this phase."""


@dataclass
class DataConfig:
    """Prompts: where they stand, what their columns are called, in which mixture they come."""

    train_files: list[str] = field(default_factory=list)
    """Prompts: JSONL or Parquet files, or folders of local Hugging Face datasets."""
    eval_files: list[str] = field(default_factory=list)
    """Prompts of evaluations, in the same formats."""
    id_field: str = "id"
    """Column of a row's id. Optional in the file; the place file:line stands in for it."""
    prompt_field: str = "prompt"
    """Column of the prompt: text, or a list of chat messages."""
    answer_field: str = "answer"
    """Column of the right answer, which the reward compares with."""
    answer_required: bool = True
    """False: a row may lack the answer (a judge decides)."""
    response_field: str = "response"
    """Column of the reference solution that sft trains on."""
    type_field: str = "type"
    """Column of the prompt's type or domain, which mixtures, KL coefficients and rewards are chosen by. Optional in the file."""
    reward_fields: list[str] = field(default_factory=list)
    """Further columns that the reward of a row reads. They may be nested: reward_model.ground_truth."""
    split: str = "train"
    """Which split of a Hugging Face dataset folder."""
    duplicate_ids: DuplicateIds = DuplicateIds.error
    """What becomes of rows whose id an earlier row has."""
    mixture: dict[str, float] = field(default_factory=dict, metadata=items_at_least(0))
    """Weight of each prompt type; empty: every prompt once per epoch."""
    curriculum: list[CurriculumPhase] = field(default_factory=list)
    """Mixtures of the first steps, in order; ``mixture`` holds after the last phase."""
    shuffle: bool = True
    """Shuffle the prompts anew in each epoch; false: in the order of the files."""
    use_chat_template: bool = False
    """Wrap the prompt as a user message in the tokenizer's chat template."""
    system_prompt: str = ""
    """System message before the prompt; needs use_chat_template."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template for every prompt that goes through it, as {enable_thinking: false}."""
    chat_template_kwargs_field: str = "chat_template_kwargs"
    """Column of a row's own arguments of the chat template, over chat_template_kwargs. Optional in the file; empty: none is read."""
    tools_field: str = "tools"
    """Column of the tools that the chat template shows for a row, as a list of JSON schemas. Optional in the file; empty: none."""
    images_field: str = "images"
    """Column of images for the <image> marks of a prompt that is text. Optional in the file."""
    image_dir: str = ""
    """Where image paths start; empty: the folder of the data file."""
    max_video_tokens: int = at_least(1, default=81_920)
    """Most visual tokens of one video: its frames get coarser, then fewer (arXiv 2505.07062)."""
    video_frame_tokens: list[int] = field(default_factory=lambda: [640, 512, 384, 256, 160, 128])
    """Tokens that a frame may take; the largest at which all frames fit is chosen."""
