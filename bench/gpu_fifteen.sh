#!/usr/bin/env bash
# The first fifteen minutes on a bare machine with one H200 or H100, in two commands:
#
#   bench/gpu_fifteen.sh [--quick] CALL OUT [MEGATRAIN]
#
# CALL: a           500 s: two steps of a tiny model, 7B at T = 64k and 4k, 7B next to the reference, tests, 7B at T = 16k
#       b           240 s, on an H200: 14B with state in RAM, one row of 32k tokens
#       tests       all tests of tests/gpu that need a real GPU
#       sanitizer   compute-sanitizer over two steps of a tiny model
#       probe       allocates 0.9 of the free GPU memory in one piece, and measures the seconds to pin RAM
#       any other   comma-separated parts of gpu.py, such as plain,7b_64k+compile,7b_4k+any_kernel
# OUT:  folder of the results. A call writes at most 8 files with a total of 15 MB: gpu.jsonl (rows), machine.txt,
#       tests.txt, log.txt (each command, its exit status and its output), traces (*.json.gz).
# MEGATRAIN: a checkout of the reference; without it, the reference is not measured.
#
# A call runs its measurements in order of their value, so an interrupted call leaves the most valuable results. Each
# measurement has a time limit and ends before the call. If one fails, this is logged, and the next one starts. Only if
# the tiny model fails, it runs again with CUDA_LAUNCH_BLOCKING=1, and the call ends. With less than 100 GB of GPU
# memory, call a omits the reference, and call b does nothing.
# Exit status: 0 on success, 1 if a measurement failed, 2 for wrong arguments.
#
# --quick: runs the same commands with tiny models, to try them in advance. It uses the GPU that torch finds, such as
#          the null GPU (docs/null_gpu.md); if there is none, it uses the software device. Environment:
#   PYTHON   interpreter; default: python3
#   WHEELS   folder of wheels that the machine lacks (bench/README.md lists them); default: temp/wheels
#   RAM      size of the project's RAM tier; default: 110GiB. A virtual machine may show less memory than it has
#   TMPDIR   folder on the drive to use
#   CALL_S   seconds of a call; default: 490 for a, 230 for b, 525 for all others
set -uo pipefail # without -e, because a failure is logged and the call continues

usage() { sed -n '4,15p' "${BASH_SOURCE[0]}" >&2; exit 2; }

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

# The end of a call, in seconds since its start. A killed command may take 10 s longer.
case $call in a) call_s=${CALL_S:-490} ;; b) call_s=${CALL_S:-230} ;; *) call_s=${CALL_S:-525} ;; esac
py=${PYTHON:-python3}
scratch=$(mktemp -d) || exit 2
trap 'rm -rf "$scratch"' EXIT
# This folder keeps rates and compiled code for later calls on the same machine.
cache=${TMPDIR:-/tmp}/gpu_fifteen
mkdir -p "$cache"

export CUBLAS_WORKSPACE_CONFIG=:4096:8 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export MEGATRAIN_TIER_DEBUG=1 PYTORCH_ALLOC_CONF=expandable_segments:True # DEBUG adds a traceback to each message
export TORCHINDUCTOR_CACHE_DIR=$cache/inductor TRITON_CACHE_DIR=$cache/triton PATH=$PATH:/usr/local/cuda/bin
export PYTHONPATH=${PYTHONPATH-}

python=("$py") bench=(--device cuda --scratch "$scratch" --out "$out/gpu.jsonl") traces=(--traces "$out")
one_step=("$py" tests/gpu/one_step.py)
# Load only the required plugins: an import warning of another plugin would end pytest before its first test.
pytest=(env PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 "$py" -m pytest -o addopts=--import-mode=importlib
  -W "ignore::pytest.PytestConfigWarning" -W "ignore:Synchronization debug mode" -p xdist -p timeout -p no:cacheprovider
  -v --tb=short -m gpu)
# These tests check results bit by bit, host waits and stream order, which a software device cannot show.
short_tests=(-n 8 -k "(not hugging_face or llama or qwen2) and not killed and not every_size and not host_kernel")
for name in cuda_link cuda_order page_locking device_kernels steps kept_graphs parity kernels_of_layers; do
  short_tests+=("tests/gpu/test_$name.py")
done
all_tests=(-n 8 -k "not sanitizer and not shape_of_the_bench" tests/gpu)
sanitizer=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 "${one_step[@]}")
patience=1 # all time limits are multiplied by this factor
gpu_gb=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | awk '{ print int($1 / 954); exit }')
[[ $gpu_gb ]] || gpu_gb=$("$py" -c 'import torch; print(torch.cuda.get_device_properties(0).total_memory // 10**9)' 2>/dev/null)
if [[ $is_quick ]]; then
  bench+=(--quick)
  patience=5 # a test machine may be busy
  if [[ $gpu_gb ]]; then
    short_tests=(tests/gpu/test_cuda_link.py)
    [[ -z ${NULL_COPY_BYTES-} ]] || short_tests+=(-p null_gpu.judge) # on the null GPU, kernels do nothing, so numbers are wrong
  else
    python=("$py" tests/fakes/on_virtual_gpu.py)
    short_tests=(-m "not gpu" tests/gpu/test_page_locking.py) # the cases for a software device
    one_step+=(--virtual)
    gpu_gb=141
  fi
  all_tests=("${short_tests[@]}") sanitizer=("${one_step[@]}")
