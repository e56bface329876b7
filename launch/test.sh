#!/usr/bin/env bash
# Set everything up and run the tests. Arguments are passed to pytest:
#   bash launch/test.sh tests/unit          # pure logic, seconds
#   bash launch/test.sh -m gpu              # on a machine with a GPU
#   bash .ci/gpu_torch                      # the torch of GPU machines, without a GPU
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
source launch/bytecode.sh
# One thread per process: the ranks and servers of a test share the cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Tests that are not marked gpu run on the CPU, with several ranks and servers each, even if there is a GPU.
case " $* " in
    *" -m gpu "*) ;;
    *) export CUDA_VISIBLE_DEVICES= MEGATRON_RL_REQUIRE_GPU=0 ;;
esac
# Three files at a time, for two leave a quarter of two cores idle; whole runs first, so that no core is idle at the end.
# "-n 0" shows the output of one test as it runs.
exec "${VENV:-.venv}/bin/python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not gpu" "$@"
