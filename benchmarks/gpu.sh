#!/usr/bin/env bash
# Install kvjax into .venv and measure everything that needs a GPU, in less than ten minutes: kernels against the reference,
# decode and prefill of the 8B shape beside their floors and beside kvpress (where python3 has PyTorch). It ends with one
# JSON file and one page in runs/accelerator. A second call runs only what is not done.
#
#     benchmarks/gpu.sh                           all parts
#     benchmarks/gpu.sh --model path/to/folder    RULER on that model, too
#     benchmarks/gpu.sh --tiny                    smallest shapes, to try all parts; JAX_PLATFORMS=cpu runs them on a CPU
#     KVJAX_PYTHON=python3 benchmarks/gpu.sh      with an interpreter that has everything: nothing is installed
#     python -m benchmarks accelerator --help     the other flags
set -euo pipefail
here=$PWD given=
if [[ -n ${KVJAX_PYTHON:-} ]]; then
    given=$(command -v "$KVJAX_PYTHON") || { echo "KVJAX_PYTHON is $KVJAX_PYTHON, which is no program here." >&2; exit 2; }
    [[ $given == /* ]] || given=$here/$given
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD python=${given:-$PWD/.venv/bin/python} extra=${EXTRA:-cuda}
if [[ -n $given ]]; then
    echo "Taking $given as it is"
elif ! "$python" -m pip --version >/dev/null 2>&1; then # none yet, or half of one
    found=$(.ci/find-python)
    echo "Making .venv with $found"
    "$found" -m venv --clear .venv
fi
extras=$extra,eval
[[ ${JAX_PLATFORMS:-} == cpu ]] && extras=eval
asked="$extras for $("$python" -V), $(cksum <pyproject.toml) $(cksum <constraints.txt)"
if [[ -z $given && $(cat .venv/.accelerator 2>/dev/null) != "$asked" ]]; then
    echo "Installing kvjax[$extras] and pytest into .venv (a few minutes the first time)"
    "$python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$extras]" pytest hypothesis
    echo "$asked" >.venv/.accelerator
fi
cd "$here" # paths on the command line are the caller's
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m benchmarks accelerator --seconds $((580 - SECONDS)) "$@"
