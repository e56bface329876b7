#!/usr/bin/env bash
# Make .venv and install megatron_rl with everything it needs. Idempotent: takes seconds when nothing changed.
#   bash launch/setup.sh            # for this machine: GPU pins where nvidia-smi answers, else CPU pins
#   FLAVOR=cpu bash launch/setup.sh # say it yourself (cpu or gpu)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: error: %s\n' "$1" >&2; printf 'setup: remedy: %s\n' "$2" >&2; exit 1; }

FLAVOR=${FLAVOR:-$(command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)}
[ -f "requirements/$FLAVOR.txt" ] || fail "FLAVOR=$FLAVOR is unknown" "use FLAVOR=cpu or FLAVOR=gpu"
VENV=${VENV:-.venv}
NEEDED_MIB=6000

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

# What is installed is a function of these; when none of them changed, there is nothing to do.
wanted=$({ cat setup.py requirements/*.txt; echo "$FLAVOR"; "$PYTHON" --version; pwd; } | sha256sum | cut -d' ' -f1)
if [ -x "$VENV/bin/megatron-rl" ] && [ "$(cat "$VENV/.megatron_rl" 2>/dev/null)" = "$wanted" ]; then
    say "$VENV is up to date"
    exit 0
fi

free_mib=$(df -Pm . | awk 'NR == 2 {print $4}')
if [ ! -f "$VENV/.megatron_rl" ] && [ "$free_mib" -lt "$NEEDED_MIB" ]; then
    fail "$free_mib MiB free in $(pwd), about $NEEDED_MIB needed" "free some space, or clone to a larger disk"
fi

say "installing ($FLAVOR) into $VENV with $("$PYTHON" --version); the first time this takes some minutes"
if [ ! -x "$VENV/bin/python" ]; then
    "$PYTHON" -m venv "$VENV" || fail "$PYTHON cannot make a virtual environment" "install its venv module (Debian: apt-get install python3-venv)"
fi
log="$VENV/install.log"
pip_install() {
    if ! "$VENV/bin/python" -m pip install --disable-pip-version-check "$@" >"$log" 2>&1; then
        grep -v '^WARNING' "$log" | tail -n 15 >&2
        if grep -qiE 'no space left' "$log"; then
            fail "the disk is full" "free some space and run this again"
        elif grep -qiE 'connection|timed out|temporary failure|name resolution|max retries|proxy' "$log"; then
            fail "the package registry could not be reached" "check the network, or set PIP_INDEX_URL to a mirror; details: $log"
        fi
        fail "pip could not install the packages" "read $log"
    fi
}
say "1/3 pinned packages (requirements/$FLAVOR.txt, requirements/test.txt)"
pip_install -r "requirements/$FLAVOR.txt" -r requirements/test.txt
say "2/3 SGLang (requirements/sglang.txt, without its CUDA dependencies on CPU)"
if [ "$FLAVOR" = cpu ]; then pip_install --no-deps -r requirements/sglang.txt; fi
say "3/3 megatron_rl itself"
pip_install --no-deps --no-build-isolation -e .
"$VENV/bin/python" -c 'import megatron_rl' || fail "megatron_rl does not import" "remove $VENV and run this again"
# Only the reward `code` needs these, so that a machine without them is told and not refused.
if ! "$VENV/bin/python" -c 'import pyseccomp' 2>/dev/null; then
    say "note: libseccomp is missing, the reward code cannot run programs (Debian, Ubuntu: apt-get install libseccomp2)"
elif ! command -v bwrap >/dev/null 2>&1; then
    say "note: bubblewrap is missing, the reward code runs programs at level filter (Debian, Ubuntu: apt-get install bubblewrap)"
fi
printf '%s' "$wanted" >"$VENV/.megatron_rl"
say "done"
