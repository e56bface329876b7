# Functions for a judge and its server. run.sh of this folder and of examples/seed_vl_hybrid source this file from the repository's root.
# The server is stopped by its process id when the script ends for any reason: success, failure, Ctrl-C or SIGTERM.

JUDGE=outputs/pairwise_ppo/judge
SERVER_PID=
COMMAND_PID=
SCRATCH=$(mktemp -d)

# Run a command in the background, so that the script can stop it: bash handles signals only after a foreground command has ended.
attended() {
    "$@" &
    COMMAND_PID=$!
    local status=0
    wait "$COMMAND_PID" || status=$?
    COMMAND_PID=
    return "$status"
}

stop_all() {
    local status=$?
    trap '' INT TERM
    for pid in $COMMAND_PID $SERVER_PID; do
        kill -TERM "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
    rm -rf "$SCRATCH"
    exit "$status"
}
trap stop_all EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Write the task and train the judge, unless both exist.
make_judge() {
    if [ -f "$JUDGE/reward_training.json" ]; then  # written last
        echo "judge: $JUDGE is there already; remove outputs/pairwise_ppo to start over"
        return
    fi
    printf '\n== the judge: digits that are sorted are better\n'
    attended .venv/bin/python examples/pairwise_ppo/make_task.py --output outputs/pairwise_ppo/task
    attended .venv/bin/megatron-rl reward-train --config examples/pairwise_ppo/judge.yaml
}

# Serve the judge on a free port; JUDGE_URL is its address.
start_judge() {
    local output=$SCRATCH/server.txt
    : >"$output"  # of an earlier server
    .venv/bin/megatron-rl serve --model-path "$JUDGE" --port 0 --log "$JUDGE.server.log" >"$output" 2>&1 &
    SERVER_PID=$!
    until JUDGE_URL=$(sed -n 's/^server \(http[^ ]*\) is ready.*/\1/p' "$output") && [ -n "$JUDGE_URL" ]; do
        if ! kill -0 "$SERVER_PID" 2>/dev/null; then
            echo "error: the judge's server ended before it was ready:" >&2
            cat "$output" >&2
            exit 1
        fi
        sleep 0.5
    done
    echo "judge: $JUDGE_URL (process $SERVER_PID)"
}

# right FOLDER ROWS: the share of right responses to held-out prompts, according to the rule, not the judge.
right() {
    attended .venv/bin/python examples/sample.py --model "$1" --rows "$2" --output "$SCRATCH/responses.jsonl"
    attended .venv/bin/megatron-rl score --reward math extract=last_number \
        --input "$SCRATCH/responses.jsonl" --output "$SCRATCH/scored.jsonl"
}
