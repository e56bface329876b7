#!/usr/bin/env bash
# One recipe on the arithmetic task, or all of them, from one warm start; at the end a table of accuracies.
#   bash examples/recipes/run.sh dapo [key=value ...]
#   bash examples/recipes/run.sh all [key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
NAME=${1:?usage: run.sh RECIPE|all [key=value ...]}
shift
HERE=examples/recipes
if [ "$NAME" = all ]; then
    NAMES=$(cd $HERE && ls -- *.yaml | sed 's/\.yaml$//' | grep -v '^arithmetic$')
elif [ -f "$HERE/$NAME.yaml" ]; then
    NAMES=$NAME
else
    echo "error: no recipe $HERE/$NAME.yaml; there are: $(cd $HERE && ls -- *.yaml | sed 's/\.yaml$//' | grep -v '^arithmetic$' | tr '\n' ' ')" >&2
    exit 2
fi
bash examples/arithmetic/warm_start.sh outputs/arithmetic
for name in $NAMES; do
    printf '\n== %s\n' "$name"
    .venv/bin/megatron-rl train --config $HERE/arithmetic.yaml --config "$HERE/$name.yaml" run.overwrite=true "$@"
done
.venv/bin/python $HERE/table.py outputs/recipes
