#!/usr/bin/env bash
# Train a judge on preferences, serve it, imitate worked solutions, and run PPO on the judge's preferences.
#   bash examples/pairwise_ppo/run.sh [key=value ...]        overrides apply to the reinforcement learning
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. examples/pairwise_ppo/judge.sh
RECIPE=examples/pairwise_ppo/pairwise_ppo.yaml
O=outputs/pairwise_ppo

make_judge
printf '\n== the policy imitates solutions of which half are wrong\n'
attended .venv/bin/megatron-rl sft --config $RECIPE policy.path=$O/task/model policy.init=random \
    "sft.train_files=[$O/task/prompts.train.jsonl]"
start_judge
printf '\n== PPO: the reward is how likely the judge prefers the response to the anchor\n'
attended .venv/bin/megatron-rl train --config $RECIPE reward.options.url="$JUDGE_URL" run.overwrite=true "$@"
printf '\n== what the judge does not know: right responses to held-out prompts\n'
for model in $O/sft $O/run/policy; do
    echo "$model"
    right "$model" $O/task/prompts.held_out.jsonl
done
