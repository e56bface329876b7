#!/usr/bin/env bash
# Run the same search for PPO and T-PPO: batch, policy learning rate and mini-batch, each run for the same seconds of training.
#   bash examples/long_tail/search.sh [--seconds 24] [--output outputs/long_tail] [key=value ...]
# A finished run is not repeated. The final table has the mean accuracy over the training time and the accuracy at its end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
HERE=examples/long_tail
O=outputs/long_tail
LIMIT_S=24
TRIALS=("128 4.0e-4 64" "256 2.0e-4 64" "256 4.0e-4 64" "256 8.0e-4 64" "256 4.0e-4 32" "512 4.0e-4 64" "512 8.0e-4 64")
OVERRIDES=()
while [ $# -gt 0 ]; do
    case $1 in
        --seconds) LIMIT_S=${2:?--seconds needs a number}; shift 2 ;;
        --output) O=${2:?--output needs a folder}; shift 2 ;;
        *=*) OVERRIDES+=("$1"); shift ;;
        *) echo "search: error: unknown argument $1; expected --seconds, --output or key=value" >&2; exit 2 ;;
    esac
done
[ -x .venv/bin/megatron-rl ] || bash launch/setup.sh
bash $HERE/warm_start.sh "$O"
for recipe in ppo tppo; do
    for trial in "${TRIALS[@]}"; do
        read -r batch rate minibatch <<< "$trial"
        run=$O/search/$recipe-$batch-$rate-$minibatch
        [ -f "$run/policy/config.json" ] && continue  # written at the end of a run
        printf '\n== %s, batch %s, learning rate %s, mini-batch %s\n' "$recipe" "$batch" "$rate" "$minibatch"
        .venv/bin/megatron-rl train --config "$HERE/$recipe.yaml" \
            policy.path="$O/sft" critic.path="$O/critic" data.train_files="[$O/task/train.jsonl]" \
            batch.num_prompts_per_step="$batch" policy.optimizer.lr="$rate" \
            batch.policy_minibatch_size="$minibatch" batch.critic_minibatch_size="$minibatch" \
            run.output_dir="$run" run.overwrite=true run.num_steps=1000000 run.save_every_steps=0 \
            run.stop_after_s="$LIMIT_S" run.keep_policy_every_s="$(awk "BEGIN { print $LIMIT_S / 8 }")" \
            tracking.mlflow=false tracking.report_every_steps=0 ${OVERRIDES[@]+"${OVERRIDES[@]}"}
    done
done
.venv/bin/python $HERE/evaluate.py --task "$O/task" --num-problems 500 "$O/sft" "$O"/search/*/policies/step-*
.venv/bin/python $HERE/search.py "$O/search" --start "$O/sft" --seconds "$LIMIT_S"
