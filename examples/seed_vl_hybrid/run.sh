#!/usr/bin/env bash
# Hybrid RL with pictures: a judge, a policy that starts from worked solutions, and T-PPO on verified and judged prompts.
#   bash examples/seed_vl_hybrid/run.sh [key=value ...]        overrides apply to the reinforcement learning
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. examples/pairwise_ppo/judge.sh
RECIPE=examples/seed_vl_hybrid/seed_vl_hybrid.yaml
O=outputs/seed_vl_hybrid
JUDGE=$O/judge

printf '\n== the judge learns which lists name the same things\n'
attended .venv/bin/python examples/seed_vl_hybrid/make_task.py --output $O/task
attended .venv/bin/megatron-rl sft --config examples/seed_vl_hybrid/judge.yaml
printf '\n== the policy imitates solutions: half are wrong, some lack the thought\n'
attended .venv/bin/megatron-rl sft --config $RECIPE policy.path=$O/task/model policy.init=random \
    "sft.train_files=[$O/task/prompts.train.jsonl]"
start_judge
printf '\n== T-PPO: verifiers for the puzzles, the judge for general prompts, one critic\n'
attended .venv/bin/megatron-rl train --config $RECIPE reward.by_type.general.options.url="$JUDGE_URL" run.overwrite=true "$@"
