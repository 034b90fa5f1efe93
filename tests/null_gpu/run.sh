#!/usr/bin/env bash
# The GPU path on a machine without a GPU: `make null-gpu` (docs/null_gpu.md).
#
#   tests/null_gpu/run.sh [tests [ARGS...] | steps [PARTS...] | ranks | calls [CALLS...]]...
#
# Without words: all of it. NULL_GPU: folder of the null GPU, made where it is missing; default: temp/null_gpu.
# PYTHON: an interpreter that has the other packages. Exit status: 1 if anything raised, waited or took what it should not.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
null=$(realpath -m "${NULL_GPU:-temp/null_gpu}")
export PYTHON=${PYTHON:-python3}
[[ -f $null/env.sh ]] || "$PYTHON" tests/null_gpu/build.py "$null" || exit 2
# shellcheck source=/dev/null
. "$null/env.sh"

tests() { # what raises, waits, or asserts something else than a number
  local what=("$@")
  ((${#what[@]})) || what=(tests/gpu)
  "$PYTHON" -m pytest -p null_gpu.judge -m gpu -q --timeout 1200 -W "ignore:Synchronization debug mode" "${what[@]}"
}

steps() { "$PYTHON" tests/null_gpu/steps.py "$@"; }

ranks() { # two ranks, each on a GPU of its own; then two that see the same one, which is refused
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
  NULL_GPU_COUNT=2 NULL_NCCL_LOG=$folder/nccl "${run[@]}" || status=1
  for each in 0 1; do echo "rank $each:" "$(sort "$folder/nccl.$each" | uniq -c | xargs)"; done
  cmp <(grep -v UniqueId "$folder/nccl.0") "$folder/nccl.1" || status=1 # rank 0 makes the name of the group
  if NULL_GPU_COUNT=2 CUDA_VISIBLE_DEVICES=1 "${run[@]}" 2>"$folder/refused"; then status=1; fi
  grep "the same GPU" "$folder/refused" || { cat "$folder/refused"; status=1; }
  rm -rf "$folder"
  return "$status"
}

calls() { # those of a first session, at a tiny size
  local status=0 out each
  out=$(mktemp -d)
  for each in "${@:-1 2 3 4 5}"; do
    for each in $each; do CALL_S=1800 bash bench/gpu_first_hour.sh --quick "$each" "$out"; done # losses are none here
  done
  "$PYTHON" - "$out" <<'EOF' || status=1
import sys
from pathlib import Path

from null_gpu.judge import faults_of_calls

faults = faults_of_calls(Path(sys.argv[1]))
print(*faults, sep="\n")
sys.exit(bool(faults))
EOF
  ((status == 0)) || tail -n 100 "$out/log.txt"
  rm -rf "$out"
  return "$status"
}

status=0
case ${1-all} in
  all) for each in ranks steps calls tests; do "$each" || status=1; done ;;
  tests | steps | ranks | calls) "$@" || status=1 ;;
  *) sed -n '2,8p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac
exit "$status"
