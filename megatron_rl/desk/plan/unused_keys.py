"""Keys that a recipe sets and its run never reads: their values are checked by type and bound only, so the dry run names them."""

from collections.abc import Iterator

from megatron_rl.config.derived import eval_sets, needs_critic, needs_reference, uses_attached_servers
from megatron_rl.config.load import flat_params, load_config
from megatron_rl.config.schedule_facts import Overlap, overlap_of, why_not_ahead
from megatron_rl.config.schema import Config, Overlong

_OTHER_COMMANDS = ("sft", "critic_pretrain", "reward_train", "dpo", "label_lines", "select_prompts")
"""Sections that one command reads; a recipe may serve several commands."""
_OF_CRITIC = ("critic.", "algorithm.lambda_critic", "algorithm.critic_", "algorithm.value_clip_", "batch.critic_", "schedule.critic_")
_OF_SERVERS = ("num_servers", "port", "start_timeout_s", "max_restarts")
_OF_WEIGHTS = tuple(f"algorithm.correction.{name}" for name in ("max_weight", "icepop_", "normalize"))
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


def _unread(config: Config) -> list[tuple[str, tuple[str, ...]]]:
    """(reason, beginnings of the keys that are not read because of it) of each reason that holds."""
    algorithm, rollout, process = config.algorithm, config.rollout, config.reward.process
    correction, overlap = algorithm.correction, overlap_of(config.schedule)
    rows: list[tuple[bool, str, tuple[str, ...]]] = [
        (not needs_critic(config) and not process.path, f"algorithm.advantage={algorithm.advantage} has no critic", _OF_CRITIC),
        (not needs_reference(config), "algorithm.kl.place=none", ("reference.", "algorithm.kl.")),
        (not config.environment.name, "environment.name is empty", ("environment.",)),
        (not process.path, "reward.process.path is empty", ("reward.process.",)),
        (bool(config.reward.by_type), "reward.by_type has the rewards of all types", ("reward.name", "reward.options")),
        (not rollout.fire.temperature, "rollout.fire.temperature=0", ("rollout.fire.",)),
        (uses_attached_servers(rollout), "its servers are attached", tuple(f"rollout.{name}" for name in _OF_SERVERS)),
        (overlap < Overlap.training, f"schedule.{why_not_ahead(config.schedule)}", ("schedule.max_staleness", "schedule.weight_update")),
        (overlap is Overlap.nothing, "full responses have no windows", _OF_WINDOWS),
        (algorithm.overlong is not Overlong.soft, f"algorithm.overlong={algorithm.overlong.value}", ("algorithm.overlong_",)),
        (not algorithm.dynamic_sampling.enabled, "algorithm.dynamic_sampling.enabled=false", ("algorithm.dynamic_sampling.max_",)),
        (correction.weight == "none", "algorithm.correction.weight=none", _OF_WEIGHTS),
        (correction.rejection == "none", "algorithm.correction.rejection=none", ("algorithm.correction.rejection_",)),
        (not eval_sets(config), "there are neither data.eval_files nor eval.sets", ("eval.",)),
        (not config.policy.lora.rank, "policy.lora.rank=0", ("policy.lora.",)),
        (not config.critic.lora.rank, "critic.lora.rank=0", ("critic.lora.",)),
        (not config.profile.steps, "profile.steps is empty", ("profile.",)),
    ]
    return [(reason, starts) for holds, reason, starts in rows if holds]
