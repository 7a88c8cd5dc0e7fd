#!/usr/bin/env bash
# The same as benchmarks/gpu.sh on a TPU VM.
EXTRA=tpu exec "$(dirname "${BASH_SOURCE[0]}")/gpu.sh" "$@"
