#!/usr/bin/env bash
# One SGLang server in the foreground, for a trainer that attaches with rollout.urls=[http://host:port].
#   bash launch/serve_sglang.sh --model-path MODEL --host 0.0.0.0 --port 30000 --dtype bfloat16 mem-fraction-static=0.8
# For a colocated trainer (rollout.placement=colocated) one per group of GPUs, able to sleep:
#   bash launch/serve_sglang.sh --model-path MODEL --port 30000 --tensor-parallel-size 4 base-gpu-id=0 enable-memory-saver=true
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/env.sh
exec "$VENV/bin/megatron-rl" serve "$@"
