#!/usr/bin/env bash
# Submits a recipe of this folder under SLURM, on as many nodes as its plan has: launch/slurm.sbatch.
#   bash examples/models/submit.sh qwen2.5-7b policy.path=/models/Qwen2.5-7B run.output_dir=/shared/runs/one
# What the cluster wants otherwise goes in SBATCH_* variables (SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
fail() { echo "submit: error: $1" >&2; exit 2; }
recipe=examples/models/${1:-}/recipe.yaml
[ -n "${1:-}" ] && [ -f "$recipe" ] || fail "expected one of $(cd examples/models && echo */), got '${1:-}'"
start=$(sed -n 's/^# start: //p' "$recipe")
case $start in *sbatch*RECIPE.yaml*) ;; *) fail "$recipe: its head says no sbatch, but '$start'" ;; esac
# Variables in front of sbatch are the shell's.
eval "${start/RECIPE.yaml/$recipe}$(printf ' %q' "${@:2}")"
