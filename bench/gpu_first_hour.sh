#!/usr/bin/env bash
# The calls of a first session on a machine with one GPU, bare and lent for minutes:
#
#   bench/gpu_first_hour.sh [--quick] CALL OUT [MEGATRAIN]
#
# CALL: facts       of the machine alone, seconds
#       1           facts, large allocations, a plan and a run of packed rows, tests of tests/gpu, a profile of 7B at T = 4k
#       2           7B at T = 64k and at 4k, beside the reference
#       3           7B beside plain PyTorch with everything on the GPU, variants of ours, a profile of 7B at T = 64k
#       4           facts of another machine, 14B, with updates that are streamed through the GPU and without
#       5           one row of 32k tokens, 20B with a drive, compute-sanitizer over two steps of a tiny model
#       20b_nvme    20B with a drive; 32 layers where the drive has not 50 GB free
#       long_128k   one row of 32k tokens, then one of 128k
#       long_512k   one row of 512k
#       any other   parts of gpu.py, with commas between them
# OUT:  folder to bring back. Every call adds to its files, eight at most over all calls: gpu.jsonl (rows), machine.txt,
#       tests.txt, log.txt (what ran, how it ended, and what it printed), timelines and profiles (*.json.gz).
# MEGATRAIN: a checkout of the reference; without it that side is left out.
#
# A call takes less than 9 minutes, whatever hangs: each of its runs has a limit of its own, and none lasts longer than
# what is left. A run that fails is noted, and the next one starts. Exit status: 0; 1 if a run failed; 2: called wrongly.
#
# --quick: everything at a tiny size, to try the very commands before: on the GPU that torch finds, such as the null GPU
#          (docs/null_gpu.md), else on the device in software. Environment:
#   PYTHON   interpreter; default: python3
#   WHEELS   folder of wheels that the machine lacks (bench/README.md names them); default: temp/wheels
#   RAM      our RAM tier, e.g. 110GiB, where the machine shows less than it has; default: what is free
#   TMPDIR   on the drive to use
#   CALL_S   seconds of a call, less than 9 minutes by default
set -uo pipefail # not -e: what fails is noted, and the call goes on

usage() { sed -n '4,18p' "${BASH_SOURCE[0]}" >&2; exit 2; }

