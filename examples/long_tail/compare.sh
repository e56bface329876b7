#!/usr/bin/env bash
# Compare synchronous PPO and T-PPO from the same start, for the same seconds of training, over several seeds.
#   bash examples/long_tail/compare.sh [--seeds 1 2 3 4 5] [--minutes 3] [--tail 1.15] [--arms FILE] [--output FOLDER] [key=value ...]
# One run at a time. A finished run is not repeated, so a stopped command resumes; more seeds and more arms may be added later.
# Nothing is evaluated during training: the kept policies are evaluated afterwards.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
HERE=examples/long_tail
SEEDS=()
MINUTES=3
TAIL=1.15
ARMS=$HERE/arms.txt
O=outputs/long_tail
POINTS=12
OVERRIDES=()
usage() {
    echo "compare: error: $1; expected --seeds 1 2 ..., --minutes M, --tail T, --arms FILE, --output FOLDER or key=value" >&2
    exit 2
}
while [ $# -gt 0 ]; do
    case $1 in
        --seeds)
            shift
            while [[ ${1:-} =~ ^[0-9]+$ ]]; do SEEDS+=("$1"); shift; done
            [ ${#SEEDS[@]} -gt 0 ] || usage "--seeds needs whole numbers" ;;
        --minutes) MINUTES=${2:?--minutes needs a number}; shift 2 ;;
        --tail) TAIL=${2:?--tail needs a number}; shift 2 ;;
        --arms) ARMS=${2:?--arms needs a file}; shift 2 ;;
        --output) O=${2:?--output needs a folder}; shift 2 ;;
        *=*) OVERRIDES+=("$1"); shift ;;
        *) usage "unknown argument $1" ;;
    esac
done
[ ${#SEEDS[@]} -gt 0 ] || SEEDS=(1 2 3 4 5)
[ -f "$ARMS" ] || usage "no file $ARMS"
[[ $MINUTES =~ ^[0-9]*\.?[0-9]+$ ]] || usage "--minutes $MINUTES is no number"
LIMIT_S=$(awk "BEGIN { print $MINUTES * 60 }")
EVERY_S=$(awk "BEGIN { print $LIMIT_S / $POINTS }")
mapfile -t LINES < <(grep -v '^ *\(#\|$\)' "$ARMS")
NAMES=()
BASELINES=()
for line in "${LINES[@]}"; do
    read -r name recipe _ <<< "$line"
    NAMES+=("$name")
    [ "$recipe" != ppo.yaml ] || BASELINES+=("$name")
done
[ ${#BASELINES[@]} -gt 0 ] || BASELINES=("${NAMES[0]}")

# Runs with other minutes or settings do not belong to this comparison.
SETTINGS="minutes $MINUTES, tail $TAIL, overrides: ${OVERRIDES[*]-}"
mkdir -p "$O"
if [ -f "$O/comparison.settings" ] && [ "$(cat "$O/comparison.settings")" != "$SETTINGS" ]; then
    echo "compare: error: $O holds runs of '$(cat "$O/comparison.settings")', not of '$SETTINGS'; give another --output, or remove it" >&2
    exit 2
fi
echo "$SETTINGS" > "$O/comparison.settings"

[ -x .venv/bin/megatron-rl ] || bash launch/setup.sh
bash $HERE/warm_start.sh "$O" --tail "$TAIL"
BEGIN=$SECONDS
NUM_ALL=$((${#SEEDS[@]} * ${#LINES[@]}))
NUMBER=0
TURN=0
for seed in "${SEEDS[@]}"; do
    for ((place = 0; place < ${#LINES[@]}; place++)); do
        # Each seed starts with a different arm, so that a machine that slows down does not always slow the same arms.
        read -r name recipe settings <<< "${LINES[$(((place + TURN) % ${#LINES[@]}))]}"
        NUMBER=$((NUMBER + 1))
        run=$O/runs/$name-$seed
        [ -f "$run/policy/config.json" ] && continue  # written at the end of a run
        printf '\n== run %d of %d: %s, seed %s, %s min of training; %d min so far\n' \
            $NUMBER $NUM_ALL "$name" "$seed" "$MINUTES" $(((SECONDS - BEGIN) / 60))
        # shellcheck disable=SC2086  # split an arm's settings into words
        .venv/bin/megatron-rl train --config "$HERE/$recipe" $settings \
            policy.path="$O/sft" critic.path="$O/critic" data.train_files="[$O/task/train.jsonl]" 'data.eval_files=[]' \
            run.output_dir="$run" run.seed="$seed" run.overwrite=true run.num_steps=1000000 run.save_every_steps=0 \
            run.stop_after_s="$LIMIT_S" run.keep_policy_every_s="$EVERY_S" tracking.mlflow=false tracking.report_every_steps=0 \
            ${OVERRIDES[@]+"${OVERRIDES[@]}"}
    done
    TURN=$((TURN + 1))
done
printf '\n== accuracy of the policies that the runs kept\n'
.venv/bin/python $HERE/evaluate.py --task "$O/task" "$O/sft" "$O"/runs/*-*/policies/step-*
.venv/bin/python $HERE/compare.py "$O/runs" --start "$O/sft" --baselines "${BASELINES[@]}" --arms "${NAMES[@]}" --seconds "$LIMIT_S"
