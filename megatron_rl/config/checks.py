"""What must hold across fields, checked before anything starts. Every problem is found at once, with key and remedy."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rl.config.derived import _read_json, effective_window_tokens, read_model_json
from megatron_rl.config.layout import experts_problem, layers_problem, layout_problems, of_critic
from megatron_rl.config.placement import colocation_problems
from megatron_rl.config.schema import (
    AdvantageKind,
    Config,
    CorrectionWeight,
    DecayStyle,
    Dtype,
    Fp8,
    Init,
    KlEstimator,
    KlPlace,
    LoadBalancing,
    Mode,
    Mtp,
    OldPolicy,
    OptimizerConfig,
    Overlong,
    ParallelConfig,
    Rejection,
    RoutingReplay,
    VisionConfig,
)
from megatron_rl.errors import ConfigError
from megatron_rl.families.sglang_limits import engine_problems, split_problems

SUPPORTED_MODEL_TYPES = (
    "deepseek_v3",
    "glm4_moe",
    "llama",
    "mixtral",
    "qwen2",
    "qwen2_5_vl",
    "qwen3",
    "qwen3_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
)
"""The families of families/tables.py, which needs Megatron to be imported."""

_MAX_HOT_TOP_K = 4096
"""SGLang's limit for exact log-probs after top-k."""
_SPARSE_MODEL_TYPES = ("qwen3_moe", "qwen3_vl_moe")
"""Families whose layers all have experts, unless config.json says otherwise; their intermediate_size is not used then."""
_NUM_EXPERTS_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")
"""How the families' config.json call the number of experts of a layer."""

RL_COMMANDS = ("train", "critic-pretrain")
_TRAINING_COMMANDS = (*RL_COMMANDS, "sft", "reward-train")
_DATA_COMMANDS = ("select-prompts", "label-lines")


def check_config(config: Config, *, command: str, world_size: int | None = None) -> None:
    """Raise ConfigError listing every problem of ``config`` for a command, one of _TRAINING_COMMANDS or _DATA_COMMANDS.

    ``world_size`` None: the number of ranks is not known yet (a dry run outside a launcher).
    """
    problems = list(_ranges(config))
    problems += _optimizers(config, command)
    problems += [*_files(config, command), *_video(config)]
    problems += _parallel(config, world_size)
    problems += [*_rollout(config), *_precision(config), *_moe_settings(config)]
    if command in RL_COMMANDS:
        ranks = config.parallel.num_ranks if world_size is None else world_size
        problems += [*colocation_problems(config.rollout, ranks), *_lengths(config), *_pieces(config)]
    if not problems and config.policy.path:
        problems += _model(config, command)
    if problems:
        raise ConfigError("\n".join(problems))


