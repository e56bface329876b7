#!/usr/bin/env bash
# Create .venv and install megatron_rl with all dependencies, on Linux x86-64. Idempotent: takes seconds if nothing has changed.
# uv installs (requirements/uv.txt; pip, if uv cannot be had) from the registries and folders of pip's settings (pip config, PIP_*).
#   bash launch/setup.sh            # for this machine: GPU pins if nvidia-smi works, otherwise CPU pins
#   FLAVOR=cpu bash launch/setup.sh # choose explicitly (cpu or gpu)
#   PYTHON=3.12 bash launch/setup.sh # 3.11, 3.12 or a program; otherwise 3.12 for GPUs and 3.11 for CPUs, if there is a choice
# In a folder of `megatron-rl examples`, it completes the environment of the installed wheel with what is missing.
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
# Without setup.py these are the files of `megatron-rl examples`, and .venv is the environment of an installed wheel.
if [ ! -f setup.py ] && "$VENV/bin/python" -c 'import importlib.util as u, sys
sys.exit(not all(map(u.find_spec, ("torch", "megatron.core", "sglang"))))' 2>/dev/null; then
    say "the environment of the installed package has all that it needs"
    exit 0
fi
TRANSFORMER_ENGINE=${TRANSFORMER_ENGINE:-yes}
# GPU: 11,000 MiB installed, 5,000 of downloads in a cache, the rest to unpack and compile. CPU: 2,900 installed, 1,000 of downloads.
if [ "$FLAVOR" = gpu ]; then NEEDED_MIB=18000; else NEEDED_MIB=6000; fi
CUDA_TORCH_MIB=10000  # on a CPU with a CUDA build of torch: 6,600 installed, 3,000 of downloads

