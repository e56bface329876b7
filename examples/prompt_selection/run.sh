#!/usr/bin/env bash
# Pre-PPO selection: which tenth of a pool of new prompts to train on, by the policy's own responses before any training.
#   bash examples/prompt_selection/run.sh [key=value ...]    overrides apply to the reinforcement learning; SEEDS="1 2 3" repeats it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
RECIPE=examples/prompt_selection/train.yaml
O=outputs/prompt_selection
. examples/arms.sh

if [ ! -f $O/lowest.jsonl ]; then
    .venv/bin/python examples/prompt_selection/make_task.py --output $O/task
    printf '\n== the policy imitates solutions that are hardly ever long\n'
    .venv/bin/megatron-rl sft --config $RECIPE policy.path=$O/task/model policy.init=random
    printf '\n== eight responses to every prompt of the pool, scored once, before any reinforcement learning\n'
    .venv/bin/megatron-rl select-prompts --config examples/prompt_selection/select.yaml
    .venv/bin/megatron-rl select-prompts --config examples/prompt_selection/select.yaml \
        select_prompts.rule=pass_rate select_prompts.output_path=$O/pass_rate.jsonl
fi
train_arm random "data.train_files=[$O/task/random.jsonl]" "$@"
train_arm lowest "data.train_files=[$O/lowest.jsonl]" "$@"
train_arm original_and_lowest "data.train_files=[$O/task/original.jsonl,$O/lowest.jsonl]" "$@"
train_arm pass_rate "data.train_files=[$O/pass_rate.jsonl]" "$@"
for set in short long; do
    .venv/bin/python examples/arms_table.py $O/runs --metric eval/$set/accuracy
done