def _ranges(config: Config) -> Iterator[str]:
    at_least_one = {
        "run.num_steps": config.run.num_steps,
        "batch.num_prompts_per_step": config.batch.num_prompts_per_step,
        "batch.num_samples_per_prompt": config.batch.num_samples_per_prompt,
        "batch.max_prompt_tokens": config.batch.max_prompt_tokens,
        "batch.max_response_tokens": config.batch.max_response_tokens,
        "batch.policy_minibatch_size": config.batch.policy_minibatch_size,
        "batch.critic_minibatch_size": config.batch.critic_minibatch_size,
        "batch.max_tokens_per_microbatch": config.batch.max_tokens_per_microbatch,
        "reward.num_workers": config.reward.num_workers,
        "rollout.num_servers": config.rollout.num_servers,
        "rollout.tensor_parallel_size": config.rollout.tensor_parallel_size,
        "rollout.max_inflight_requests": config.rollout.max_inflight_requests,
        "rollout.bucket_bytes": config.rollout.bucket_bytes,
        "sft.num_steps": config.sft.num_steps,
        "sft.batch_size": config.sft.batch_size,
        "critic_pretrain.num_steps": config.critic_pretrain.num_steps,
        "critic.num_epochs": config.critic.num_epochs,
        "algorithm.kl.horizon": config.algorithm.kl.horizon,
        "algorithm.dynamic_sampling.max_rounds": config.algorithm.dynamic_sampling.max_rounds,
        "reward.max_concurrency": config.reward.max_concurrency,
        "reward.memory_limit_mb": config.reward.memory_limit_mb,
        "rollout.over_sampling": config.rollout.over_sampling,
        "reward_train.num_steps": config.reward_train.num_steps,
        "reward_train.batch_size": config.reward_train.batch_size,
        "label_lines.num_completions": config.label_lines.num_completions,
        "select_prompts.num_samples": config.select_prompts.num_samples,
    }
    not_negative = {
        "run.save_every_steps": config.run.save_every_steps,
        "parallel.num_ranks": config.parallel.num_ranks,
        "batch.window_tokens": config.batch.window_tokens,
        "critic.warmup_steps": config.critic.warmup_steps,
        "algorithm.ignore_boundary_tokens": config.algorithm.ignore_boundary_tokens,
        "algorithm.advantage_clamp": config.algorithm.advantage_clamp,
        "algorithm.clip_low": config.algorithm.clip_low,
        "algorithm.clip_high": config.algorithm.clip_high,
        "algorithm.value_clip_low": config.algorithm.value_clip_low,
        "algorithm.value_clip_high": config.algorithm.value_clip_high,
        "algorithm.entropy_coef": config.algorithm.entropy_coef,
        "algorithm.positive_lm_coef": config.algorithm.positive_lm_coef,
        "rollout.max_retries": config.rollout.max_retries,
        "rollout.max_restarts": config.rollout.max_restarts,
        "rollout.max_logprob_difference": config.rollout.max_logprob_difference,
        "eval.every_steps": config.eval.every_steps,
        "eval.num_prompts": config.eval.num_prompts,
        "eval.temperature": config.eval.temperature,
        "sft.stop_at_loss": config.sft.stop_at_loss,
        "tracking.report_every_steps": config.tracking.report_every_steps,
        "algorithm.overlong_buffer_tokens": config.algorithm.overlong_buffer_tokens,
        "algorithm.overlong_factor": config.algorithm.overlong_factor,
        "algorithm.kl.coef": config.algorithm.kl.coef,
        "algorithm.kl.target": config.algorithm.kl.target,
        **{f"algorithm.kl.coef_by_type.{name}": coef for name, coef in config.algorithm.kl.coef_by_type.items()},
        "algorithm.correction.veto_below": config.algorithm.correction.veto_below,
        "algorithm.correction.opsm_delta": config.algorithm.correction.opsm_delta,
        "environment.max_turn_tokens": config.environment.max_turn_tokens,
        "rollout.fire.temperature": config.rollout.fire.temperature,
        "reward.max_retries": config.reward.max_retries,
        "reward.process.weight_if_failed": config.reward.process.weight_if_failed,
        "reward.process.weight_if_passed": config.reward.process.weight_if_passed,
        "critic_pretrain.min_steps": config.critic_pretrain.min_steps,
        "critic_pretrain.settle_window": config.critic_pretrain.settle_window,
        "critic_pretrain.settle_tolerance": config.critic_pretrain.settle_tolerance,
    }
    positive = {
        "rollout.temperature": config.rollout.temperature,
        "rollout.request_timeout_s": config.rollout.request_timeout_s,
        "rollout.start_timeout_s": config.rollout.start_timeout_s,
        "rollout.weight_sync_timeout_s": config.rollout.weight_sync_timeout_s,
        "parallel.collective_timeout_s": config.parallel.collective_timeout_s,
        "reward.timeout_s": config.reward.timeout_s,
        "algorithm.lambda_alpha": config.algorithm.lambda_alpha,
        "algorithm.correction.max_weight": config.algorithm.correction.max_weight,
        "reward.start_timeout_s": config.reward.start_timeout_s,
    }
    shares = {
        "algorithm.gamma": config.algorithm.gamma,
        "algorithm.lambda_value": config.algorithm.lambda_value,
        "reward.max_error_rate": config.reward.max_error_rate,
        "rollout.top_p": config.rollout.top_p,
        "eval.stop_at_accuracy": config.eval.stop_at_accuracy,
    }
    yield from (f"{key}: expected at least 1, got {value}" for key, value in at_least_one.items() if value < 1)
    yield from (f"{key}: expected 0 or more, got {value}" for key, value in not_negative.items() if value < 0)
    yield from (f"{key}: expected more than 0, got {value}" for key, value in positive.items() if not value > 0)
    yield from (
        f"{key}: expected a number from 0 to 1, got {value}" for key, value in shares.items() if not 0 <= value <= 1
    )
    if not config.run.output_dir:
        yield "run.output_dir: expected a folder, got nothing"
    if config.algorithm.dual_clip != 0 and config.algorithm.dual_clip <= 1:
        yield f"algorithm.dual_clip: expected more than 1 (3 and 10 are in use), or 0 for none, got {config.algorithm.dual_clip}"


