"""Prompts: files, fields, mixtures, images."""

from dataclasses import dataclass, field
from enum import Enum


class DuplicateIds(Enum):
    error = "error"
    drop = "drop"
    """The first row stays; the others are counted."""


@dataclass
class CurriculumPhase:
    until_step: int = 0
    """The phase covers the steps before this one."""
    mixture: dict[str, float] = field(default_factory=dict)


@dataclass
class DataConfig:
    train_files: list[str] = field(default_factory=list)
    """Prompts: JSONL or Parquet files, or folders of local Hugging Face datasets."""
    eval_files: list[str] = field(default_factory=list)
    id_field: str = "id"
    """Optional in the file; the place file:line stands in for it."""
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    answer_required: bool = True
    """False: a row may lack the answer (a judge decides)."""
    response_field: str = "response"
    """The reference solution that sft trains on."""
    type_field: str = "type"
    """The prompt's type or domain: mixtures, KL coefficients and rewards go by it. Optional in the file."""
    reward_fields: list[str] = field(default_factory=list)
    """Further fields of a row that its reward reads. Fields may be nested: reward_model.ground_truth."""
    split: str = "train"
    """Which split of a Hugging Face dataset folder."""
    duplicate_ids: DuplicateIds = DuplicateIds.error
    mixture: dict[str, float] = field(default_factory=dict)
    """Weight of each prompt type; empty: every prompt once an epoch."""
    curriculum: list[CurriculumPhase] = field(default_factory=list)
    """Mixtures of the first steps, in order; ``mixture`` holds after the last phase."""
    shuffle: bool = True
    use_chat_template: bool = False
    """Wrap the prompt as a user message in the tokenizer's chat template."""
    system_prompt: str = ""
    """System message before the prompt; needs use_chat_template."""
    images_field: str = "images"
    """Column of images for the <image> marks of a prompt that is text. Optional in the file."""
    image_dir: str = ""
    """Where image paths start; empty: the folder of the data file."""
    max_video_tokens: int = 81_920
    """Most visual tokens of one video: its frames get coarser, then fewer (arXiv 2505.07062)."""
    video_frame_tokens: list[int] = field(default_factory=lambda: [640, 512, 384, 256, 160, 128])
    """Tokens that a frame may take; the largest at which all frames fit is chosen."""
