"""Values that are out of bounds on their own."""

from collections.abc import Iterator

from megatron_rl.config.schema import Config


def problems(config: Config) -> Iterator[str]:
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
