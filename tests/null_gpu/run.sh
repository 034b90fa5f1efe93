#!/usr/bin/env bash
# The GPU path on a machine without a GPU: `make null-gpu` (docs/null_gpu.md).
#
#   tests/null_gpu/run.sh [short | long | kernels | order | steps [PARTS...] | ranks | calls [CALLS...] | tests [ARGS...]]
#
# short (the default): kernels, order, probe, steps and ranks, less than 20 minutes on two cores. long: calls and tests.
# NULL_GPU: folder of the null GPU, which is built if it does not exist; default: temp/null_gpu. PYTHON: an interpreter
# that has the other packages. Exit status: 1 if a check failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
null=$(realpath -m "${NULL_GPU:-temp/null_gpu}")
export PYTHON=${PYTHON:-python3}
[[ -f $null/env.sh ]] || "$PYTHON" tests/null_gpu/build.py "$null" || exit 2
# shellcheck source=/dev/null
. "$null/env.sh"

tests() { # failed assertions about computed numbers are ignored
  local what=("$@")
  ((${#what[@]})) || what=(tests/gpu)
  "$PYTHON" -m pytest -p null_gpu.judge -m gpu -q --timeout 1200 -W "ignore:Synchronization debug mode" "${what[@]}"
}

kernels() { # machine code of all Triton kernels for eight architectures
  "$PYTHON" -m pytest -q -m slow tests/megatrain/test_gpu_architectures.py
}

order() { # the stream sanitizer reports nothing, and reports errors in the control run
  "$PYTHON" tests/null_gpu/stream_order.py && "$PYTHON" tests/null_gpu/stream_order.py --control
}

probe() { # on a GPU with 80 GiB
  local out status=0
  out=$(mktemp -d)
  NULL_GPU_BYTES=85520809984 bash bench/gpu_fifteen.sh --quick probe "$out" || status=1
  grep " GB on the GPU" "$out/log.txt" || status=1
  rm -rf "$out"
  return "$status"
}

steps() { "$PYTHON" tests/null_gpu/steps.py "$@"; }

ranks() { # two ranks on separate GPUs; then two ranks on the same GPU, which is refused
  local folder each status=0
  folder=$(mktemp -d)
  "$PYTHON" - "$folder" <<'EOF' || return
import sys
from pathlib import Path

from fakes.gpu_run import gpu_config_text
from oracles.tiered_run import write_tiny_model

folder = Path(sys.argv[1])
(folder / "run.toml").write_text(gpu_config_text(folder, write_tiny_model(folder / "model"), nvme=0))
EOF
  local run=("$PYTHON" -m cli run "$folder/run.toml" --max-steps 2 --processes 2 --set training.gradient_accumulation_steps=4)
  # Kernels write nothing here. New memory is zero; reused memory could hold a negative "sum of squares" of a norm.
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1
  NULL_GPU_COUNT=2 NULL_NCCL_LOG=$folder/nccl "${run[@]}" || status=1
  for each in 0 1; do echo "rank $each:" "$(sort "$folder/nccl.$each" | uniq -c | xargs)"; done
  cmp <(grep -v UniqueId "$folder/nccl.0") "$folder/nccl.1" || status=1 # only rank 0 creates the id of the group
  if NULL_GPU_COUNT=2 CUDA_VISIBLE_DEVICES=1 "${run[@]}" 2>"$folder/refused"; then status=1; fi
  grep "the same GPU" "$folder/refused" || { cat "$folder/refused"; status=1; }
  unset PYTORCH_NO_CUDA_MEMORY_CACHING
  rm -rf "$folder"
  return "$status"
}

calls() { # the calls of gpu_fifteen.sh, at a tiny size, on an H200 and an H100
  local status=0 out each gpu_bytes
  out=$(mktemp -d)
  (($#)) || set -- a b
  for gpu_bytes in 150754820096 85520809984; do
    for each in "$@"; do # ignore the exit status, which depends on losses
      NULL_GPU_BYTES=$gpu_bytes CALL_S=1800 bash bench/gpu_fifteen.sh --quick "$each" "$out" tests/fakes/stand_in_megatrain
    done
  done
  "$PYTHON" - "$out" <<'EOF' || status=1
import sys
from pathlib import Path

from null_gpu.judge import find_call_failures

faults = find_call_failures(Path(sys.argv[1]))
print(*faults, sep="\n")
sys.exit(bool(faults))
EOF
  ((status == 0)) || tail -n 100 "$out/log.txt"
  rm -rf "$out"
  return "$status"
}

status=0
case ${1-short} in
  short) for each in kernels order probe steps ranks; do "$each" || status=1; done ;;
  long) for each in calls tests; do "$each" || status=1; done ;;
  kernels | order | probe | tests | steps | ranks | calls) "$@" || status=1 ;;
  *) sed -n '2,8p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac
exit "$status"
