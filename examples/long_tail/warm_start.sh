#!/usr/bin/env bash
# Create the common start of both modes: the task, a supervised warm start and a pretrained critic. Runs once per folder.
#   bash examples/long_tail/warm_start.sh outputs/long_tail [--tail 1.15 --seed 1 ... (arguments of make_task.py)]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
O=${1:?usage: warm_start.sh OUTPUT_FOLDER [arguments of make_task.py]}
shift
RECIPE=examples/long_tail/tppo.yaml

if [ -f "$O/critic/config.json" ]; then
    echo "warm start: $O/critic is there already; remove $O to start over"
    exit 0
fi
printf '\n== 1/3 the task: divisions by repeated subtraction\n'
.venv/bin/python examples/long_tail/make_task.py --output "$O/task" --overwrite "$@"
printf '\n== 2/3 supervised warm start from random weights\n'
.venv/bin/megatron-rl sft --config $RECIPE policy.path="$O/task/model" policy.init=random \
    "sft.train_files=[$O/task/sft.jsonl]" sft.output_path="$O/sft"
printf '\n== 3/3 critic pretraining on responses of the frozen policy\n'
.venv/bin/megatron-rl critic-pretrain --config $RECIPE policy.path="$O/sft" critic.path= \
    "data.train_files=[$O/task/train.jsonl]" critic_pretrain.output_path="$O/critic" \
    run.output_dir="$O" run.overwrite=true batch.max_response_tokens=240 batch.window_tokens=0 critic.num_epochs=4
