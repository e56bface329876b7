#!/usr/bin/env bash
# An agent from random weights: transcripts to imitate, then reinforcement learning through the endpoint, in four ways.
#   bash examples/agents/repair/run.sh [key=value ...]     ARMS="windows whole sao groups", SEEDS="1 2 3 4 5"; default: windows, seed 1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
RECIPE=examples/agents/repair/repair.yaml
O=outputs/agents/repair
. examples/arms.sh
export CUDA_VISIBLE_DEVICES= MEGATRON_RL_REQUIRE_GPU=0

if [ ! -f $O/sft/config.json ]; then
    .venv/bin/python examples/agents/repair/make_task.py --output $O/task
    printf '\n== the policy imitates transcripts, of which a quarter repair\n'
    .venv/bin/megatron-rl sft --config $RECIPE policy.path=$O/task/model policy.init=random
fi
.venv/bin/python examples/agents/repair/agent_service.py 8775 &
trap "kill $! 2>/dev/null || true" EXIT

# Whole episodes: as many tokens per update as in windows, and a critic that has seen as many episodes before it counts.
WHOLE=(schedule.mode=sync batch.window_tokens=0 batch.policy_minibatch_size=16 batch.critic_minibatch_size=16 critic.warmup_steps=2
    run.num_steps=8 eval.every_steps=4)
for arm in ${ARMS:-windows}; do
    case $arm in
        windows) train_arm windows "$@" ;;
        whole) train_arm whole preset=ppo "${WHOLE[@]}" "$@" ;;
        sao) train_arm sao preset=sao "${WHOLE[@]}" schedule.mode=async "$@" ;;
        groups) train_arm groups preset=rloo "${WHOLE[@]}" batch.num_prompts_per_step=16 batch.num_samples_per_prompt=4 \
            critic.warmup_steps=0 algorithm.kl.place=none "$@" ;;
        *) echo "run.sh: error: ARMS has windows, whole, sao and groups, got $arm" >&2; exit 2 ;;
    esac
done
.venv/bin/python examples/arms_table.py $O/runs
