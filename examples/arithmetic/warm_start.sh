#!/usr/bin/env bash
# Create the common start of both modes: the task, a supervised warm start and a pretrained critic. Runs once per folder.
#   bash examples/arithmetic/warm_start.sh outputs/arithmetic
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
OUTPUT=${1:?usage: warm_start.sh OUTPUT_FOLDER}
PATHS=("data.train_files=[$OUTPUT/task/train.jsonl]" "data.eval_files=[$OUTPUT/task/eval.jsonl]")

if [ -f "$OUTPUT/critic/config.json" ]; then
    echo "warm start: $OUTPUT/critic is there already; remove $OUTPUT to start over"
    exit 0
fi
printf '\n== 1/4 the task: chains of additions with running totals\n'
.venv/bin/python examples/arithmetic/make_task.py --output "$OUTPUT/task"
printf '\n== 2/4 supervised warm start from random weights\n'
.venv/bin/megatron-rl sft --config examples/arithmetic/tppo.yaml "${PATHS[@]}" \
    policy.path="$OUTPUT/task/model" policy.init=random "sft.train_files=[$OUTPUT/task/sft.jsonl]" sft.output_path="$OUTPUT/sft"
printf '\n== 3/4 critic pretraining on responses of the frozen policy\n'
.venv/bin/megatron-rl critic-pretrain --config examples/arithmetic/tppo.yaml "${PATHS[@]}" \
    policy.path="$OUTPUT/sft" critic.path= critic_pretrain.output_path="$OUTPUT/critic" \
    run.output_dir="$OUTPUT" run.overwrite=true