def _lengths(config: Config) -> Iterator[str]:
    batch = config.batch
    if batch.window_tokens > batch.max_response_tokens:
        yield (
            f"batch.window_tokens: a window of {batch.window_tokens} tokens is longer than the response budget "
            f"batch.max_response_tokens={batch.max_response_tokens}; lower it, or set 0 for a window as long as the response"
        )
    window = effective_window_tokens(config)
    if config.schedule.mode is Mode.sync and window != batch.max_response_tokens:
        yield (
            f"batch.window_tokens: schedule.mode=sync generates full responses, but the window is {window} of "
            f"{batch.max_response_tokens} tokens; set batch.window_tokens=0 or schedule.mode=tppo"
        )
    if window <= config.algorithm.ignore_boundary_tokens:
        yield (
            f"algorithm.ignore_boundary_tokens: leaving out {config.algorithm.ignore_boundary_tokens} tokens of a window "
            f"of {window} leaves nothing to train on; lower it or raise batch.window_tokens"
        )


def _pieces(config: Config) -> Iterator[str]:
    """Methods that exclude each other, or that lack what they work on."""
    algorithm, mode = config.algorithm, config.schedule.mode
    has_critic = algorithm.advantage is AdvantageKind.egae
    compares = f"algorithm.advantage={algorithm.advantage.value}"
    if mode is Mode.tppo and not has_critic:
        yield (
            f"schedule.mode: {compares} compares full responses, but windows end the responses to a prompt in different "
            "steps; set schedule.mode=sync, or algorithm.advantage=egae"
        )
    grouped = (AdvantageKind.group, AdvantageKind.group_mean, AdvantageKind.rloo, AdvantageKind.reinforce_pp_baseline)
    if algorithm.advantage in grouped and config.batch.num_samples_per_prompt < 2:
        yield f"batch.num_samples_per_prompt: {compares} compares the responses to one prompt; set at least 2"
    full_only = {
        "algorithm.dynamic_sampling.enabled": algorithm.dynamic_sampling.enabled,
        "reward.process.path": bool(config.reward.process.path),
    }
    for key, used in full_only.items():
        if used and mode is Mode.tppo:
            yield f"{key}: needs full responses, with windows their first tokens are trained too early; set schedule.mode=sync"
    if algorithm.dynamic_sampling.enabled and config.batch.num_samples_per_prompt < 2:
        yield "batch.num_samples_per_prompt: algorithm.dynamic_sampling needs at least 2 responses to a prompt"
    if algorithm.overlong is Overlong.soft and algorithm.overlong_buffer_tokens > config.batch.max_response_tokens:
        yield (
            f"algorithm.overlong_buffer_tokens: {algorithm.overlong_buffer_tokens} tokens are more than the budget "
            f"batch.max_response_tokens={config.batch.max_response_tokens}"
        )
    correction = algorithm.correction
    if correction.old_policy is OldPolicy.rollout and (
        correction.weight is not CorrectionWeight.none
        or correction.rejection is not Rejection.none
        or correction.veto_below
    ):
        yield (
            "algorithm.correction.old_policy: with the engine's own log-probs there is nothing to correct; "
            "set recomputed, or weight=none, rejection=none and veto_below=0"
        )
    if correction.weight in (CorrectionWeight.token, CorrectionWeight.sequence) and correction.max_weight < 1:
        yield f"algorithm.correction.max_weight: expected at least 1, or agreeing engines are changed, got {correction.max_weight}"
    bounds = {"icepop": correction.weight is CorrectionWeight.icepop}
    bounds["rejection"] = correction.rejection in (Rejection.token, Rejection.sequence, Rejection.geometric)
    for name, used in bounds.items():
        low, high = getattr(correction, f"{name}_low"), getattr(correction, f"{name}_high")
        if used and not low <= 1 <= high:
            yield (
                f"algorithm.correction.{name}_low, {name}_high: expected low <= 1 <= high, so that engines that agree are "
                f"left alone, got {low} and {high}"
            )
    if algorithm.kl.place is KlPlace.loss and algorithm.kl.estimator is KlEstimator.k1:
        yield "algorithm.kl.estimator: the gradient of k1 in the loss is 0 on average; set k2 or k3, or kl.place=reward"
    num_responses = config.batch.num_prompts_per_step * config.batch.num_samples_per_prompt
    if algorithm.kl.target and algorithm.kl.horizon <= 0.2 * num_responses:
        yield (
            f"algorithm.kl.horizon: expected more than a fifth of the {num_responses} responses of a step, "
            f"got {algorithm.kl.horizon}"
        )
    if algorithm.kl.target and algorithm.kl.place is KlPlace.none:
        yield "algorithm.kl.target: the adaptive coefficient needs algorithm.kl.place=reward or loss"
    if algorithm.kl.target and not algorithm.kl.coef:
        yield "algorithm.kl.coef: the adaptive controller multiplies it, so it must start above 0"
    if config.data.system_prompt and not config.data.use_chat_template:
        yield "data.system_prompt: plain prompts have no system message; set data.use_chat_template=true, or leave it empty"
    yield from _critic_pieces(config, has_critic)
    yield from _dialogue_pieces(config)


