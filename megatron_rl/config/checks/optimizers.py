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
        if not optimizer.lr > 0:
            yield f"{key}.lr: expected more than 0, got {optimizer.lr}"
        if not 0 <= optimizer.min_lr <= optimizer.lr:
            yield f"{key}.min_lr: expected a number from 0 to lr={optimizer.lr}, got {optimizer.min_lr}"
        if optimizer.warmup_steps < 0:
            yield f"{key}.warmup_steps: expected 0 or more, got {optimizer.warmup_steps}"
        if not optimizer.max_grad_norm > 0:
            yield f"{key}.max_grad_norm: expected more than 0, got {optimizer.max_grad_norm}"
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(optimizer, name) < 1:
                yield f"{key}.{name}: expected a number from 0 up to but not including 1, got {getattr(optimizer, name)}"
        if optimizer.decay_style is not DecayStyle.constant and optimizer.decay_steps <= optimizer.warmup_steps:
            yield (
                f"{key}.decay_steps: decay_style={optimizer.decay_style.value} needs more decay_steps than "
                f"warmup_steps={optimizer.warmup_steps}, got {optimizer.decay_steps}"
            )
