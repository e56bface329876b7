# Sourced by the launch scripts: defaults that a site may set beforehand.
VENV=${VENV:-.venv}
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
    DEFAULT_RANKS_PER_NODE=$(nvidia-smi -L | wc -l)
    # Megatron overlaps tensor-parallel communication with computation only when kernels are queued in order.
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
else
    DEFAULT_RANKS_PER_NODE=1
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
fi
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
