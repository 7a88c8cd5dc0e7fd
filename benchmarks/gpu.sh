#!/usr/bin/env bash
# Measure everything that needs a GPU in one call of at most nine minutes, the most important parts first. Each part has its
# own time limit and writes its figures to $OUT (or benchmarks/results) as it runs. A part that fails does not stop the
# others; the last lines name it. `python -m benchmarks report --results $OUT` makes tables and plots from the figures.
#
#     OUT=/tmp/figures benchmarks/gpu.sh      on a machine with a GPU
#     DRY=1 OUT=/tmp/dry benchmarks/gpu.sh    on any: tiny shapes on the CPU, GPU kernels interpreted
#     PEERS=/path/to/python benchmarks/gpu.sh    with kvpress, which that interpreter has
#     PARTS="decode kernels" benchmarks/gpu.sh    only these
#     SECONDS_IN_ALL=300 benchmarks/gpu.sh    less time
set -u
out=$(realpath -m "${OUT:-$(dirname "$0")/results}")
cd "$(dirname "$0")/.."
mkdir -p "$out"
PYTHON=${PYTHON:-python3}
limit=${SECONDS_IN_ALL:-530}
dry=${DRY:-}
started=$SECONDS
failed=()
export PYTHONUNBUFFERED=1
if [[ -n $dry ]]; then
    export JAX_PLATFORMS=cpu
else
    export JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_MEM_FRACTION=0.95
fi

# part NAME SECONDS COMMAND...: the command under its time, or what is left of all of it; its output goes to NAME.log.
part() {
    local name=$1 seconds=$2 left=$((limit - (SECONDS - started))) before=$SECONDS
    shift 2
    [[ -n ${PARTS:-} && " $PARTS " != *" $name "* ]] && return
    if ((left < 5)); then
        echo "== $name: no time left"
        failed+=("$name (no time left)")
        return
    fi
    ((seconds > left)) && seconds=$left
    timeout --kill-after=5 "$seconds" "$@" </dev/null >"$out/$name.log" 2>&1
    local status=$?
    echo "== $name: exit $status after $((SECONDS - before)) s of $seconds"
    tr '\r' '\n' <"$out/$name.log" | grep -v '%|' | tail -n 40
    ((status == 0)) || failed+=("$name (exit $status)")
}

# bench NAME SECONDS BENCHMARK FLAGS...: figures go to NAME.json; in a dry run all sizes are tiny.
bench() {
    local name=$1 seconds=$2 benchmark=$3
    shift 3
    local flags=("$@")
    if [[ -n $dry ]]; then
        flags+=(--tiny)
        [[ $benchmark == kernels ]] && flags+=(--implementations reference,pallas_gpu --interpret)
        seconds=$limit
    fi
    part "$name" "$seconds" "$PYTHON" -m benchmarks "$benchmark" "${flags[@]}" --json "$out/$name.json"
}

[[ -z $dry ]] && nvidia-smi --query-gpu=name,memory.total,clocks.sm,driver_version --format=csv

mosaic=tests/kernels_pallas/test_cache_attention_mosaic.py # in processes of their own: an error may end a device's context
part tests 110 "$PYTHON" -m pytest -q -x -m gpu tests/kernels_pallas --ignore $mosaic -p no:cacheprovider
bench decode 90 decode --shapes llama-3.1-8b --budgets 8192 --prompts 8192,1048576 --full 8192,131072
bench kernels 90 kernels --shapes llama-3.1-8b --batches 8 --operations caote_topk,cache_attention,paged_attention
bench prefill 100 prefill --shapes llama-3.1-8b --budgets 8192 --prompts 8192,1048576 --full 131072 --feed 131072
bench kernels-select 60 kernels --shapes llama-3.1-8b --batches 1 --operations select_attention,mse_logits
if [[ -n ${PEERS:-} && -z $dry ]]; then # an interpreter that has kvpress
    part peers 80 "$PYTHON" -m benchmarks peers --environment "$PEERS" --device gpu --dtype bfloat16 \
        --shape llama-3.2-1b --prompt 8192 --budget 2048 --json "$out/peers-gpu.json"
fi
bench decode-1b 60 decode --shapes llama-3.2-1b --batches 1,32 --budgets 1024,16384 --prompts 16384,1048576 --full 16384
bench prefill-1b 60 prefill --shapes llama-3.2-1b --budgets 8192 --prompts 8192 --full none --feed 8192,1048576
bench kernels-more 60 kernels --shapes llama-3.2-1b,llama-3.2-3b,qwen3-8b --batches 8 --operations caote_topk,cache_attention
part tests-mosaic 60 "$PYTHON" -m pytest -q -m gpu $mosaic -p no:cacheprovider
bench kernels-mosaic 60 kernels --shapes llama-3.1-8b --batches 8 --operations cache_attention \
    --implementations reference,pallas_gpu,pallas_mosaic_gpu

echo "== all in $((SECONDS - started)) s; figures in $out"
if ((${#failed[@]})); then
    echo "== failed: ${failed[*]}"
    exit 1
fi
echo "== all parts ran"