def _critic_pieces(config: Config, has_critic: bool) -> Iterator[str]:
    if has_critic:
        return
    without = f"algorithm.advantage={config.algorithm.advantage.value} has no critic"
    if config.critic.warmup_steps:
        yield f"critic.warmup_steps: {without}; set 0"
    if config.critic.path:
        yield f"critic.path: {without}; leave it empty"
    if config.critic.parallel and not config.reward.process.path:
        yield f"critic.parallel: {without}; leave it out"
    if config.environment.name == "pag":
        yield f"environment.name: pag scores turn by turn, which needs algorithm.advantage=egae; {without}"


def _dialogue_pieces(config: Config) -> Iterator[str]:
    if not config.environment.name and config.environment.options:
        yield "environment.options: given without environment.name; name one of the environments, or remove them"
    if not config.environment.name and config.algorithm.normalize_by_role:
        yield "algorithm.normalize_by_role: needs an environment with several roles (environment.name=pag)"
    if config.reward.process.path and config.environment.name:
        yield "reward.process.path: rewards of lines are for single responses; leave environment.name empty"
    if config.environment.name and config.reward.require_think:
        yield "reward.require_think: turns of a dialogue are graded as they stand; set false"


def _video(config: Config) -> Iterator[str]:
    levels, budget = config.data.video_frame_tokens, config.data.max_video_tokens
    if not levels or min(levels) < 1:
        yield f"data.video_frame_tokens: expected at least one number of tokens above 0, got {list(levels)}"
    elif budget < min(levels):
        yield f"data.max_video_tokens: expected room for one frame of {min(levels)} tokens, got {budget}"


def _optimizers(config: Config, command: str) -> Iterator[str]:
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


def _files(config: Config, command: str) -> Iterator[str]:
    data = config.data
    read: dict[str, dict[str, list[str]]] = {
        "sft": {"sft.train_files": config.sft.train_files}
        if config.sft.train_files
        else {"data.train_files": data.train_files},
        "reward-train": {
            "reward_train.train_files": config.reward_train.train_files,
            "reward_train.eval_files": config.reward_train.eval_files,
        },
        "label-lines": {
            "label_lines.input_path": [config.label_lines.input_path] * bool(config.label_lines.input_path)
        },
        "select-prompts": {"data.train_files": data.train_files},
    }
    lists = read.get(command, {"data.train_files": data.train_files, "data.eval_files": data.eval_files})
    if not next(iter(lists.values())):
        yield f"{next(iter(lists))}: expected at least one file, got none"
    for key, names in lists.items():
        yield from (f"{key}: {name} does not exist" for name in names if not Path(name).exists())
    if command == "train" and config.eval.every_steps and not data.eval_files:
        yield "data.eval_files: eval.every_steps is set, but there is no file to evaluate on"
    if command == "train" and config.eval.stop_at_accuracy and not config.eval.every_steps:
        yield "eval.every_steps: eval.stop_at_accuracy needs evaluations; set eval.every_steps"
    outputs = {
        "sft": ("sft.output_path", config.sft.output_path),
        "critic-pretrain": ("critic_pretrain.output_path", config.critic_pretrain.output_path),
        "reward-train": ("reward_train.output_path", config.reward_train.output_path),
        "label-lines": ("label_lines.output_path", config.label_lines.output_path),
        "select-prompts": ("select_prompts.output_path", config.select_prompts.output_path),
    }
    if command in outputs and not outputs[command][1]:
        yield f"{outputs[command][0]}: expected a place for the result, got nothing"
    if command != "select-prompts" or not config.select_prompts.scores_path:
        yield from _model_folder("policy.path", config.policy.path, weights=config.policy.init is Init.checkpoint)
    if command in RL_COMMANDS:
        optional = {
            "critic.path": config.critic.path,
            "reference.path": config.reference.path if config.algorithm.kl.place is not KlPlace.none else "",
            "reward.process.path": config.reward.process.path,
        }
        for key, path in optional.items():
            if path:
                yield from _model_folder(key, path, weights=True)


