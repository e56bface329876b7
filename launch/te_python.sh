#!/usr/bin/env bash
# te_python.sh VENV: download Transformer Engine's Python code for tests on CPUs into VENV/share/transformer_engine/VERSION. The code is
# unpacked, not installed: Megatron would find an installed package, which cannot be imported without its compiled part.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
share="$1/share/transformer_engine"
mkdir -p "$share"
grep '^transformer_engine==' requirements/transformer_engine.txt | while read -r line; do
    version=${line#*==}
    version=${version%% *}
    if [ -d "$share/$version" ]; then continue; fi
    # pip accepts hashes only in files, and only one version of a package at a time.
    printf '%s\n' "$line" >"$share/wheel.txt"
    "$1/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --require-hashes \
        -d "$share" -r "$share/wheel.txt"
    rm -rf "$share/partial"
    "$1/bin/python" -m zipfile -e "$share"/transformer_engine-"$version"-*.whl "$share/partial"
    mv "$share/partial" "$share/$version"
    rm "$share"/*.whl "$share/wheel.txt"
done
