"""Checks of combinations: methods that exclude each other or lack their inputs."""

from collections.abc import Iterator, Mapping
from operator import attrgetter

from megatron_rl.algorithms import register
from megatron_rl.config.checks.data_settings import references
from megatron_rl.config.checks.servers import key_value_problems
from megatron_rl.config.derived import (
    block_size,
    effective_window_tokens,
    is_served,
    needs_critic,
    num_responses_per_step,
)
from megatron_rl.config.schedule_facts import (
    Overlap,
    facts_of,
    max_trained_windows,
    overlap_of,
    placement_problem,
    why_not_ahead,
    window_jitter_tokens,
)
from megatron_rl.config.schema import (
    AlgorithmConfig,
    Config,
    CorrectionConfig,
    CriticPretrainConfig,
    FireLoss,
    KlPlace,
    OldPolicy,
    Overlong,
    RolloutConfig,
    RoutingReplay,
    WeightUpdate,
)
from megatron_rl.system.http.addresses import server_problem
from megatron_rl.system.plugins import PluginError, parameters

_MAX_SLOTS = 2**20
"""Largest number of responses per step, far above what the KV caches of the largest clusters hold."""
_SPECULATION_THRESHOLDS = ("speculative-accept-threshold-single", "speculative-accept-threshold-acc")
"""Options below 1 let SGLang accept drafted tokens with more than their probability."""


