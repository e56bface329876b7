#!/usr/bin/env bash
# One SGLang server in the foreground, for a trainer that attaches with rollout.urls=[http://host:port]. It listens on
# 127.0.0.1; for a trainer on another machine give it an address of the job's network, and a key on both sides:
#   export SGLANG_KEY=...          # the same on every node: openssl rand -hex 32
#   bash launch/serve_sglang.sh --model-path MODEL --host 10.0.0.7 --port 30000 --api-key-env SGLANG_KEY \
#       --dtype bfloat16 mem-fraction-static=0.8
#   ... train rollout.urls=[http://10.0.0.7:30000] rollout.api_key_env=SGLANG_KEY
# For a colocated trainer (rollout.placement=colocated) one per group of GPUs, able to sleep:
#   bash launch/serve_sglang.sh --model-path MODEL --port 30000 --tensor-parallel-size 4 base-gpu-id=0 enable-memory-saver=true
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/env.sh
exec "$VENV/bin/megatron-rl" serve "$@"
