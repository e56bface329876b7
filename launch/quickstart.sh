#!/usr/bin/env bash
# Train a tiny language model on arithmetic from scratch: install, make the task, warm start, critic, T-PPO.
#   bash launch/quickstart.sh                          # T-PPO
#   bash launch/quickstart.sh --mode ppo               # the synchronous baseline from the same start
#   bash launch/quickstart.sh run.num_steps=20         # key=value arguments override the recipe
# Computes on the CPU even on a GPU machine: the model is tiny, in float32, and all published figures were measured on a CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

MODE=tppo
OUTPUT=outputs/arithmetic
OVERRIDES=()
while [ $# -gt 0 ]; do
    case $1 in
        --mode) MODE=${2:?--mode needs tppo or ppo}; shift 2 ;;
        --output) OUTPUT=${2:?--output needs a folder}; shift 2 ;;
        -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *=*) OVERRIDES+=("$1"); shift ;;
        *) echo "quickstart: error: unknown argument $1; expected --mode, --output or key=value" >&2; exit 2 ;;
    esac
done
case $MODE in
    tppo | ppo) ;;
    *) echo "quickstart: error: --mode is tppo or ppo, got $MODE" >&2; exit 2 ;;
esac

bash launch/setup.sh
source launch/bytecode.sh
# Hide all GPUs from torch and SGLang.
export CUDA_VISIBLE_DEVICES= MEGATRON_RL_REQUIRE_GPU=0
if nvidia-smi -L >/dev/null 2>&1; then echo "quickstart: running on the CPU; for GPU recipes see examples/gpu/README.md"; fi
started=$SECONDS
step() { printf '\n== %s (%d s since the start)\n' "$1" $((SECONDS - started)); }

bash examples/arithmetic/warm_start.sh "$OUTPUT"
declare -A NAMES=([tppo]=T-PPO [ppo]=PPO)
step "4/4 ${NAMES[$MODE]}: reinforcement learning against the verifier"
.venv/bin/megatron-rl train --config "examples/arithmetic/$MODE.yaml" \
    policy.path="$OUTPUT/sft" critic.path="$OUTPUT/critic" \
    data.train_files="[$OUTPUT/task/train.jsonl]" data.eval_files="[$OUTPUT/task/eval.jsonl]" \
    run.output_dir="$OUTPUT/$MODE" run.overwrite=true ${OVERRIDES[@]+"${OVERRIDES[@]}"}
printf '\nquickstart: done in %d s\n' $((SECONDS - started))