def unknown_plugins(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Check the functions that ``algorithm`` names (``register.SEAMS``), such as the advantage and the policy loss.

    Yields a problem for an unknown name, for an import path that fails, and for options that the function does not accept.
    """
    for key, seam in register.SEAMS.items():
        name, options = attrgetter(key, f"{key}_options")(algorithm)
        try:
            seam.check_options(seam.find(name), options)
        except PluginError as error:
            yield f"algorithm.{key}: {error}"


def problems(config: Config, command: str = "train") -> Iterator[str]:
    if (slots := num_responses_per_step(config)) > _MAX_SLOTS:
        yield (
            f"batch.num_samples_per_prompt: {slots:,} responses per step (times batch.num_prompts_per_step), of which the largest "
            f"clusters hold {_MAX_SLOTS:,}; lower one of the two"
        )
    if command == "critic-pretrain":
        yield from _convergence(config.critic_pretrain)
    yield from _windows(config)
    yield from _overlap(config)
    yield from _full_responses(config)
    yield from _old_tokens(config)
    yield from _comparisons(config)
    yield from _policy_loss(config.algorithm)
    yield from _correction(config.algorithm.correction)
    yield from _kl(config.algorithm, num_responses_per_step(config))
    yield from _token_rewards(config)
    yield from _hot_tokens(config)
    yield from _without_critic(config)
    if command == "train":
        yield from _untrained_critic(config)
    yield from _dialogue(config)
    yield from _whole_distribution(config.rollout)


def _convergence(pretrain: CriticPretrainConfig) -> Iterator[str]:
    """Refuse a convergence that num_steps are too few to notice."""
    window = pretrain.settle_window
    needed = 2 * window + max(1, window // 2) - 1
    if window and needed > pretrain.num_steps:
        yield (
            f"critic_pretrain.settle_window: windows of {window} steps can converge after {needed} steps, and critic_pretrain.num_steps="
            f"{pretrain.num_steps}; raise num_steps, or set 0 for always num_steps"
        )
    if pretrain.min_steps > pretrain.num_steps:
        yield f"critic_pretrain.min_steps: expected at most critic_pretrain.num_steps={pretrain.num_steps}, got {pretrain.min_steps}"


def _windows(config: Config) -> Iterator[str]:
    batch, algorithm = config.batch, config.algorithm
    if batch.window_tokens > batch.max_response_tokens:
        yield (
            f"batch.window_tokens: a window of {batch.window_tokens} tokens is longer than the response budget "
            f"batch.max_response_tokens={batch.max_response_tokens}; lower it, or set 0 for a window as long as the response"
        )
    window = effective_window_tokens(config)
    if overlap_of(config.schedule) is Overlap.nothing and window != batch.max_response_tokens:
        yield (
            f"batch.window_tokens: schedule.mode=sync generates full responses, but the window is {window} of "
            f"{batch.max_response_tokens} tokens; set batch.window_tokens=0 or schedule.mode=tppo"
        )
    training_window = config.schedule.training_window_tokens
    if overlap_of(config.schedule) > Overlap.nothing and 0 < (training_window or 0) < window:
        yield (
            f"schedule.training_window_tokens: a window of training has all tokens of a window ({window}), so it cannot be of "
            f"{training_window}; set null to train on every window, 0 for whole responses, or more than {window}"
        )
    if window <= algorithm.ignore_boundary_tokens:
        yield (
            f"algorithm.ignore_boundary_tokens: leaving out {algorithm.ignore_boundary_tokens} tokens of a window "
            f"of {window} leaves nothing to train on; lower it or raise batch.window_tokens"
        )
    if 0 < window_jitter_tokens(config) <= algorithm.ignore_boundary_tokens < window:
        yield (
            f"batch.window_jitter_tokens: moving the edges of windows by less than {window_jitter_tokens(config)} leaves "
            f"positions that never train, for algorithm.ignore_boundary_tokens={algorithm.ignore_boundary_tokens} before "
            f"each are left out; raise it above that, or set 0 for full windows"
        )
    if algorithm.overlong is Overlong.soft and algorithm.overlong_buffer_tokens > batch.max_response_tokens:
        yield (
            f"algorithm.overlong_buffer_tokens: {algorithm.overlong_buffer_tokens} tokens are more than the budget "
            f"batch.max_response_tokens={batch.max_response_tokens}"
        )


def _overlap(config: Config) -> Iterator[str]:
    schedule = config.schedule
    if overlap_of(schedule) < Overlap.training:
        if schedule.weight_update is WeightUpdate.in_flight:
            yield (
                "schedule.weight_update: in_flight publishes into the window that is generated while the trainer trains, and with "
                f"schedule.{why_not_ahead(schedule)} there is none; set schedule.mode=async with max_staleness=1, or "
                "schedule.weight_update=between"
            )
        return
    if problem := placement_problem(config):
        yield problem
    if config.policy.moe.routing_replay is RoutingReplay.R3:
        yield (
            "policy.moe.routing_replay: with schedule.mode=async checkpoints hold a window that has not trained yet, but not the "
            "servers' routes of it (R3); set R2 or none"
        )


def _full_responses(config: Config) -> Iterator[str]:
    if overlap_of(config.schedule) is Overlap.nothing:
        return
    algorithm = config.algorithm
    if register.needs_greedy(algorithm.advantage):
        yield (
            f"schedule.mode: algorithm.advantage={algorithm.advantage} compares with a greedy response of the same weights, but "
            "windows of one response have several; set schedule.mode=sync"
        )
    full_only = {
        "algorithm.dynamic_sampling.enabled": algorithm.dynamic_sampling.enabled and needs_critic(config),
        "reward.process.path": bool(config.reward.process.path),
    }
    for key, used in full_only.items():
        if used:
            yield f"{key}: needs full responses, with windows their first tokens are trained too early; set schedule.mode=sync"


def _old_tokens(config: Config) -> Iterator[str]:
    """Refuse uncorrected updates on tokens that an older policy sampled."""
    correction, num_windows = config.algorithm.correction, max_trained_windows(config)
    if correction.old_policy is OldPolicy.rollout or correction.weight != "none":
        return
    if facts_of(config).ahead:
        yield (
            "algorithm.correction.weight: with schedule.mode=async the policy before the newest update sampled the tokens, and "
            "weight=none trains them as if the newest had; set token (decoupled loss, the default there), or "
            "algorithm.correction.old_policy=rollout"
        )
    elif num_windows > 1:
        yield (
            f"schedule.training_window_tokens: up to {num_windows} windows of a response train together, and older policies "
            "sampled all but the last; set algorithm.correction.old_policy=rollout (ratios to the policy that sampled each token), "
            "or algorithm.correction.weight=token (recomputed ratios, weighted)"
        )


def _comparisons(config: Config) -> Iterator[str]:
    batch, advantage = config.batch, config.algorithm.advantage
    sizes = {"batch.num_samples_per_prompt": batch.num_samples_per_prompt}
    sizes |= {f"batch.num_samples_by_type.{name}": size for name, size in batch.num_samples_by_type.items()}
    for key, size in sizes.items():
        if size < 2 and register.needs_groups(advantage):
            yield f"{key}: algorithm.advantage={advantage} compares the responses to one prompt; set at least 2"
        if size < 2 and config.algorithm.dynamic_sampling.enabled:
            yield f"{key}: algorithm.dynamic_sampling needs at least 2 responses to a prompt"
    if batch.num_samples_by_type:
        yield from _blocks(config, sizes)


def _blocks(config: Config, sizes: Mapping[str, int]) -> Iterator[str]:
    """Check that groups fill a step exactly; ``sizes`` maps keys to group sizes."""
    block, why = block_size(config.batch), "a step is filled with whole groups"
    if register.needs_greedy(config.algorithm.advantage):
        yield (
            f"batch.num_samples_by_type: algorithm.advantage={config.algorithm.advantage} adds a greedy response to each group, "
            "so groups of several sizes would not fill the same slots; leave it empty"
        )
    for key, size in sizes.items():
        # The bounds already refuse numbers below 1.
        if size >= 1 and block % size:
            yield f"{key}: {size} does not divide {block}, the largest number of samples; {why}"
    if num_responses_per_step(config) % block:
        yield (
            f"batch.num_prompts_per_step: {num_responses_per_step(config)} slots (times num_samples_per_prompt) do not divide "
            f"by {block}, the largest number of samples; {why}"
        )


def _policy_loss(algorithm: AlgorithmConfig) -> Iterator[str]:
    loss, correction = register.POLICY_LOSSES.find(algorithm.policy_loss), algorithm.correction
    ignored = loss.ignored()
    if loss.needs_rollout and correction.old_policy is not OldPolicy.rollout:
        yield (
            f"algorithm.correction.old_policy: algorithm.policy_loss={algorithm.policy_loss} guards the ratio to the policy that "
            "sampled the tokens, and with old_policy=recomputed it would not see how old they are; set rollout"
        )
    if "weights" in ignored and (correction.weight != "none" or correction.opsm_delta):
        yield (
            f"algorithm.correction: algorithm.policy_loss={algorithm.policy_loss} has no parameter `weights`, so it "
            "would ignore them; add it, or set weight=none and opsm_delta=0"
        )
    if "coefficients" in ignored and algorithm.aggregation != "token_mean":
        yield (
            f"algorithm.aggregation: algorithm.policy_loss={algorithm.policy_loss} has no parameter `coefficients`, so it "
            "would ignore them; add it, or set token_mean"
        )
    if algorithm.dual_clip and "dual_clip" in ignored:
        yield (
            f"algorithm.dual_clip: algorithm.policy_loss={algorithm.policy_loss} has no parameter `dual_clip`, so it would "
            "ignore it; set algorithm.dual_clip=0"
        )


def _correction(correction: CorrectionConfig) -> Iterator[str]:
    weight = register.CORRECTION_WEIGHTS.find(correction.weight)
    rejection = register.REJECTIONS.find(correction.rejection)
    corrects = correction.weight != "none" or correction.rejection != "none"
    if correction.old_policy is OldPolicy.rollout and (corrects or correction.veto_below):
        yield (
            "algorithm.correction.old_policy: with the servers' log-probs as the old ones there is nothing to correct; "
            "set recomputed, or weight=none, rejection=none and veto_below=0"
        )
    if weight.bounded and correction.max_weight < 1:
        yield (
            "algorithm.correction.max_weight: expected at least 1, or tokens on which trainer and servers agree are changed, "
            f"got {correction.max_weight}"
        )
    if "icepop_low" in parameters(weight.function):
        yield from _around_one("icepop", correction.icepop_low, correction.icepop_high)
    if "rejection_low" in parameters(rejection.function):
        yield from _around_one("rejection", correction.rejection_low, correction.rejection_high)


def _around_one(name: str, low: float, high: float) -> Iterator[str]:
    if not low <= 1 <= high:
        yield (
            f"algorithm.correction.{name}_low, {name}_high: expected low <= 1 <= high, so that tokens on "
            f"which trainer and servers agree stay unchanged, got {low} and {high}"
        )


def _kl(algorithm: AlgorithmConfig, num_responses: int) -> Iterator[str]:
    kl = algorithm.kl
    places = register.KL_ESTIMATORS.find(kl.estimator).places
    if kl.place is KlPlace.loss and "loss" not in places:
        yield (
            f"algorithm.kl.estimator: the gradient of {kl.estimator} in the loss is 0 on average; set "
            "algorithm.kl.estimator=k3 or k2, or algorithm.kl.place=reward"
        )
    if kl.place is KlPlace.reward and "reward" not in places:
        yield (
            f"algorithm.kl.estimator: {kl.estimator} in the reward does not pull towards the reference (it punishes tokens "
            "that have become less likely too); set algorithm.kl.estimator=k1, or algorithm.kl.place=loss"
        )
    if not kl.target:
        return
    if kl.horizon <= 0.2 * num_responses:
        yield f"algorithm.kl.horizon: expected more than a fifth of the {num_responses} responses of a step, got {kl.horizon}"
    if kl.place is KlPlace.none:
        yield "algorithm.kl.target: the adaptive coefficient needs algorithm.kl.place=reward or loss"
    if not kl.coef:
        yield "algorithm.kl.coef: the adaptive controller multiplies it, so it must start above 0"


def _token_rewards(config: Config) -> Iterator[str]:
    """Refuse a policy that nothing trains, or that is trained towards its own start alone."""
    algorithm, reference, kl = config.algorithm, config.reference, config.algorithm.kl
    if kl.top_k and kl.place is not KlPlace.loss:
        yield f"algorithm.kl.top_k: the divergence over {kl.top_k} tokens is a loss; set algorithm.kl.place=loss, or 0"
    elif kl.top_k and (loaded := [key for key, path in references(config).items() if not is_served(path)]):
        yield f"algorithm.kl.top_k: only a served reference gives its most likely tokens; give a server's address in {loaded[0]}, or set 0"
    yield from key_value_problems("reference.api_key_env", reference.api_key_env)
    for key, path in references(config).items():
        if is_served(path) and (problem := server_problem(path)):
            yield f"{key}: {problem}"
        elif is_served(path) and config.rollout.temperature != 1:
            yield (
                f"rollout.temperature: the server in {key} gives log-probs at temperature 1, and the policy samples at "
                f"{config.rollout.temperature}; set 1, or give the reference's folder"
            )
    if algorithm.kl.place is KlPlace.none and not config.reward.process.path:
        remedy = "set algorithm.kl.place=reward or loss with a teacher in reference.path, or reward.process.path"
        if not algorithm.outcome_coef:
            yield f"algorithm.outcome_coef: with 0 nothing trains the policy; {remedy}"
        elif not register.relates_tokens(algorithm.advantage) and not needs_critic(config):
            yield f"algorithm.advantage: {algorithm.advantage} trains tokens on their own rewards, and only last ones have any; {remedy}"
    elif algorithm.kl.place is not KlPlace.none and not algorithm.outcome_coef and not (reference.path or reference.path_by_type):
        yield (
            "reference.path: with algorithm.outcome_coef=0 only the divergence from the reference trains, and that is the policy's "
            "own start; give the teacher's folder"
        )


def _hot_tokens(config: Config) -> Iterator[str]:
    fire, correction = config.rollout.fire, config.algorithm.correction
    corrected = correction.weight != "none" or correction.old_policy is OldPolicy.rollout
    if fire.temperature and fire.loss is FireLoss.keep and not corrected:
        yield (
            "rollout.fire.loss: keep trains tokens sampled at another temperature as if the policy had sampled them; "
            "set algorithm.correction.weight=token, or rollout.fire.loss=mask"
        )


def _untrained_critic(config: Config) -> Iterator[str]:
    """Refuse a critic with a random value head, whose values would make random advantages."""
    if needs_critic(config) and not config.critic.path and not config.critic.warmup_steps:
        yield (
            "critic.path: the critic would start with a random value head and train the policy from the first step; "
            "pretrain it (megatron-rl critic-pretrain --config ... critic_pretrain.output_path=FOLDER) and set "
            "critic.path=FOLDER, start from a reward model, or train it alone first (critic.warmup_steps; 10 is in use)"
        )


def _without_critic(config: Config) -> Iterator[str]:
    if needs_critic(config):
        return
    without = f"algorithm.advantage={config.algorithm.advantage} has no critic"
    if config.critic.warmup_steps:
        yield f"critic.warmup_steps: {without}; set 0"
    if config.schedule.training_window_tokens and register.relates_tokens(config.algorithm.advantage):
        yield f"schedule.training_window_tokens: {without}, so whole groups train; set null or 0"
    if config.schedule.critic_first:
        yield f"schedule.critic_first: {without}; set false"
    for key, value in (("path", config.critic.path), ("freeze", config.critic.freeze)):
        if value:
            yield f"critic.{key}: {without}; leave it empty"
    if config.critic.parallel and not config.reward.process.path:
        yield f"critic.parallel: {without}; remove it"
    if config.environment.name == "pag":
        yield f"environment.name: pag scores turn by turn, which needs algorithm.advantage=egae; {without}"


def _dialogue(config: Config) -> Iterator[str]:
    if not config.environment.name:
        if config.environment.options:
            yield "environment.options: given without environment.name; name one of the environments, or remove them"
        if config.algorithm.normalize_by_role:
            yield "algorithm.normalize_by_role: needs an environment with several roles (environment.name=pag)"
        return
    if config.reward.process.path:
        yield "reward.process.path: line rewards are for single responses; leave environment.name empty"
    if config.reward.require_think:
        yield "reward.require_think: turns of a dialogue are scored unchanged; set false"


def _whole_distribution(rollout: RolloutConfig) -> Iterator[str]:
    """Refuse settings that change the distribution of training responses, such as top_p below 1.

    Trainer and servers compute log-probs over all tokens, so truncation makes every ratio wrong while their log-probs still agree.
    """
    why = "The trainer's log-probs are over all tokens, so a truncated sampler would make every ratio wrong, without any sign of it"
    for key, value, off in (("top_p", rollout.top_p, 1), ("top_k", rollout.top_k, -1)):
        if value != off:
            yield (
                f"rollout.{key}: training responses are sampled from all tokens, set {off}, got {value}. {why}; "
                f"evaluations may truncate: eval.{key}"
            )
    for name, value in rollout.server_args.items():
        flag = name.lstrip("-").replace("_", "-")
        exact = flag in _SPECULATION_THRESHOLDS and value in (1, 1.0, "1", "1.0")
        if flag == "preferred-sampling-params" or (flag in _SPECULATION_THRESHOLDS and not exact):
            yield f"rollout.server_args.{name}: it changes the distribution that tokens are sampled from; remove it. {why}"
