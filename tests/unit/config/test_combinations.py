"""Methods that exclude each other, or lack their inputs, are rejected with the reason."""

import re

import pytest

from megatron_rl.config.checks import check_config
from megatron_rl.config.load import load_config
from megatron_rl.errors import ConfigError
from tests.unit.config.recipes import problems


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["preset=tppo", "algorithm.advantage=group"], "training_window_tokens: .*older policies.*old_policy=rollout"),
        (["preset=remax", "schedule.mode=tppo", "batch.window_tokens=32"], "schedule.mode: .*greedy.*schedule.mode=sync"),
        (["preset=grpo", "batch.num_samples_per_prompt=1"], "num_samples_per_prompt.*at least 2"),
        (["preset=tppo", "schedule.training_window_tokens=0"], "up to 4 windows of a response train together.*old_policy=rollout"),
        (["preset=tppo", "schedule.training_window_tokens=48"], "up to 2 windows.*older policies sampled all but the last"),
        (["preset=tppo", "schedule.training_window_tokens=16"], r"a window \(32\), so it cannot be of 16; set null"),
        (["preset=grpo", "schedule.training_window_tokens=9999"], "training_window_tokens: .*no critic, so whole groups train"),
        (["preset=tppo", "algorithm.dynamic_sampling.enabled=true"], "dynamic_sampling.enabled.*schedule.mode=sync"),
        (["schedule.mode=async", "algorithm.correction.weight=none"], "correction.weight: .*set token"),
        (["schedule.mode=async", "rollout.placement=colocated"], "schedule.mode: .*take turns.*disaggregated"),
        (["schedule.mode=async", "policy.moe.routing_replay=R3"], "routing_replay: .*checkpoints.*set R2"),
        (["schedule.mode=async", "schedule.max_staleness=-1"], "max_staleness: expected 0 to 8, got -1"),
        (["schedule.mode=async", "schedule.max_staleness=9"], "max_staleness: expected 0 to 8, got 9"),
        (["schedule.mode=async", "schedule.max_staleness=2", "algorithm.correction.weight=none"], "correction.weight: .*set token"),
        (
            ["schedule.mode=async", "schedule.max_staleness=0", "schedule.weight_update=in_flight"],
            "weight_update: in_flight.*schedule.max_staleness=0 there is none.*with max_staleness=1",
        ),
        (["rollout.urls=[http://a:1, http://b:1, http://a:1/]"], "rollout.urls: http://a:1 is listed 2 times; list each server once"),
        (["eval.urls=[http://a:1, http://a:1]"], "eval.urls: http://a:1 is listed 2 times"),
        (["rollout.urls=[http://a:99999]"], "rollout.urls: 'http://a:99999' is not an address; expected http://host:port"),
        (["rollout.urls_file=http://"], "rollout.urls_file: 'http://' is not an address"),
        (["schedule.weight_update=in_flight"], "weight_update: in_flight.*mode=tppo.*set schedule.mode=async.*=between"),
        (["preset=ppo", "algorithm.overlong=soft", "algorithm.overlong_buffer_tokens=99999"], "overlong_buffer_tokens"),
        (
            ["algorithm.correction.old_policy=rollout", "algorithm.correction.weight=token"],
            "old_policy.*nothing to correct",
        ),
        (["algorithm.policy_loss=dis"], "old_policy: algorithm.policy_loss=dis guards the ratio.*set rollout"),
        (["algorithm.policy_loss=m2po"], "old_policy: algorithm.policy_loss=m2po guards the ratio.*set rollout"),
        (["algorithm.correction.rejection=token", "algorithm.correction.rejection_low=3"], "rejection_low.*low <= 1"),
        (["algorithm.correction.weight=sequence", "algorithm.correction.max_weight=0.5"], "max_weight.*at least 1"),
        (["algorithm.kl.place=loss", "algorithm.kl.estimator=k1"], "kl.estimator=k3 or k2"),
        (["algorithm.kl.place=reward", "algorithm.kl.coef=0.1"], "k3 in the reward.*set algorithm.kl.estimator=k1"),
        (["algorithm.kl.place=reward", "algorithm.kl.estimator=k2"], "k2 in the reward.*kl.place=loss"),
        (["preset=gspo", "algorithm.dual_clip=3"], "algorithm.dual_clip.*gspo.*would ignore.*dual_clip=0"),
        (["preset=cispo", "algorithm.dual_clip=3"], "algorithm.dual_clip.*cispo"),
        (["rollout.fire.temperature=30", "rollout.fire.loss=keep"], "fire.loss.*correction.weight=token"),
        (["data.system_prompt=hello"], "data.system_prompt.*use_chat_template"),
        (["algorithm.kl.target=0.1"], "algorithm.kl.target.*place"),
        (["preset=grpo", "schedule.critic_first=true"], "schedule.critic_first.*no critic"),
        (["preset=grpo", "critic.freeze=['*.self_attn.*']"], "critic.freeze.*no critic"),
        (["preset=grpo", "critic.warmup_steps=5"], "critic.warmup_steps.*no critic"),
        (["algorithm.outcome_coef=0"], "outcome_coef: with 0 nothing trains the policy; set algorithm.kl.place"),
        (["preset=grpo", "algorithm.advantage=immediate", "algorithm.kl.place=none"], "algorithm.advantage: immediate.*kl.place=reward"),
        (["preset=distillation"], "reference.path: with algorithm.outcome_coef=0 .*give the teacher's folder"),
        (["preset=distillation", "reference.path=http://a b:1"], "reference.path: 'http://a b:1' is not an address"),
        (
            ["preset=distillation", "reference.path_by_type.x=http://teacher:1", "rollout.temperature=0.7"],
            "rollout.temperature: the server in reference.path_by_type.x .*set 1",
        ),
        (["preset=distillation", "algorithm.kl.top_k=8", "reference.path=http://teacher:1"], "kl.top_k: .*set algorithm.kl.place=loss"),
        (
            ["preset=grpo", "algorithm.kl.place=loss", "algorithm.kl.coef=1", "algorithm.kl.top_k=8"],
            "algorithm.kl.top_k: only a served reference gives.*address in reference.path, or set 0",
        ),
        (["reference.api_key_env=NOT_THERE"], "reference.api_key_env: the environment variable NOT_THERE is not set"),
        (["algorithm.normalize_by_role=true"], "normalize_by_role.*environment"),
        (["rollout.over_sampling=0.5"], "over_sampling"),
        (["rollout.top_p=0.7"], r"rollout.top_p.*set 1, got 0.7.*log-probs are over all tokens.*eval.top_p"),
        (["rollout.top_k=50"], r"rollout.top_k.*set -1, got 50.*eval.top_k"),
        (['rollout.server_args={preferred_sampling_params: \'{"min_p": 0.1}\'}'], "preferred_sampling_params.*sampled from"),
        (["rollout.server_args={--speculative-accept-threshold-acc: 0.9}"], "threshold-acc.*sampled from"),
    ],
)
def test_conflicting_methods_are_rejected_with_the_reason(recipe, overrides, words):
    config = load_config(recipe, overrides)
    with pytest.raises(ConfigError) as error:
        check_config(config, command="train")
    assert re.search(words, str(error.value))