def _model_folder(key: str, path: str, *, weights: bool) -> Iterator[str]:
    if not path:
        yield f"{key}: expected a Hugging Face model folder, got nothing"
    elif not (Path(path) / "config.json").is_file():
        yield f"{key}: {path} has no config.json; expected a Hugging Face model folder"
    elif weights and not any(Path(path).glob("*.safetensors")):
        yield f"{key}: {path} has no *.safetensors; give a folder with weights, or set policy.init=random for fresh ones"


def _parallel(config: Config, world_size: int | None) -> Iterator[str]:
    parallel = config.parallel
    ranks = world_size if world_size is not None else parallel.num_ranks
    if world_size is not None and parallel.num_ranks not in (0, world_size):
        yield (
            f"parallel.num_ranks: the configuration wants {parallel.num_ranks} ranks, but the launcher started {world_size}; "
            "start as many, or set parallel.num_ranks=0 to take what the launcher gives"
        )
    yield from layout_problems(parallel, ranks)
    own = config.critic.parallel
    if own is None:
        return
    if own.num_ranks not in (0, parallel.num_ranks):
        yield (
            f"critic.parallel.num_ranks: the critic lies on the policy's ranks, parallel.num_ranks={parallel.num_ranks}; "
            f"leave it at 0, got {own.num_ranks}"
        )
    if not own.collective_timeout_s > 0:
        yield f"critic.parallel.collective_timeout_s: expected more than 0, got {own.collective_timeout_s}"
    yield from (of_critic(problem) for problem in layout_problems(own, ranks))


def _rollout(config: Config) -> Iterator[str]:
    rollout = config.rollout
    yield from (
        f"rollout.urls: {url!r} is not an address; expected http://host:port"
        for url in rollout.urls
        if not url.startswith(("http://", "https://"))
    )
    if not 0 <= rollout.port <= 65535 - rollout.num_servers:
        yield f"rollout.port: expected 0 (any free port) or a port up to {65535 - rollout.num_servers}, got {rollout.port}"
    if rollout.fire.top_k != -1 and not 1 <= rollout.fire.top_k <= _MAX_HOT_TOP_K:
        yield f"rollout.fire.top_k: expected -1 (off) or 1 to {_MAX_HOT_TOP_K}, got {rollout.fire.top_k}"
    if rollout.top_k != -1 and rollout.top_k < 1:
        yield f"rollout.top_k: expected -1 (off) or at least 1, got {rollout.top_k}"


def _model(config: Config, command: str) -> Iterator[str]:
    path = Path(config.policy.path) / "config.json"
    model = read_model_json(path)
    model_type = model.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        yield f"policy.path: {path}: model_type {model_type!r} is not supported; supported are {', '.join(SUPPORTED_MODEL_TYPES)}"
        return
    largest = _largest_token_id(Path(config.policy.path) / "tokenizer.json")
    if largest >= model.get("vocab_size", largest + 1):
        yield (
            f"policy.path: vocabulary mismatch: the largest id in {config.policy.path}/tokenizer.json is {largest}, but {path} "
            f"says vocab_size={model['vocab_size']}; use the tokenizer that belongs to this checkpoint"
        )
    context = model.get("max_position_embeddings", 0)
    longest = config.batch.max_prompt_tokens + config.batch.max_response_tokens
    if context and longest > context and command in (*RL_COMMANDS, "select-prompts"):
        yield (
            f"batch.max_prompt_tokens + batch.max_response_tokens: {longest} tokens do not fit the model's context of "
            f"{context} ({path}: max_position_embeddings)"
        )
    if command in (*RL_COMMANDS, *_DATA_COMMANDS):
        yield from engine_problems(model, path)
        yield from split_problems(model, config.rollout.tensor_parallel_size, path)
    yield from _moe(config, model, path, command)
    for name, settings in (("policy", config.policy.vision), ("critic", config.critic.vision)):
        if "vision_config" not in model and settings != VisionConfig():
            yield f"{name}.vision: {model_type} ({path}) has no vision encoder; leave both settings true"
    yield from _divisions(config.parallel, model, path)
    if config.critic.parallel:
        yield from (of_critic(problem) for problem in _divisions(config.critic.parallel, model, path))


