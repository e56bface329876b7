#!/usr/bin/env bash
# T-PPO and synchronous PPO from the same start: the wall-clock time each needs to reach the same accuracy.
#   bash examples/arithmetic/compare.sh [--accuracy 0.7] [--output outputs/arithmetic] [key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
ACCURACY=0.7
OUTPUT=outputs/arithmetic
OVERRIDES=()
while [ $# -gt 0 ]; do
    case $1 in
        --accuracy) ACCURACY=${2:?--accuracy needs a number}; shift 2 ;;
        --output) OUTPUT=${2:?--output needs a folder}; shift 2 ;;
        *=*) OVERRIDES+=("$1"); shift ;;
        *) echo "compare: error: unknown argument $1; expected --accuracy, --output or key=value" >&2; exit 2 ;;
    esac
done

bash launch/setup.sh
bash examples/arithmetic/warm_start.sh "$OUTPUT"
for mode in tppo ppo; do
    printf '\n== %s until %s\n' "$mode" "$ACCURACY"
    .venv/bin/megatron-rl train --config "examples/arithmetic/$mode.yaml" \
        policy.path="$OUTPUT/sft" critic.path="$OUTPUT/critic" \
        data.train_files="[$OUTPUT/task/train.jsonl]" data.eval_files="[$OUTPUT/task/eval.jsonl]" \
        run.output_dir="$OUTPUT/compare-$mode" run.overwrite=true \
        run.num_steps=400 eval.every_steps=5 eval.stop_at_accuracy="$ACCURACY" ${OVERRIDES[@]+"${OVERRIDES[@]}"}
done
.venv/bin/python examples/arithmetic/compare.py --accuracy "$ACCURACY" "$OUTPUT/compare-tppo" "$OUTPUT/compare-ppo"
