#!/usr/bin/env bash
# Hybrid RL: verified and judged prompts in one batch. The judge is that of examples/pairwise_ppo, made if it is not there.
#   bash examples/seed_vl_hybrid/run.sh [key=value ...]        overrides are for the reinforcement learning
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. examples/pairwise_ppo/judge.sh
RECIPE=examples/seed_vl_hybrid/seed_vl_hybrid.yaml
O=outputs/seed_vl_hybrid

make_judge
printf '\n== the policy imitates solutions: many are wrong, some lack the thought\n'
attended .venv/bin/python examples/seed_vl_hybrid/make_task.py --output $O/task
attended .venv/bin/megatron-rl sft --config $RECIPE policy.path=$O/task/model policy.init=random \
    "sft.train_files=[$O/task/prompts.train.jsonl]"
start_judge
printf '\n== PPO: a verifier for sums, the judge for sorting, one critic\n'
attended .venv/bin/megatron-rl train --config $RECIPE reward.by_type.general.options.url="$JUDGE_URL" run.overwrite=true "$@"
printf '\n== what the judge does not know: right responses to held-out judged prompts\n'
for model in $O/sft $O/run/policy; do
    echo "$model"
    right "$model" $O/task/general.held_out.jsonl
done