@pytest.mark.parametrize("preset", ["grpo", "dapo", "gspo", "rloo", "reinforce_pp"])
def test_presets_without_a_critic_run_in_windows(recipe, preset):
    words = [f"preset={preset}", "batch.num_samples_per_prompt=4", "algorithm.overlong_buffer_tokens=8", "batch.window_tokens=32"]
    check_config(load_config(recipe, [*words, "schedule.mode=async"]), command="train")
    check_config(load_config(recipe, [*words, "schedule.mode=tppo", "algorithm.correction.weight=token"]), command="train")


@pytest.mark.parametrize("preset", ["vapo", "vc_ppo", "tppo", "ppo", "pag", "seed_vl_hybrid", ""])
def test_critic_with_a_random_value_head_is_rejected(recipe, preset):
    """The critic is loaded, or trains alone first; only critic-pretrain may start with a random value head."""
    overrides = ["batch.window_tokens=0", f"preset={preset}", "schedule.mode=sync", "critic.warmup_steps=0"]
    if preset == "seed_vl_hybrid":
        overrides += ["batch.max_prompt_tokens=64", "batch.max_response_tokens=96"]
    message = problems(recipe, *overrides)
    assert "critic.path" in message and "megatron-rl critic-pretrain" in message and "critic.warmup_steps" in message
    check_config(load_config(recipe, [*overrides, "critic.warmup_steps=10"]), command="train")
    pretrain = [*overrides, "critic_pretrain.output_path=somewhere"]
    check_config(load_config(recipe, pretrain), command="critic-pretrain")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["batch.num_samples_by_type={a: 3}"], "num_samples_by_type.a: 3 does not divide 16, the largest number"),
        (["batch.num_samples_by_type={a: 24}"], "batch.num_samples_per_prompt: 16 does not divide 24"),
        (["batch.num_samples_by_type={a: 32}", "batch.num_prompts_per_step=3"], "num_prompts_per_step: 48 slots.*by 32"),
        (["batch.num_samples_by_type={a: 0}"], "batch.num_samples_by_type.a: expected at least 1, got 0"),
        (["preset=grpo", "batch.num_samples_by_type={a: 1}"], "num_samples_by_type.a: algorithm.advantage=group compares"),
        (["preset=remax", "batch.num_samples_by_type={a: 1}"], "num_samples_by_type: algorithm.advantage=remax adds a greedy"),
        (["preset=dapo", "batch.num_samples_by_type={a: 1}"], "num_samples_by_type.a: algorithm.dynamic_sampling needs"),
        (["batch.num_samples_per_prompt=0", "batch.num_samples_by_type={a: 2}"], "num_samples_per_prompt: expected at least 1"),
    ],
)
def test_groups_that_cannot_fill_a_step_are_rejected(recipe, overrides, words):
    assert re.search(words, problems(recipe, "batch.window_tokens=0", *overrides))
