# Functions for run.sh scripts that compare training methods. Set RECIPE and O (the output folder) before sourcing this file.
#   train_arm NAME [key=value ...]     one run per seed of $SEEDS (default: 1) in $O/runs/NAME-SEED; finished runs are kept
train_arm() {
    local name=$1 seed
    shift
    for seed in ${SEEDS:-1}; do
        if [ -f "$O/runs/$name-$seed/summary.json" ]; then
            echo "$O/runs/$name-$seed is there already; remove it to train again"
            continue
        fi
        printf '\n== %s, seed %s\n' "$name" "$seed"
        .venv/bin/megatron-rl train --config "$RECIPE" run.output_dir="$O/runs/$name-$seed" run.seed="$seed" \
            run.overwrite=true "$@"
    done
}
