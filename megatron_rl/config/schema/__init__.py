"""The configuration schema: one dataclass per section, a docstring under each field, units in the names.

A recipe is a YAML file over this schema; ``key=value`` on the command line overrides it (``load.py``). What one
field cannot say alone is checked across fields in ``checks``. No value is ever rewritten silently.
"""

from enum import StrEnum
from typing import Any

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
    LabelLinesConfig,
    RewardModelKind,
    RewardTrainConfig,
    SelectionRule,
    SelectPromptsConfig,
    SftConfig,
)
from megatron_rl.config.schema.data import CurriculumPhase, DataConfig, DuplicateIds
from megatron_rl.config.schema.health_actions import HealthAction, HealthConfig
from megatron_rl.config.schema.models import (
    CriticConfig,
    Dispatcher,
    Dtype,
    Fp8,
    GroupedGemm,
    Init,
    LoadBalancing,
    MoeConfig,
    Mtp,
    Offload,
    PolicyConfig,
    Recompute,
    ReferenceConfig,
    RouterDtype,
    RoutingReplay,
    VisionConfig,
)
from megatron_rl.config.schema.optimizers import DecayStyle, Moments, OptimizerConfig
from megatron_rl.config.schema.parallel import ParallelConfig
from megatron_rl.config.schema.rewards import EnvironmentConfig, ProcessRewardConfig, RewardConfig, RewardRouteConfig
from megatron_rl.config.schema.rollout import (
    FireConfig,
    FireLoss,
    ParityBoundsConfig,
    Placement,
    RolloutConfig,
    WeightSync,
)
from megatron_rl.config.schema.root import Config
from megatron_rl.config.schema.run import (
    BatchConfig,
    EvalConfig,
    EvalSetConfig,
    Mode,
    ProfileConfig,
    RunConfig,
    ScheduleConfig,
    TrackingConfig,
    TrainsOn,
    WandbMode,
    WeightUpdate,
)

__all__ = [
    "AlgorithmConfig",
    "BatchConfig",
    "Bootstrap",
    "Config",
    "CorrectionConfig",
    "CriticConfig",
    "CriticPretrainConfig",
    "CurriculumPhase",
    "DataConfig",
    "DecayStyle",
    "Dispatcher",
    "Dtype",
    "DuplicateIds",
    "DynamicSamplingConfig",
    "EnvironmentConfig",
    "EvalConfig",
    "EvalSetConfig",
    "FireConfig",
    "FireLoss",
    "Fp8",
    "GroupedGemm",
    "HealthAction",
    "HealthConfig",
    "Init",
    "KlConfig",
    "KlPlace",
    "LabelLinesConfig",
    "LambdaKind",
    "LoadBalancing",
    "Mode",
    "MoeConfig",
    "Moments",
    "Mtp",
    "Normalization",
    "Offload",
    "OldPolicy",
    "OptimizerConfig",
    "Overlong",
    "ParallelConfig",
    "ParityBoundsConfig",
    "Placement",
    "PolicyConfig",
    "ProcessRewardConfig",
    "ProfileConfig",
    "Recompute",
    "ReferenceConfig",
    "RewardConfig",
    "RewardModelKind",
    "RewardRouteConfig",
    "RewardTrainConfig",
    "RolloutConfig",
    "RouterDtype",
    "RoutingReplay",
    "RunConfig",
    "ScheduleConfig",
    "SelectPromptsConfig",
    "SelectionRule",
    "SftConfig",
    "TrackingConfig",
    "TrainsOn",
    "VisionConfig",
    "WandbMode",
    "WeightSync",
    "WeightUpdate",
]

_FORMER_ENUMS = {
    "AdvantageKind": "advantage",
    "Aggregation": "aggregation",
    "CorrectionWeight": "correction.weight",
    "KlEstimator": "kl.estimator",
    "PolicyLossKind": "policy_loss",
    "Rejection": "correction.rejection",
}


def __getattr__(name: str) -> Any:
    """Enums of the time before import paths, for configurations written in Python: the registered names as strings."""
    if name not in _FORMER_ENUMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron_rl.algorithms.register import SEAMS

    return StrEnum(name, {value: value for value in SEAMS[_FORMER_ENUMS[name]].names()})
