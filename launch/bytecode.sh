# For scripts that source it: the many processes of a run compile Python once, even if PYTHONDONTWRITEBYTECODE keeps bytecode out of
# folders of sources. Without it each process that imports torch, transformers and SGLang compiles them again, for seconds.
if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then
    unset PYTHONDONTWRITEBYTECODE
    export PYTHONPYCACHEPREFIX=${PYTHONPYCACHEPREFIX:-$(realpath -m "${VENV:-.venv}")/bytecode}
fi
