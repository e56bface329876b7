#!/usr/bin/env bash
# Submit a recipe of this folder to SLURM with launch/slurm.sbatch, on the number of nodes of its plan.
#   bash examples/models/submit.sh qwen2.5-7b policy.path=/models/Qwen2.5-7B run.output_dir=/shared/runs/one
#   bash examples/models/submit.sh qwen2.5-32b/vapo ...      # another recipe of the folder
# Set your cluster's options in SBATCH_* variables (SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
fail() { echo "submit: error: $1" >&2; exit 2; }
case ${1:-} in */*) recipe=examples/models/$1.yaml ;; *) recipe=examples/models/${1:-}/recipe.yaml ;; esac
[ -n "${1:-}" ] && [ -f "$recipe" ] ||
    fail "expected one of $(cd examples/models && echo */), or a recipe such as qwen2.5-32b/vapo, got '${1:-}'"
start=$(sed -n 's/^# start: //p' "$recipe")
case $start in *sbatch*"$recipe"*) ;; *) fail "$recipe: its head says no sbatch, but '$start'" ;; esac
# The shell reads the variables before sbatch.
eval "$start$(printf ' %q' "${@:2}")"
