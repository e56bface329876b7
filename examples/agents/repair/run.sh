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
trap "kill $!" EXIT

WHOLE=(schedule.mode=sync batch.window_tokens=0 run.num_steps=30 eval.every_steps=5)
for arm in ${ARMS:-windows}; do
    case $arm in
        windows) train_arm windows "$@" ;;
        whole) train_arm whole preset=ppo "${WHOLE[@]}" "$@" ;;
        groups) train_arm groups preset=rloo "${WHOLE[@]}" batch.num_prompts_per_step=16 batch.num_samples_per_prompt=4 "$@" ;;
        sao) train_arm sao preset=sao "${WHOLE[@]}" schedule.mode=async critic.num_epochs=2 "$@" ;;
        *) echo "run.sh: error: ARMS has windows, whole, sao and groups, got $arm" >&2; exit 2 ;;
    esac
done
.venv/bin/python examples/arms_table.py $O/runs