is_quick=
if [[ ${1-} == --quick ]]; then is_quick=1; shift; fi
[[ $# -eq 2 || $# -eq 3 ]] || usage
call=$1 out=$(mkdir -p "$2" && cd "$2" && pwd) || { echo "OUT: cannot make the folder $2" >&2; exit 2; }
megatrain=()
if [[ -n ${3-} ]]; then
  [[ -d $3 ]] || { echo "MEGATRAIN: there is no folder $3" >&2; exit 2; }
  megatrain=(--megatrain "$(cd "$3" && pwd)")
fi
wheels=$(realpath -m "${WHEELS:-$(dirname "${BASH_SOURCE[0]}")/../temp/wheels}")
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

call_s=${CALL_S:-525} # a call's end, in seconds since its begin; what is killed may take another 10
py=${PYTHON:-python3}
scratch=$(mktemp -d) || exit 2
trap 'rm -rf "$scratch"' EXIT
# Rates and compiled code: later calls on the same machine find them. Figures of another machine are not taken.
cache=${TMPDIR:-/tmp}/gpu_first_hour
mkdir -p "$cache"

export CUBLAS_WORKSPACE_CONFIG=:4096:8 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export MEGATRAIN_TIER_DEBUG=1 PYTORCH_ALLOC_CONF=expandable_segments:True # a traceback beside each message
export TORCHINDUCTOR_CACHE_DIR=$cache/inductor TRITON_CACHE_DIR=$cache/triton PATH=$PATH:/usr/local/cuda/bin
export PYTHONPATH=${PYTHONPATH-}

python=("$py") bench=(--device cuda --scratch "$scratch" --out "$out/gpu.jsonl" ${RAM:+--ram "$RAM"})
# All cases of what no device in software shows, slow ones as well: 160 in 185 s.
tests=(-n 8 -m gpu -W "ignore:Synchronization debug mode" -k "not sanitizer and not shape_of_the_bench and not killed and
  not every_size and not host_kernel")
for name in cuda_link cuda_order page_locking conformance steps kernels_of_layers kept_graphs parity triton_elementwise \
  whole_runs ranked_steps; do
  tests+=("tests/gpu/test_$name.py")
done
# Only the plugins that are needed: where warnings are errors, one of others ends pytest before its first test. What
# pyproject.toml says to plugins that are not there is passed over: so no --strict-config, which is in its addopts.
pytest=(env PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 "$py" -m pytest -o addopts=--import-mode=importlib
  -W "ignore::pytest.PytestConfigWarning" -p xdist -p timeout -p no:cacheprovider -v --tb=short)
patience=1 # limits of runs are so many times as long
one_step=(compute-sanitizer --tool memcheck --error-exitcode 9 "$py" tests/gpu/one_step.py)
first_step=("$py" tests/gpu/one_step.py)
if [[ $is_quick ]]; then
  bench+=(--quick)
  patience=5 # on a processor that has other things to do
  if "$py" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    tests=(-m gpu tests/gpu/test_cuda_link.py)
    [[ -z ${NULL_COPY_BYTES-} ]] || tests+=(-p null_gpu.judge) # numbers are none there
  else
    python=("$py" tests/fakes/on_virtual_gpu.py)
    tests=(tests/gpu/test_page_locking.py)
    first_step+=(--virtual)
  fi
  one_step=("${first_step[@]}")
fi

failed=()
note() { echo "[$call, $SECONDS s] $*" | tee -a "$out/log.txt"; }

left() { # SECONDS: what a run may take, at most what is left of the call
  local left=$((call_s - SECONDS))
  echo $((left < patience * $1 ? left : patience * $1))
}

run() { # NAME SECONDS FILE COMMAND...: what it prints goes to FILE in OUT at once, not through a pipe that could hang
  local name=$1 limit file=$out/$3 start=$SECONDS code=0
  limit=$(left "$2")
  shift 3
  if ((limit < 5)); then
    note "$name: no time left"
    failed+=("$name")
    return
  fi
  echo "== $call: $name" >>"$file"
  timeout --signal="${signal:-TERM}" --kill-after=10 "$limit" "$@" >>"$file" 2>&1 </dev/null || code=$?
  note "$name: exit status $code after $((SECONDS - start)) s of at most $limit"
  ((code == 0)) || failed+=("$name")
}

gpu() { # SECONDS PARTS [OPTIONS]: gpu.py ends by itself, with all of its rows, before it would be killed
  local seconds limit=$1 parts=$2
  seconds=$(($(left "$1") - 15))
  shift 2
  compgen -G "$cache/megatrain-tier/*" >/dev/null || parts=rates,$parts # seconds of a step are predicted from them
  run "gpu.py $parts $*" "$limit" log.txt "${python[@]}" bench/gpu.py "${bench[@]}" --cache "$cache" \
    --parts "$parts" --minutes "$(awk "BEGIN { print $seconds / 60 }")" "$@"
}

find_packages() { # wheels on PYTHONPATH; an older numpy where numba refuses the one that is there
  local unpack=("$py" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target)
  if compgen -G "$wheels/*.whl" >/dev/null; then
    run "unpack wheels" 30 log.txt "${unpack[@]}" "$scratch/site" "$wheels"/*.whl
    PYTHONPATH=$scratch/site${PYTHONPATH:+:$PYTHONPATH}
  fi
  if ! timeout 60 "$py" -c "import numba" >>"$out/log.txt" 2>&1; then
    note "numba cannot be imported: $(tail -n 1 "$out/log.txt")"
    if compgen -G "$wheels/numpy/*.whl" >/dev/null; then
      run "unpack numpy" 60 log.txt "${unpack[@]}" "$scratch/numpy" "$wheels"/numpy/*.whl
      PYTHONPATH=$scratch/numpy${PYTHONPATH:+:$PYTHONPATH}
      run "import numba, with the other numpy" 60 log.txt "$py" -c "import numba"
    fi
  fi
}

facts() {
  echo "== $call: $(date -u +%FT%TZ), $(git rev-parse --short=12 HEAD 2>/dev/null || echo "outside git")"
  nvidia-smi 2>&1
  nvidia-smi --query-gpu=name,memory.total,driver_version,pcie.link.gen.max,pcie.link.width.max --format=csv 2>&1
  uname -a
  lscpu | grep -E "Model name|^CPU\(s\)|NUMA|L3"
  free -g
  grep -i huge /proc/meminfo
  grep -H . /sys/kernel/mm/transparent_hugepage/{enabled,defrag} /proc/sys/vm/overcommit_memory
  ulimit -l
  df -h "$scratch" "$out"
  "$py" - <<'EOF'
import sys
from importlib.metadata import PackageNotFoundError, version

print("python", sys.version)
names = "torch triton transformers numpy numba llvmlite pydantic pydantic_core typing_extensions greenlet xxhash psutil"
for name in f"{names} safetensors zarr liger-kernel kvikio-cu13 deepspeed pytest pytest-xdist pytest-timeout".split():
    try:
        print(name, version(name))
    except PackageNotFoundError:
        print(name, "is not installed")
import torch

print("CUDA", torch.version.cuda, "cuDNN", torch.backends.cudnn.version(), "available:", torch.cuda.is_available())
EOF
}

probe() { # nearly all of the GPU in one piece, and how long it takes to page-lock RAM
  "$py" - "$([[ $is_quick ]] && echo 1 || echo 1024)" <<'EOF'
import sys
import time

import torch

scale = int(sys.argv[1])
if not torch.cuda.is_available():
    sys.exit("torch finds no GPU" if scale > 1 else 0)  # the device in software is in no driver
start = time.perf_counter()
room = torch.empty(130 * scale << 20, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print(f"{room.nbytes / 1e9:.1f} GB on the GPU in {time.perf_counter() - start:.2f} s")
del room
host = torch.zeros(8 * scale << 20, dtype=torch.uint8)
start = time.perf_counter()
status = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0))
seconds = time.perf_counter() - start
print(f"page-locked {host.nbytes / 1e9:.1f} GB at {seconds / (host.nbytes / 1e9):.3f} s/GB, status {status}")
sys.exit(status)
EOF
}

smoke() { # plans trace layers on fake tensors of the device: the first thing that can go wrong there
  mkdir -p "$scratch/smoke"
  "$py" - "$scratch/smoke" <<'EOF' || return
import sys
from pathlib import Path

sys.path[:0] = [".", "tests"]
from fakes.gpu_run import gpu_config_text
from oracles.tiered_run import write_tiny_model

folder = Path(sys.argv[1])
(folder / "run.toml").write_text(gpu_config_text(folder, write_tiny_model(folder / "model"), nvme=0))
EOF
  "${python[@]}" -m cli plan "$scratch/smoke/run.toml" --json >"$scratch/smoke/plan.json" || return
  cat "$scratch/smoke/plan.json"
  grep -q '"workspace_is_exact": true' "$scratch/smoke/plan.json" || { echo "the plan is not exact"; return 1; }
  "${python[@]}" -m cli run "$scratch/smoke/run.toml" --max-steps 3
}

find_packages
# Functions run under `timeout` in a shell of their own.
export -f facts probe smoke
export call out py scratch is_quick python_words="${python[*]}"
case $call in
  facts | 1 | 4) run "machine facts" 30 machine.txt bash -c facts ;;
esac
profile=("${python[@]}" bench/gpu_profile.py "${bench[@]}" --top 40)
case $call in
  facts) ;;
  1)
    run "probe" 30 log.txt bash -c probe
    run "a step of a tiny model" 60 log.txt "${first_step[@]}"
    run "plan and run packed rows" 75 log.txt bash -c 'read -ra python <<<"$python_words"; smoke'
    # SIGINT: pytest then tells of what failed so far
    signal=INT run "tests" 185 tests.txt "${pytest[@]}" "${tests[@]}"
    run "profile of 7b_4k" 110 log.txt "${profile[@]}" --trace "$out/profile_4k.json.gz"
    ;;
  2) gpu 450 7b_64k,7b_4k "${megatrain[@]}" --traces "$out" ;;
  3)
    gpu 365 plain,7b_64k+by_micro_batch,7b_64k+compile,7b_4k+any_kernel
    run "profile of 7b_64k" 120 log.txt "${profile[@]}" --part 7b_64k --trace "$out/profile_64k.json.gz"
    ;;
  4) gpu 420 14b,14b+no_streaming ;;
  5)
    gpu 140 long_32k
    gpu 200 20b_nvme --layers 32
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 run "compute-sanitizer" 90 tests.txt "${one_step[@]}"
    ;;
  20b_nvme)
    free_gb=$(($(df --output=avail -k "$scratch" | tail -n 1) / 976563))
    layers=()
    ((free_gb >= 50)) || layers=(--layers 32)
    note "the drive has $free_gb GB free"
    gpu 500 20b_nvme "${layers[@]}"
    ;;
  long_128k) gpu 500 long_32k,long_128k ;;
  *) gpu 500 "$call" "${megatrain[@]}" ;;
esac
free -g >>"$out/machine.txt" # some machines show more RAM once it was used
note "${#failed[@]} runs failed${failed[*]:+: $(printf '%s; ' "${failed[@]}")}"
((${#failed[@]} == 0))
