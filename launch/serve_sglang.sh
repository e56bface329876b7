#!/usr/bin/env bash
# Start SGLang servers in the foreground, for a trainer that attaches with rollout.urls. The servers listen on 127.0.0.1. For a
# trainer on another machine, set --trainer (or --host with an address of the job's network) and a key on both sides:
#   export SGLANG_KEY=...          # the same on every node: openssl rand -hex 32
#   bash launch/serve_sglang.sh --config recipe.yaml --trainer node0 --api-key-env SGLANG_KEY
#   ... train --config recipe.yaml rollout.urls=[http://10.0.0.7:30000,...] rollout.api_key_env=SGLANG_KEY
# With a recipe, the servers are those that the run would start, on all GPUs of this node. Without a recipe, give all options:
#   bash launch/serve_sglang.sh --model-path MODEL --num-servers 8 --host 10.0.0.7 --api-key-env SGLANG_KEY \
#       --dtype bfloat16 mem-fraction-static=0.8
# launch/slurm.sbatch does all of this inside a job (ROLLOUT_NODES). megatron-rl serve --help lists the rest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/env.sh
exec "$VENV/bin/megatron-rl" serve "$@"
