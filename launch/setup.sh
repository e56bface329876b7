#!/usr/bin/env bash
# Create .venv and install megatron_rl with all dependencies. Idempotent: takes seconds if nothing has changed.
#   bash launch/setup.sh            # for this machine: GPU pins if nvidia-smi works, otherwise CPU pins
#   FLAVOR=cpu bash launch/setup.sh # choose explicitly (cpu or gpu)
# For GPUs: installs requirements/gpu.lock, then compiles Transformer Engine against its torch. This needs neither a GPU nor a
# CUDA toolkit. If Transformer Engine does not compile: TRANSFORMER_ENGINE=no bash launch/setup.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: error: %s\n' "$1" >&2; printf 'setup: remedy: %s\n' "$2" >&2; exit 1; }

if [ -z "${FLAVOR:-}" ]; then
    FLAVOR=cpu
    if command -v nvidia-smi >/dev/null 2>&1; then
        if nvidia-smi -L >/dev/null 2>&1; then
            FLAVOR=gpu
        else
            say "note: nvidia-smi exists but lists no GPU: installing for a CPU. FLAVOR=gpu installs for GPUs anyway"
        fi
    fi
fi
[ "$FLAVOR" = cpu ] || [ "$FLAVOR" = gpu ] || fail "FLAVOR=$FLAVOR is unknown" "use FLAVOR=cpu or FLAVOR=gpu"
VENV=${VENV:-.venv}
TRANSFORMER_ENGINE=${TRANSFORMER_ENGINE:-yes}
# GPU: 11,000 MiB installed, 5,000 of downloads in pip's cache, the rest to unpack and compile.
if [ "$FLAVOR" = gpu ]; then NEEDED_MIB=18000; else NEEDED_MIB=6000; fi

PYTHON=${PYTHON:-}
if [ -z "$PYTHON" ]; then
    for candidate in python3.11 python3.12 python3; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
            PYTHON=$candidate
            break
        fi
    done
fi
[ -n "$PYTHON" ] || fail "no Python 3.11 or 3.12 found" "install python3.11 with its venv module, or set PYTHON=/path/to/python3.11"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' ||
    fail "$PYTHON is $("$PYTHON" --version 2>&1)" "set PYTHON to a Python 3.11 or 3.12"

# The installation depends only on these inputs: if none has changed, there is nothing to do.
wanted=$({ cat setup.py requirements/*.txt requirements/*.lock; echo "$FLAVOR $TRANSFORMER_ENGINE"; "$PYTHON" --version; pwd; } |
    sha256sum | cut -d' ' -f1)
if [ -x "$VENV/bin/megatron-rl" ] && [ "$(cat "$VENV/.megatron_rl" 2>/dev/null)" = "$wanted" ]; then
    say "$VENV is up to date"
    exit 0
fi

# The packages are already installed: an update needs little space.
if [ -f "$VENV/.megatron_rl" ]; then NEEDED_MIB=1000; fi
if [ "$FLAVOR" = gpu ]; then
    "$PYTHON" -I megatron_rl/system/gpu/gpu_stack.py "$VENV" "$NEEDED_MIB" || exit 1
else
    free_mib=$(df -Pm . | awk 'NR == 2 {print $4}')
    if [ "$free_mib" -lt "$NEEDED_MIB" ]; then
        fail "$free_mib MiB free in $(pwd), about $NEEDED_MIB needed" "free some space, or clone to a larger disk"
    fi
fi

say "installing ($FLAVOR) into $VENV with $("$PYTHON" --version); the first installation takes some minutes"
if [ ! -x "$VENV/bin/python" ]; then
    "$PYTHON" -m venv "$VENV" || fail "$PYTHON cannot create a virtual environment" "install its venv module (Debian: apt-get install python3-venv)"
fi
log="$VENV/install.log"
pip_install() {
    if ! "$VENV/bin/python" -m pip install --disable-pip-version-check "$@" >"$log" 2>&1; then
        grep -v '^WARNING' "$log" | tail -n 15 >&2
        if grep -qiE 'no space left' "$log"; then
            fail "the disk is full" "free some space and run this again"
        elif grep -qiE 'connection|timed out|temporary failure|name resolution|max retries|proxy' "$log"; then
            fail "the package registry could not be reached" "check the network, or set PIP_INDEX_URL to a mirror; details: $log"
        elif grep -qiE 'do not match the hashes' "$log"; then
            fail "a package differs from the locked one" "check the registry or mirror that it came from; details: $log"
        fi
        fail "${failure:-pip could not install the packages}" "${remedy:-read $log}"
    fi
}

# CUDA's wheels lack linker names and lib64. With both they are a complete toolkit, which SGLang needs to compile its kernels.
complete_toolkit() {
    toolkit=$(cd "$VENV"/lib/python3*/site-packages/nvidia/cu13 && pwd)
    ln -sfn lib "$toolkit/lib64"
    for library in "$toolkit"/lib/*.so.*; do
        library=${library##*/}
        [ -e "$toolkit/lib/${library%%.so.*}.so" ] || ln -s "$library" "$toolkit/lib/${library%%.so.*}.so"
    done
}

