#!/usr/bin/env bash
# The same search for both sides: first the batch, then the policy's learning rate, every run for the same seconds.
#   bash examples/long_tail/search.sh [--seconds 40] [--output outputs/long_tail] [key=value ...]
# A run that has ended is not run again. At the end a table: mean accuracy over the time of training, and that at its end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
HERE=examples/long_tail
O=outputs/long_tail
SECONDS_EACH=40
BATCHES=(128 256 512)
RATES=(1.0e-4 4.0e-4)
OVERRIDES=()
while [ $# -gt 0 ]; do
    case $1 in
        --seconds) SECONDS_EACH=${2:?--seconds needs a number}; shift 2 ;;
        --output) O=${2:?--output needs a folder}; shift 2 ;;
        *=*) OVERRIDES+=("$1"); shift ;;
        *) echo "search: error: unknown argument $1; expected --seconds, --output or key=value" >&2; exit 2 ;;
    esac
done
bash $HERE/warm_start.sh "$O"

# trial RECIPE NAME [key=value ...]: prints nothing but the run; its mean accuracy is read by best
trial() {
    local recipe=$1 run=$O/search/$1-$2
    shift 2
    [ -f "$run/policy/config.json" ] || .venv/bin/megatron-rl train --config "$HERE/$recipe.yaml" \
        policy.path="$O/sft" critic.path="$O/critic" data.train_files="[$O/task/train.jsonl]" \
        run.output_dir="$run" run.overwrite=true run.num_steps=1000000 run.save_every_steps=0 \
        run.stop_after_s="$SECONDS_EACH" run.keep_policy_every_s="$((SECONDS_EACH / 8))" \
        tracking.mlflow=false tracking.report_every_steps=0 "$@" ${OVERRIDES[@]+"${OVERRIDES[@]}"}
    .venv/bin/python $HERE/evaluate.py --task "$O/task" "$O/sft" "$run"/policies/step-*
}
table() { .venv/bin/python $HERE/search.py "$O/search" --start "$O/sft" --seconds "$SECONDS_EACH" "$@"; }

for recipe in ppo tppo; do
    for batch in "${BATCHES[@]}"; do
        trial $recipe "batch$batch" batch.num_prompts_per_step="$batch"
    done
    batch=$(table --best "$recipe-batch*" | sed 's/.*-batch//')
    for rate in "${RATES[@]}"; do
        trial $recipe "batch$batch-lr$rate" batch.num_prompts_per_step="$batch" policy.optimizer.lr="$rate"
    done
done
table
