#!/usr/bin/env bash
# Line rewards: labels by binary search, a process reward model, and PPO with and without its two uses.
#   bash examples/line_rewards/run.sh [key=value ...]        overrides apply to the reinforcement learning; SEEDS="1 2 3" repeats it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
RECIPE=examples/line_rewards/line_rewards.yaml
O=outputs/line_rewards
. examples/arms.sh
FRESH_CRITIC=(critic.path="")
NO_LINES=(reward.process.path="")

if [ ! -f $O/prm/config.json ]; then
    .venv/bin/python examples/line_rewards/make_task.py --output $O/task
    printf '\n== the policy imitates programs with wrong lines\n'
    .venv/bin/megatron-rl sft --config $RECIPE policy.path=$O/task/model policy.init=random
    for side in train held_out; do
        printf '\n== its own programs (%s), and which of their lines can still be completed to a right program\n' $side
        .venv/bin/python examples/sample.py --model $O/sft --rows $O/task/label.$side.jsonl --output $O/written.$side.jsonl --max-new-tokens 52
        .venv/bin/megatron-rl label-lines --config examples/line_rewards/labels.yaml \
            label_lines.input_path=$O/written.$side.jsonl label_lines.output_path=$O/labelled.$side.jsonl
    done
    .venv/bin/python examples/line_rewards/check_labels.py $O/labelled.train.jsonl
    printf '\n== the process reward model\n'
    .venv/bin/megatron-rl reward-train --config examples/line_rewards/prm.yaml
fi
train_arm outcome "${NO_LINES[@]}" "${FRESH_CRITIC[@]}" "$@"
train_arm lines "${FRESH_CRITIC[@]}" "$@"
train_arm critic "${NO_LINES[@]}" "$@"
train_arm lines_and_critic "$@"
.venv/bin/python examples/arms_table.py $O/runs