compile_transformer_engine() {
    # A compiler process takes up to 3 GiB.
    jobs=$(($(awk '/MemAvailable/ {print $2}' /proc/meminfo) / 3145728))
    if [ "$jobs" -gt "$(nproc)" ]; then jobs=$(nproc); fi
    if [ "$jobs" -lt 1 ]; then jobs=1; fi
    export MAX_JOBS=${MAX_JOBS:-$jobs}
    say "3/4 Transformer Engine, compiled for this torch: about 30 minutes of one core, with $MAX_JOBS jobs in parallel"
    failure="Transformer Engine does not compile"
    remedy="read $log. TRANSFORMER_ENGINE=no bash launch/setup.sh installs without it"
    # Force the build, because setup.py would download a wheel. Do not cache it, because pip would reuse it for another torch.
    NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_CUDA_ARCHS=${NVTE_CUDA_ARCHS:-90} CUDA_HOME=$toolkit \
        pip_install --force-reinstall --no-cache-dir --no-deps --no-build-isolation --require-hashes -r requirements/gpu-build.lock
    failure= remedy=
}

if [ "$FLAVOR" = gpu ]; then
    say "1/4 locked packages (requirements/gpu.lock): 5 GB to download"
    pip_install --no-deps --require-hashes -r requirements/gpu.lock
    say "2/4 CUDA's compiler and headers, from its wheels"
    complete_toolkit
    compiled=$({ grep '^torch==' requirements/gpu.lock; cat requirements/gpu-build.lock; } | sha256sum | cut -d' ' -f1)
    if [ "$TRANSFORMER_ENGINE" = no ]; then
        rm -f "$VENV/.transformer_engine"
        "$VENV/bin/python" -m pip uninstall -y transformer_engine transformer_engine_cu13 transformer_engine_torch >"$log" 2>&1
        say "3/4 note: without Transformer Engine, plain PyTorch layers compute every model and layout: slower, more memory, no fp8"
    elif [ "$(cat "$VENV/.transformer_engine" 2>/dev/null)" = "$compiled" ]; then
        say "3/4 Transformer Engine is already compiled for this torch"
    else
        compile_transformer_engine
        printf '%s' "$compiled" >"$VENV/.transformer_engine"
    fi
    say "4/4 megatron_rl itself"
else
    say "1/3 pinned packages (requirements/$FLAVOR.txt, requirements/test.txt, requirements/sinks.txt)"
    pip_install -r "requirements/$FLAVOR.txt" -r requirements/test.txt -r requirements/sinks.txt
    say "2/3 SGLang (requirements/sglang.txt, without its CUDA dependencies)"
    pip_install --no-deps -r requirements/sglang.txt
    bash launch/te_python.sh "$VENV" >"$log" 2>&1 || fail "Transformer Engine's Python code, for tests, could not be downloaded" "read $log"
    say "3/3 megatron_rl itself"
fi
pip_install --no-deps --no-build-isolation -e .
"$VENV/bin/python" -c 'import megatron_rl' || fail "megatron_rl does not import" "remove $VENV and run this again"
# Only the reward `code` needs these packages, so a machine without them gets a note, not an error.
if ! "$VENV/bin/python" -c 'import pyseccomp' 2>/dev/null; then
    say "note: libseccomp is missing, the reward code cannot run programs (Debian, Ubuntu: apt-get install libseccomp2)"
elif ! command -v bwrap >/dev/null 2>&1; then
    say "note: bubblewrap is missing, the reward code runs programs at level filter (Debian, Ubuntu: apt-get install bubblewrap)"
fi
printf '%s' "$wanted" >"$VENV/.megatron_rl"
say "done"
