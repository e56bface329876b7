# Defaults that the launch scripts source; a site may set them beforehand.
VENV=${VENV:-.venv}
source launch/bytecode.sh
# Trainer ranks and servers share an NCCL communicator: both sides need the same values, and 0 is SGLang's default.
# NCCL_NVLS_ENABLE=1 turns both on; multi-node NVLink (GB200, GB300) needs that, for the trainer and for every server.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
export NCCL_CUMEM_ENABLE=${NCCL_CUMEM_ENABLE:-$NCCL_NVLS_ENABLE}
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}

NUM_GPUS=0
if [ -z "${CUDA_VISIBLE_DEVICES+set}" ]; then
    NUM_GPUS=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ') || true
elif [ -n "$CUDA_VISIBLE_DEVICES" ] && nvidia-smi -L >/dev/null 2>&1; then
    NUM_GPUS=$(echo "$CUDA_VISIBLE_DEVICES" | tr ',' '\n' | grep -cE '^ *([0-9]+|GPU-.*|MIG-.*)$') || true
fi
if [ "$NUM_GPUS" -gt 0 ]; then
    DEFAULT_RANKS_PER_NODE=$NUM_GPUS
    # Megatron overlaps tensor-parallel communication with computation only when kernels are queued in order.
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
else
    if [ "${MEGATRON_RL_REQUIRE_GPU:-0}" != 0 ]; then
        echo "error: MEGATRON_RL_REQUIRE_GPU=$MEGATRON_RL_REQUIRE_GPU, but nvidia-smi lists no GPU on $(hostname)" \
            "(CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-unset}). Request GPUs from the scheduler (sbatch --gpus-per-node=8)," \
            "check nvidia-smi, or set MEGATRON_RL_REQUIRE_GPU=0 to compute on CPUs" >&2
        exit 2
    fi
    DEFAULT_RANKS_PER_NODE=1
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
fi
# Only on GPUs (a CPU's value is set above): torchrun's default is one thread per rank, but rank 0 packs a step's batches with several.
if [ -z "${OMP_NUM_THREADS:-}" ]; then
    OMP_NUM_THREADS=$(($(nproc) / ${RANKS_PER_NODE:-$DEFAULT_RANKS_PER_NODE}))
    export OMP_NUM_THREADS=$((OMP_NUM_THREADS < 1 ? 1 : OMP_NUM_THREADS > 8 ? 8 : OMP_NUM_THREADS))
fi
