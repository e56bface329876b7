"""Keys that a recipe sets and its run never reads: their values are checked by type and bound only, so the dry run names them."""

from collections.abc import Iterator

from megatron_rl.config.derived import eval_sets, needs_critic, needs_reference, uses_attached_servers
from megatron_rl.config.load import flat_params, load_config
from megatron_rl.config.schedule_facts import Overlap, overlap_of
from megatron_rl.config.schema import Config, Mode, Overlong

_OTHER_COMMANDS = ("sft", "critic_pretrain", "reward_train", "dpo", "label_lines", "select_prompts")
"""Sections that one command reads; a recipe may serve several commands."""
_OF_CRITIC = ("critic.", "algorithm.lambda_critic", "algorithm.critic_", "algorithm.value_clip_", "batch.critic_", "schedule.critic_")
_OF_SERVERS = ("num_servers", "port", "start_timeout_s", "max_restarts")
_OF_WINDOWS = ("batch.window_jitter_tokens", "algorithm.ignore_boundary_tokens", "algorithm.bootstrap", "schedule.training_window_tokens")


def unused_keys(config: Config, command: str) -> Iterator[str]:
    """Yield a note for each reason, with the unread keys whose values differ from those of the preset."""
    layers = [f"preset={config.preset}"] if config.preset else []
    usual, given = (flat_params(one) for one in (load_config(None, layers), config))
    changed = [key for key, value in given.items() if usual.get(key) != value]
    for reason, starts in _unread(config):
        if keys := [key for key in changed if key.startswith(starts) and key not in reason]:
            yield f"{', '.join(keys)}: not read by this run, because {reason}"
    others = [name for name in _OTHER_COMMANDS if name != command.replace("-", "_")]
    if sections := [name for name in others if any(key.startswith(f"{name}.") for key in changed)]:
        yield f"{', '.join(sections)}: read by other commands than `megatron-rl {command}`, which check them"


def _unread(config: Config) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (reason, beginnings of the keys that are not read because of it)."""
    algorithm, rollout = config.algorithm, config.rollout
    if not needs_critic(config) and not config.reward.process.path:
        yield f"algorithm.advantage={algorithm.advantage} has no critic", _OF_CRITIC
    if not needs_reference(config):
        yield "algorithm.kl.place=none", ("reference.", "algorithm.kl.")
    if not config.environment.name:
        yield "environment.name is empty", ("environment.",)
    if not config.reward.process.path:
        yield "reward.process.path is empty", ("reward.process.",)
    if config.reward.by_type:
        yield "reward.by_type has the rewards of all types", ("reward.name", "reward.options")
    if not rollout.fire.temperature:
        yield "rollout.fire.temperature=0", ("rollout.fire.",)
    if uses_attached_servers(rollout):
        yield "its servers are attached", tuple(f"rollout.{name}" for name in _OF_SERVERS)
    if config.schedule.mode is not Mode.async_:
        yield f"schedule.mode={config.schedule.mode.value}", ("schedule.max_staleness", "schedule.weight_update")
    if overlap_of(config.schedule) is Overlap.nothing:
        yield "full responses have no windows", _OF_WINDOWS
    if algorithm.overlong is not Overlong.soft:
        yield f"algorithm.overlong={algorithm.overlong.value}", ("algorithm.overlong_",)
    if not algorithm.dynamic_sampling.enabled:
        yield "algorithm.dynamic_sampling.enabled=false", ("algorithm.dynamic_sampling.max_rounds",)
    if algorithm.correction.weight == "none":
        yield "algorithm.correction.weight=none", ("algorithm.correction.max_weight", "algorithm.correction.icepop_")
    if algorithm.correction.rejection == "none":
        yield "algorithm.correction.rejection=none", ("algorithm.correction.rejection_",)
    if not eval_sets(config):
        yield "there are neither data.eval_files nor eval.sets", ("eval.",)
    for name, model in (("policy", config.policy), ("critic", config.critic)):
        if not model.lora.rank:
            yield f"{name}.lora.rank=0", (f"{name}.lora.",)
    if not config.profile.steps:
        yield "profile.steps is empty", ("profile.",)
