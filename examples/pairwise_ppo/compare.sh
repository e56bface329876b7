#!/usr/bin/env bash
# Rewards that are learned, compared by a rule that training never sees: a pairwise judge against a Bradley-Terry model of the same
# preferences, and a Bradley-Terry model of too few preferences, alone and on half of the prompts beside a verifier.
#   bash examples/pairwise_ppo/compare.sh [key=value ...]     SEEDS="1 2 3" repeats the reinforcement learning
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
RECIPE=examples/pairwise_ppo/pairwise_ppo.yaml
O=outputs/pairwise_ppo
. examples/pairwise_ppo/judge.sh
. examples/arms.sh

make_judge
scalar() {  # NAME STEPS
    [ -f "$O/$1/reward_training.json" ] || attended .venv/bin/megatron-rl reward-train --config examples/pairwise_ppo/judge.yaml \
        reward_train.kind=bradley_terry reward_train.output_path="$O/$1" reward_train.num_steps="$2"
}
scalar scalar 400
scalar weak 20
[ -f $O/sft/config.json ] || attended .venv/bin/megatron-rl sft --config $RECIPE policy.path=$O/task/model policy.init=random \
    "sft.train_files=[$O/task/prompts.train.jsonl]"
sed 's/^{/{"type": "judged", /' $O/task/prompts.train.jsonl > $O/judged.jsonl
awk '{ sub(/^\{/, NR % 2 ? "{\"type\": \"judged\", " : "{\"type\": \"checked\", "); print }' $O/task/prompts.train.jsonl > $O/half.jsonl
sed 's/^{/{"type": "checked", /' $O/task/prompts.held_out.jsonl > $O/checked.jsonl

# arm NAME MODEL DATA REWARD [key=value ...]: one run per seed; the judged prompts have the reward of the served model.
arm() {
    local name=$1 data=$3 options=
    JUDGE=$O/$2
    [ "$4" != reward_model ] || options=", sigmoid: true"
    start_judge
    local judged="{name: $4, timeout_s: 120, options: {url: \"$JUDGE_URL\", tokenizer_path: $JUDGE$options}}"
    shift 4
    train_arm "$name" "data.train_files=[$O/$data.jsonl]" "data.eval_files=[$O/checked.jsonl]" \
        "reward.by_type={judged: $judged, checked: {name: math, options: {extract: last_number}}}" \
        run.num_steps=20 eval.every_steps=2 eval.temperature=1 tracking.mlflow=false tracking.report_every_steps=0 "$@"
    kill "$SERVER_PID" && wait "$SERVER_PID" || true
    SERVER_PID=
}
arm bradley_terry scalar judged reward_model "$@"
arm pairwise judge judged pairwise "$@"
arm weak weak judged reward_model "$@"
arm hybrid weak half reward_model "$@"
.venv/bin/python examples/arms_table.py $O/runs
