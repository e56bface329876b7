#!/usr/bin/env bash
# Train one recipe or all recipes on the arithmetic task from one warm start, then print a table of accuracies over time.
#   bash examples/recipes/run.sh dapo [key=value ...]
#   SEEDS="1 2 3" MINUTES=2 bash examples/recipes/run.sh all [key=value ...]
# Each run trains for MINUTES (default: 2) and keeps its policy at a quarter, a half, three quarters and the end. The policies
# are evaluated afterwards, so that evaluations do not count as training time. A finished run is not repeated; use another
# seed, or remove its folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
NAME=${1:?usage: run.sh RECIPE|all [key=value ...]}
shift
HERE=examples/recipes
O=outputs/recipes
LIMIT_S=$(awk "BEGIN { print ${MINUTES:-2} * 60 }")
if [ "$NAME" = all ]; then
    NAMES=$(cd $HERE && ls -- *.yaml | sed 's/\.yaml$//' | grep -v '^arithmetic$')
elif [ -f "$HERE/$NAME.yaml" ]; then
    NAMES=$NAME
else
    echo "error: no recipe $HERE/$NAME.yaml; there are: $(cd $HERE && ls -- *.yaml | sed 's/\.yaml$//' | grep -v '^arithmetic$' | tr '\n' ' ')" >&2
    exit 2
fi
bash examples/arithmetic/warm_start.sh outputs/arithmetic
for seed in ${SEEDS:-1}; do
    for name in $NAMES; do
        run=$O/$name-$seed
        [ -d "$run/policy" ] && continue  # written at the end of a run
        printf '\n== %s, seed %s\n' "$name" "$seed"
        .venv/bin/megatron-rl train --config $HERE/arithmetic.yaml --config "$HERE/$name.yaml" run.output_dir="$run" \
            run.seed="$seed" run.overwrite=true run.num_steps=1000000 run.save_every_steps=0 run.stop_after_s="$LIMIT_S" \
            run.keep_policy_every_s="$(awk "BEGIN { print $LIMIT_S / 4 }")" 'data.eval_files=[]' "$@"
    done
done
shopt -s nullglob
POLICIES=("$O"/*-*/policies/step-*)
if [ ${#POLICIES[@]} -gt 0 ]; then
    printf '\n== accuracy of the policies that the runs kept\n'
    .venv/bin/megatron-rl evaluate --config $HERE/arithmetic.yaml run.output_dir=$O/evaluation \
        --policies outputs/arithmetic/sft "${POLICIES[@]}"
fi
.venv/bin/python $HERE/table.py $O --start outputs/arithmetic/sft