def _divisions(parallel: ParallelConfig, model: dict[str, Any], path: Path) -> Iterator[str]:
    """Sizes of the model that do not divide by those of the layout."""
    tp = parallel.tensor_parallel_size
    names = ["num_attention_heads", "num_key_value_heads"]
    is_sparse = model.get("model_type") in _SPARSE_MODEL_TYPES and not model.get("mlp_only_layers")
    if not (is_sparse and model.get("decoder_sparse_step", 1) == 1):
        names.append("intermediate_size")
    for name in names:
        if name in model and model[name] % tp:
            yield f"parallel.tensor_parallel_size: {tp} does not divide {name}={model[name]} of {path}"
    problem = layers_problem(parallel, model["num_hidden_layers"]) if "num_hidden_layers" in model else None
    if problem:
        yield f"parallel.pipeline_parallel_size: {problem} ({path})"
    num_experts = next((model[name] for name in _NUM_EXPERTS_FIELDS if model.get(name)), 0)
    problem = experts_problem(parallel, num_experts, model.get("moe_intermediate_size", 0))
    if problem:
        yield f"parallel: the {problem} ({path})"


def _moe(config: Config, model: dict[str, Any], path: Path, command: str) -> Iterator[str]:
    moe = config.policy.moe
    text_model = model.get("text_config", model)
    if not any(text_model.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        for name, value in (("load_balancing", moe.load_balancing), ("routing_replay", moe.routing_replay)):
            if value.value != "none":
                yield f"policy.moe.{name}={value.value}: needs an MoE model, and {path} is dense; set it to none"
        return
    if moe.load_balancing is LoadBalancing.bias and "topk_method" not in text_model and "n_group" not in text_model:
        yield (
            f"policy.moe.load_balancing=bias: the routers of {model.get('model_type')} have no expert bias ({path}); use "
            "aux_loss or none"
        )


def _precision(config: Config) -> Iterator[str]:
    policy = config.policy
    if policy.fp8 is not Fp8.none and policy.dtype is not Dtype.bfloat16:
        yield (
            f"policy.fp8={policy.fp8.value}: needs parameters in bfloat16, got policy.dtype={policy.dtype.value}; set "
            "policy.dtype=bfloat16"
        )


def _moe_settings(config: Config) -> Iterator[str]:
    moe = config.policy.moe
    if config.policy.mtp is Mtp.keep and config.policy.init is Init.random:
        yield "policy.mtp=keep: fresh weights (policy.init=random) have no layers to keep; set it to drop"
    for name, value in (("aux_loss_coef", moe.aux_loss_coef), ("bias_update_rate", moe.bias_update_rate)):
        if value < 0:
            yield f"policy.moe.{name}: expected at least 0, got {value}"
    if (moe.aux_loss_coef > 0) != (moe.load_balancing is LoadBalancing.aux_loss):
        yield (
            f"policy.moe.aux_loss_coef: got {moe.aux_loss_coef} with load_balancing={moe.load_balancing.value}; "
            "load_balancing=aux_loss needs a coefficient above 0 (0.001 is in use), everything else 0"
        )
    if moe.bias_update_rate > 0 and moe.load_balancing is not LoadBalancing.bias:
        yield (
            f"policy.moe.bias_update_rate: got {moe.bias_update_rate} with load_balancing={moe.load_balancing.value}; "
            "only load_balancing=bias moves the expert bias"
        )
    if moe.routing_replay is RoutingReplay.R2 and config.algorithm.correction.old_policy is OldPolicy.rollout:
        yield (
            "policy.moe.routing_replay=R2: records in the pass for the old log-probs, which "
            "algorithm.correction.old_policy=rollout leaves out; use recomputed, or R3"
        )


def _largest_token_id(path: Path) -> int:
    """-1 where there is no tokenizer.json, or one of a kind that lists its vocabulary in another way."""
    if not path.is_file():
        return -1
    tokenizer = _read_json(path)
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    size = len(vocabulary) - 1 if isinstance(vocabulary, list) else max(vocabulary.values(), default=-1)
    return max([size, *(token["id"] for token in tokenizer.get("added_tokens", []))])
