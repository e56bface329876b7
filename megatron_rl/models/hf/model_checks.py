"""Checks before any process starts that the models of a recipe can be built and loaded."""

from megatron_rl.config.checks.data_settings import folders_read
from megatron_rl.config.derived import needs_critic
from megatron_rl.config.layout import critic_layout
from megatron_rl.config.schema import Config, Init, Mtp, RewardModelKind
from megatron_rl.config.schema.commands import RL_COMMANDS
from megatron_rl.errors import ConfigError, UserError


def check_models(config: Config, command: str) -> None:
    """Raise ConfigError, with the key, for a folder whose model is not supported or whose weights do not fit.

    Reads config.json and the headers of the weights.
    """
    # Imported here, because these modules import torch and Megatron, which checking only the schema does not need.
    from megatron_rl.models.hf.megatron_config import check_layout
    from megatron_rl.models.hf.model_config import load_hf_config
    from megatron_rl.models.hf.mtp import check_mtp_present
    from megatron_rl.models.hf.weights import checked_source

    value_models = {"critic.path", "reward.process.path"}
    if command == "reward-train" and config.reward_train.kind is not RewardModelKind.pairwise:
        value_models.add("policy.path")
    for key, folder in folders_read(config, command).items():
        has_weights = key != "policy.path" or config.policy.init is Init.checkpoint
        try:
            hf_config = load_hf_config(folder)
            check_layout(hf_config, critic_layout(config) if key in value_models - {"policy.path"} else config.parallel)
            if key == "policy.path" and command in RL_COMMANDS and needs_critic(config) and not config.critic.path:
                check_layout(hf_config, critic_layout(config))
            if key == "policy.path" and config.policy.mtp is Mtp.keep:
                check_mtp_present(hf_config, folder, remedy="set policy.mtp=drop")
            if has_weights:
                checked_source(hf_config, folder, "critic" if key in value_models else "policy")
        except (UserError, OSError) as error:
            raise ConfigError(f"{key}: {error}") from error
