#!/usr/bin/env bash
# FIRE: train a policy with a habit, measure the effect of a hot first token on its groups, and run GRPO with and without it.
#   bash examples/fire/run.sh [key=value ...]        overrides apply to the reinforcement learning; SEEDS="1 2 3" repeats it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
RECIPE=examples/fire/fire.yaml
O=outputs/fire
. examples/arms.sh
HOT=(rollout.fire.temperature=30 rollout.fire.top_k=8)

if [ ! -f $O/sft/config.json ]; then
    .venv/bin/python examples/fire/make_task.py --output $O/task
    printf '\n== the policy imitates solutions that nearly always begin with the same word\n'
    .venv/bin/megatron-rl sft --config $RECIPE policy.path=$O/task/model policy.init=random
fi
printf '\n== responses to held-out prompts before training\n'
.venv/bin/python examples/fire/diversity.py --model $O/sft --rows $O/task/held_out.jsonl
train_arm plain "$@"
train_arm fire "${HOT[@]}" rollout.fire.loss=keep algorithm.correction.weight=token "$@"
train_arm fire_mask "${HOT[@]}" "$@"
.venv/bin/python examples/arms_table.py $O/runs
