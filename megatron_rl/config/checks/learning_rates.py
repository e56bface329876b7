"""Learning rates and their schedules."""

from collections.abc import Iterator

from megatron_rl.config.schema import Config, DecayStyle, OptimizerConfig


def problems(config: Config, command: str) -> Iterator[str]:
    in_use: dict[str, OptimizerConfig] = {
        "train": {"policy.optimizer": config.policy.optimizer, "critic.optimizer": config.critic.optimizer},
        "sft": {"sft.optimizer": config.sft.optimizer},
        "critic-pretrain": {"critic_pretrain.optimizer": config.critic_pretrain.optimizer},
        "reward-train": {"reward_train.optimizer": config.reward_train.optimizer},
    }.get(command, {})
    for key, optimizer in in_use.items():
        if optimizer.min_lr > optimizer.lr:
            yield f"{key}.min_lr: expected a number from 0 to lr={optimizer.lr}, got {optimizer.min_lr}"
        if optimizer.decay_style is not DecayStyle.constant and optimizer.decay_steps <= optimizer.warmup_steps:
            yield (
                f"{key}.decay_steps: decay_style={optimizer.decay_style.value} needs more decay_steps than "
                f"warmup_steps={optimizer.warmup_steps}, got {optimizer.decay_steps}"
            )
