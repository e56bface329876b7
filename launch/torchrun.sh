#!/usr/bin/env bash
# Start the trainer ranks of this node with torchrun, one per GPU. On several nodes run it on each, with the rendezvous of
# the first:
#   NUM_NODES=2 NODE_RANK=0 MASTER_ADDR=node0 bash launch/torchrun.sh train --config recipe.yaml key=value ...
# RANKS_PER_NODE=4 leaves the other GPUs of the driver's node to servers that the run starts.
# A cluster whose network gloo and NCCL do not find by themselves: export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/env.sh
if [ "${NUM_NODES:-1}" = 1 ]; then
    meet=(--standalone)  # at 127.0.0.1
else
    case ${MASTER_ADDR:-} in
        '' | 127.* | localhost | ::1)
            echo "torchrun: error: NUM_NODES=$NUM_NODES needs MASTER_ADDR, the first node's name or address that all nodes reach;" \
                "got '${MASTER_ADDR:-}'" >&2
            exit 2 ;;
    esac
    meet=(--nnodes "$NUM_NODES" --node-rank "${NODE_RANK:-0}"
        --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
fi
# torchrun, but a stop signal is the driver's, which saves and leaves: torchrun itself would kill the ranks 30 s later.
exec "$VENV/bin/python" -m megatron_rl.system.processes.torchrun "${meet[@]}" \
    --nproc-per-node "${RANKS_PER_NODE:-$DEFAULT_RANKS_PER_NODE}" --module megatron_rl.cli "$@"