is_right() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' >/dev/null 2>&1; }
version() { "$1" -c 'import sys; print(*sys.version_info[:2], sep=".")' 2>&1; }
PYTHON=${PYTHON:-}
find_python() { # VERSION...
    local versions="$*" pyenv=${PYENV_ROOT:-$HOME/.pyenv}/versions wanted candidate
    versions=${versions// / or }
    local uv_pythons=${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/uv/python}
    for wanted in "$@"; do
        # A shim of pyenv on PATH may not run, although pyenv has the version: so its versions are tried themselves.
        for candidate in "python$wanted" python3 "$pyenv/$wanted".*/bin/python "$uv_pythons/cpython-$wanted".*/bin/python; do
            if [ "$(version "$candidate")" = "$wanted" ]; then
                PYTHON=$candidate
                return
            fi
        done
    done
    if [ -z "${fetched:-}" ] && command -v uv >/dev/null 2>&1; then
        say "no Python $versions here: uv fetches $1"
        fetched=yes
        if uv python install "$1" >/dev/null 2>&1; then find_python "$1"; return; fi
    fi
    fail "no Python $versions found on PATH, in pyenv or in uv" \
        "install python3.12 with its venv module (or: uv python install 3.12), or set PYTHON=/path/to/python3.12"
}
if is_right "$VENV/bin/python"; then
    has=$(version "$VENV/bin/python")
    asked=${PYTHON:-$has}
    if ! [[ $asked =~ ^3\.[0-9]+$ ]]; then asked=$(version "$PYTHON"); fi
    if [ "$asked" != "$has" ]; then
        fail "$VENV has Python $has, PYTHON=$PYTHON is $asked" "rm -rf $VENV, or unset PYTHON"
    fi
    PYTHON=$VENV/bin/python
elif [[ $PYTHON =~ ^3\.[0-9]+$ ]]; then
    find_python "$PYTHON"
elif [ -z "$PYTHON" ]; then
    if [ "$FLAVOR" = gpu ]; then find_python 3.12 3.11; else find_python 3.11 3.12; fi
fi
is_right "$PYTHON" || fail "$PYTHON is $("$PYTHON" --version 2>&1)" "set PYTHON to a Python 3.11 or 3.12"

# The installation depends only on these inputs: if none has changed, there is nothing to do.
wanted=$({ cat $(ls pyproject.toml setup.py 2>/dev/null) launch/*.pth requirements/*.txt requirements/*.lock; echo "$FLAVOR $TRANSFORMER_ENGINE"; "$PYTHON" --version; pwd; } |
    sha256sum | cut -d' ' -f1)
if [ -x "$VENV/bin/megatron-rl" ] && [ "$(cat "$VENV/.megatron_rl" 2>/dev/null)" = "$wanted" ]; then
    say "$VENV is up to date"
    exit 0
fi

check_room() { # MIB
    free_mib=$(df -Pm . | awk 'NR == 2 {print $4}')
    if [ "$free_mib" -lt "$1" ]; then
        fail "$free_mib MiB free in $(pwd), about $1 needed" "free some space, or clone to a larger disk"
    fi
}
# The packages are already installed: an update needs little space.
if [ -f "$VENV/.megatron_rl" ]; then NEEDED_MIB=1000; fi
if [ "$FLAVOR" = gpu ]; then
    stack=megatron_rl/system/gpu/gpu_stack.py
    [ -f "$stack" ] || stack=$(echo "$VENV"/lib/python3*/site-packages/"$stack")
    "$PYTHON" -I "$stack" "$VENV" "$NEEDED_MIB" || exit 1
else
    check_room "$NEEDED_MIB"
fi

say "installing ($FLAVOR) into $VENV with $("$PYTHON" --version)"
if [ "$(version "$PYTHON")" = 3.11 ]; then
    say "note: Megatron Core 0.16 is the newest for Python 3.11. With Python 3.12 (PYTHON=3.12) it is 0.19"
fi
if [ ! -x "$VENV/bin/python" ]; then
    "$PYTHON" -m venv "$VENV" || fail "$PYTHON cannot create a virtual environment" "install its venv module (Debian: apt-get install python3-venv)"
fi
log="$VENV/install.log"
attempt() {
    if ! "$@" >"$log" 2>&1; then
        grep -v '^WARNING' "$log" | tail -n 15 >&2
        if grep -qiE 'no space left' "$log"; then
            fail "the disk is full" "free some space and run this again"
        elif grep -qiE 'connection|timed out|temporary failure|name resolution|max retries|proxy|error sending request' "$log"; then
            fail "the package registry could not be reached" "check the network, or set PIP_INDEX_URL to a mirror; details: $log"
        elif grep -qiE 'do not match the hashes|hash mismatch' "$log"; then
            fail "a package differs from the locked one" "check the registry or mirror that it came from; details: $log"
        fi
        fail "${failure:-the packages could not be installed}" "${remedy:-read $log}"
    fi
}
pip_install() { attempt "$VENV/bin/python" -m pip install --disable-pip-version-check "$@"; }

UV=$(command -v uv || true)
if [ -z "$UV" ]; then
    "$VENV/bin/python" -m pip install --disable-pip-version-check -r requirements/uv.txt >"$log" 2>&1 || true
    if [ -x "$VENV/bin/uv" ]; then UV=$VENV/bin/uv; else say "note: uv could not be installed, so pip installs: some minutes instead of seconds"; fi
fi
if [ -n "$UV" ]; then
    eval "$("$VENV/bin/python" -m pip config list 2>/dev/null | "$PYTHON" launch/pip_settings.py)"
    export UV_PYTHON_DOWNLOADS=never
    install() { attempt "$UV" pip install --no-progress --python "$VENV/bin/python" "$@"; }
else
    install() { pip_install "$@"; }
fi

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

# torch and torchvision of one kind: PyTorch's CPU builds, from its index if that can be reached, or what pip's settings find.
install_torch() {
    local pins site index=${TORCH_CPU_INDEX-https://download.pytorch.org/whl/cpu}
    mapfile -t pins < <(grep -oE '^(torch|torchvision)==[0-9.]+' requirements/cpu.txt)
    site=$(echo "$VENV"/lib/python3*/site-packages)
    if [ -n "$index" ] && timeout 10 "$PYTHON" -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=3)' "$index/torch/" 2>/dev/null; then
        pins+=(--extra-index-url "$index")
    fi
    install --dry-run --no-deps "${pins[@]}"
    # Both programs end the version of a CPU build with +cpu.
    if grep -qE 'torch[-=]+[0-9.]+ |torch[-=]+[0-9.]+$' "$log"; then
        say "2/3 torch and torchvision: the registries have only CUDA builds of them: 2.6 GB to download, 6.6 GB installed"
        check_room "$CUDA_TORCH_MIB"
    else
        say "2/3 torch and torchvision for CPUs: 200 MB to download"
    fi
    install "${pins[@]}"
    rm -f "$site/torchvision_without_cuda.pth"
    if compgen -G "$site/torch-*+cpu.dist-info" >/dev/null && ! compgen -G "$site/torchvision-*+cpu.dist-info" >/dev/null; then
        say "note: no CPU build of torchvision found: its functions in Python work, its compiled operators (nms, image files) do not"
        cp launch/torchvision_without_cuda.pth "$site"
    fi
}

if [ "$FLAVOR" = gpu ]; then
    say "1/4 locked packages (requirements/gpu.lock): 5 GB to download"
    install --no-deps --require-hashes -r requirements/gpu.lock
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
    if [ -f setup.py ]; then bash launch/te_python.sh "$VENV" >"$VENV/te_python.log" 2>&1 & else true & fi
    te_python=$!
    say "1/3 locked packages (requirements/cpu.lock): 600 MB to download"
    install --no-deps --require-hashes -r requirements/cpu.lock
    install_torch
    wait "$te_python" || fail "Transformer Engine's Python code, for tests, could not be downloaded" "read $VENV/te_python.log"
    if [ -f setup.py ]; then say "3/3 megatron_rl itself"; fi
fi
if [ -f setup.py ]; then install --no-deps --no-build-isolation -e .; fi
"$VENV/bin/python" -c 'import megatron_rl' || fail "megatron_rl does not import" "remove $VENV and run this again"
# Only the reward `code` needs these packages, so a machine without them gets a note, not an error.
if ! "$VENV/bin/python" -c 'import pyseccomp' 2>/dev/null; then
    say "note: libseccomp is missing, the reward code cannot run programs (Debian, Ubuntu: apt-get install libseccomp2)"
elif ! "$VENV/bin/python" -c 'from megatron_rl.graders.sandbox.sandbox import Sandbox; Sandbox(level="namespaces").start()' 2>/dev/null; then
    say "note: no namespaces here, the reward code runs programs at level filter (docs/rewards.md; Debian, Ubuntu: apt-get install bubblewrap)"
fi
printf '%s' "$wanted" >"$VENV/.megatron_rl"
say "done"
