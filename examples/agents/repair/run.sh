#!/usr/bin/env bash
# An agent from random weights: transcripts to imitate, then reinforcement learning through the endpoint, in four ways.
#   bash examples/agents/repair/run.sh [key=value ...]     ARMS="whole windows sao groups", SEEDS="1 2 3 4 5"; default: sao, seed 1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
RECIPE=examples/agents/repair/repair.yaml
O=outputs/agents/repair
. examples/arms.sh
export CUDA_VISIBLE_DEVICES= MEGATRON_RL_REQUIRE_GPU=0

if [ ! -f $O/sft/config.json ]; then
    .venv/bin/python examples/agents/repair/make_task.py --output $O/task
    printf '\n== the policy imitates transcripts, of which a third repair\n'
    .venv/bin/megatron-rl sft --config $RECIPE policy.path=$O/task/model policy.init=random
fi
.venv/bin/python examples/agents/repair/agent_service.py 8775 &
trap "kill $! 2>/dev/null || true" EXIT

for arm in ${ARMS:-sao}; do
    case $arm in
        sao) train_arm sao "$@" ;;
        whole) train_arm whole preset=ppo schedule.mode=sync "$@" ;;
        # About as many tokens: 30 steps of 64 windows, of which an episode has two or three; its critic learns beside as many episodes.
        windows) train_arm windows preset=tppo schedule.mode=tppo run.num_steps=30 eval.every_steps=10 critic.warmup_steps=5 \
            batch.window_tokens=16 batch.window_jitter_tokens=8 batch.policy_minibatch_size=32 algorithm.ignore_boundary_tokens=1 "$@" ;;
        groups) train_arm groups preset=rloo schedule.mode=sync critic.warmup_steps=0 algorithm.kl.place=none \
            batch.num_prompts_per_step=16 batch.num_samples_per_prompt=4 "$@" ;;
        *) echo "run.sh: error: ARMS has sao, whole, windows and groups, got $arm" >&2; exit 2 ;;
    esac
done
.venv/bin/python examples/arms_table.py $O/runs