else
  bench+=(--ram "${RAM:-110GiB}")
fi
has_room=$((${gpu_gb:-0} >= 100)) # whether 7B fits with its whole state

failed=()
note() { echo "[$call, $SECONDS s] $*" | tee -a "$out/log.txt"; }

left() { # SECONDS: prints the time limit of a command, at most the remaining seconds of the call
  local left=$((call_s - SECONDS))
  echo $((left < patience * $1 ? left : patience * $1))
}

run() { # NAME SECONDS FILE COMMAND...: writes the output directly to FILE in OUT, because a pipe could hang
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

gpu() { # SECONDS PARTS [OPTIONS]: gpu.py writes all its rows and ends before its limit
  local seconds limit=$1 parts=$2
  seconds=$(($(left "$1") - 10))
  shift 2
  run "gpu.py $parts $*" "$limit" log.txt "${python[@]}" bench/gpu.py "${bench[@]}" --cache "$cache" \
    --parts "$parts" --minutes "$(awk "BEGIN { print $seconds / 60 }")" "$@"
  find "$out" -name "*.json" -exec gzip -f {} +
}

find_packages() { # puts the wheels on PYTHONPATH, with an older numpy if numba refuses the installed one
  local unpack=("$py" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target)
  if compgen -G "$wheels/*.whl" >/dev/null; then
    run "unpack wheels" 15 log.txt "${unpack[@]}" "$scratch/site" "$wheels"/*.whl
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

probe() { # SCALE
  "$py" - "$1" <<'EOF'
import sys
import time

import torch

scale = int(sys.argv[1])
if not torch.cuda.is_available():
    sys.exit("torch finds no GPU" if scale > 1 else 0)  # no driver knows the software device
start = time.perf_counter()
free, _ = torch.cuda.mem_get_info()
room = torch.empty(9 * free // 10, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print(f"{room.nbytes / 1e9:.1f} GB on the GPU in {time.perf_counter() - start:.2f} s")
del room
host = torch.zeros(8 * scale << 20, dtype=torch.uint8)
start = time.perf_counter()
status = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0))
seconds = time.perf_counter() - start
print(f"pinned {host.nbytes / 1e9:.1f} GB at {seconds / (host.nbytes / 1e9):.3f} s/GB, status {status}")
sys.exit(status)
EOF
}

find_packages
# `timeout` runs these functions in a separate shell, which needs their definitions.
export -f facts probe
export call out py scratch
timeout 30 bash -c facts >>"$out/machine.txt" 2>&1 </dev/null &
case $call in
  a)
    failed_before=${#failed[@]}
    run "two steps of a tiny model" 75 log.txt "${one_step[@]}"
    if ((${#failed[@]} > failed_before)); then
      CUDA_LAUNCH_BLOCKING=1 run "two steps of a tiny model, each launch awaited" 75 log.txt "${one_step[@]}"
    else
      gpu $((has_room ? 105 : 170)) 7b_64k --steps 2 --profile "${traces[@]}"
      gpu $((has_room ? 65 : 130)) 7b_4k --profile "${traces[@]}"
      ((!has_room)) || gpu 145 7b_64k_equal --steps 1 "${megatrain[@]}"
      # After SIGINT, pytest reports the failures so far.
      signal=INT run "tests" 80 tests.txt "${pytest[@]}" "${short_tests[@]}"
      ((call_s - SECONDS < patience * 40)) || gpu 90 7b_16k --steps 2
    fi
    ;;
  b)
    if ((has_room)); then
      gpu 160 14b --steps 1 "${traces[@]}"
      ((call_s - SECONDS < patience * 40)) || gpu 50 long_32k --steps 1
    else
      note "call b needs a GPU of 100 GB or more, this one has ${gpu_gb:-no} GB"
    fi
    ;;
  facts) ;;
  probe) run "probe" 60 log.txt bash -c "probe $([[ $is_quick ]] && echo 1 || echo 1024)" ;;
  tests) signal=INT run "tests" 500 tests.txt "${pytest[@]}" "${all_tests[@]}" ;;
  sanitizer) run "compute-sanitizer" 300 tests.txt "${sanitizer[@]}" ;;
  *) gpu 500 "$call" "${megatrain[@]}" ;;
esac
wait
while (($(du -sk "$out" | cut -f 1) > 15000)); do # remove the largest trace first
  largest=$(find "$out" -name "*.json.gz" -printf "%s %p\n" | sort -n | tail -n 1 | cut -d " " -f 2-)
  [[ $largest ]] || break
  note "removed $largest, as all files have more than 15 MB"
  rm "$largest"
done
free -g >>"$out/machine.txt" # some machines show more RAM after it has been used
note "${#failed[@]} lines failed${failed[*]:+: $(printf '%s; ' "${failed[@]}")}"
((${#failed[@]} == 0))
