"""The configuration schema: one dataclass per section, a docstring under each field, units in the names.

A recipe is a YAML file with these sections; ``key=value`` on the command line overrides its values (``load.py``). Rules
that span several fields are in ``checks``. No value is ever rewritten silently.
"""

from dataclasses import dataclass, field

from megatron_rl.config.schema.algorithm import (
    AlgorithmConfig,
    Bootstrap,
    CorrectionConfig,
    DynamicSamplingConfig,
    KlConfig,
    KlPlace,
    LambdaKind,
    Normalization,
    OldPolicy,
    Overlong,
)
from megatron_rl.config.schema.commands import (
    CriticPretrainConfig,
    DpoConfig,
    LabelLinesConfig,
    PreferenceLoss,
    RewardModelKind,
    RewardTrainConfig,
    SelectionRule,
    SelectPromptsConfig,
    SftConfig,
    TrainTurns,
)
from megatron_rl.config.schema.data import (
    CurriculumPhase,
    DataConfig,
    DuplicateIds,
    EnvironmentConfig,
    ProcessRewardConfig,
    RewardConfig,
    RewardRouteConfig,
)
from megatron_rl.config.schema.models import (
    CriticConfig,
    DecayStyle,
    Dispatcher,
    Dtype,
    Fp8,
    GroupedGemm,
    Init,
    LoadBalancing,
    LoraConfig,
    LoraSync,
    MoeConfig,
    Moments,
    Mtp,
    Offload,
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
    Recompute,
    ReferenceConfig,
    RouterDtype,
    RoutingReplay,
    VisionConfig,
)
from megatron_rl.config.schema.rollout import (
    FireConfig,
    FireLoss,
    ParityBoundsConfig,
    Placement,
    RolloutConfig,
    WeightSync,
)
from megatron_rl.config.schema.run import (
    BatchConfig,
    EvalConfig,
    EvalSetConfig,
    HealthAction,
    HealthConfig,
    Mode,
    ProfileConfig,
    RunConfig,
    ScheduleConfig,
    TrackingConfig,
    TrainsOn,
    WandbMode,
    WeightUpdate,
)


@dataclass
class Config:
    """The whole configuration, one section per subject."""

    preset: str = ""
    """Name of a preset; the recipe overrides its values."""
    run: RunConfig = field(default_factory=RunConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    critic_pretrain: CriticPretrainConfig = field(default_factory=CriticPretrainConfig)
    reward_train: RewardTrainConfig = field(default_factory=RewardTrainConfig)
    dpo: DpoConfig = field(default_factory=DpoConfig)
    label_lines: LabelLinesConfig = field(default_factory=LabelLinesConfig)
    select_prompts: SelectPromptsConfig = field(default_factory=SelectPromptsConfig)
