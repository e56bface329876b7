#!/usr/bin/env bash
# Start the trainer ranks of this node with torchrun, one per GPU. For several nodes, run this on each node with the first node's
# address:
#   NUM_NODES=2 NODE_RANK=0 MASTER_ADDR=node0 bash launch/torchrun.sh train --config recipe.yaml key=value ...
# RANKS_PER_NODE=4 leaves the other GPUs of the driver's node for servers that the run starts.
# If gloo and NCCL choose the wrong network interface: export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/env.sh
if [ "${NUM_NODES:-1}" = 1 ]; then
    meet=(--standalone)  # at 127.0.0.1
else
    case ${MASTER_ADDR:-} in
        '' | 127.* | localhost | ::1)
            echo "torchrun: error: NUM_NODES=$NUM_NODES needs MASTER_ADDR, a name or address of the first node that all nodes can reach;" \
                "got '${MASTER_ADDR:-}'" >&2
            exit 2 ;;
    esac
    meet=(--nnodes "$NUM_NODES" --node-rank "${NODE_RANK:-0}"
        --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
fi
# Like torchrun, but the driver handles stop signals, saves and exits: torchrun itself would kill the ranks after 30 s.
exec "$VENV/bin/python" -m megatron_rl.system.processes.torchrun "${meet[@]}" \
    --nproc-per-node "${RANKS_PER_NODE:-$DEFAULT_RANKS_PER_NODE}" --module megatron_rl.cli "$@"
