#!/usr/bin/env bash
# The first fifteen minutes on a bare machine with one H200 or H100, in two commands:
#
#   bench/gpu_fifteen.sh [--quick] CALL OUT [MEGATRAIN]
#
# CALL: a           500 s: two steps of a tiny model, 7B at T = 64k and 4k, 7B next to the reference, tests, 7B at T = 16k
#       b           240 s, on an H200: 14B with state in RAM, one row of 32k tokens
#       tests       all tests of tests/gpu that need a real GPU
#       sanitizer   compute-sanitizer over two steps of a tiny model
#       probe       0.9 of the free GPU memory in one piece, and the seconds that it takes to pin RAM
#       any other   parts of gpu.py, with commas between them, such as plain,7b_64k+compile,7b_4k+any_kernel
# OUT:  folder to bring back, after a call at most 8 files of 15 MB in all: gpu.jsonl (rows), machine.txt, tests.txt,
#       log.txt (each command, its exit status and its output), traces (*.json.gz).
# MEGATRAIN: a checkout of the reference; without it that side is left out.
#
# The lines of a call are in order of their value, so a call that is cut at any point leaves the best results. Each has a
# limit, and no line runs longer than the call. A line that fails is logged, and the next one starts. There is one stop
# rule: if the tiny model fails, it runs again with CUDA_LAUNCH_BLOCKING=1, and the call ends. With less than 100 GB of
# GPU memory call a leaves out the reference, and call b does nothing.
# Exit status: 0; 1 if a line failed; 2 for wrong arguments.
#
# --quick: all at a tiny size, to try the same commands before: on the GPU that torch finds, such as the null GPU
#          (docs/null_gpu.md), else on the device in software. Environment:
#   PYTHON   interpreter; default: python3
#   WHEELS   folder of wheels that the machine lacks (bench/README.md names them); default: temp/wheels
#   RAM      our RAM tier; default: 110GiB, as a virtual machine may show less memory than it gives
#   TMPDIR   on the drive to use
#   CALL_S   seconds of a call; default: 490 for a, 230 for b, 525 for all others
set -uo pipefail # not -e: what fails is noted, and the call goes on

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

# The end of a call, in seconds since its start. A line that is killed may take another 10.
case $call in a) call_s=${CALL_S:-490} ;; b) call_s=${CALL_S:-230} ;; *) call_s=${CALL_S:-525} ;; esac
py=${PYTHON:-python3}
scratch=$(mktemp -d) || exit 2
trap 'rm -rf "$scratch"' EXIT
# Rates and compiled code, which later calls on the same machine find.
cache=${TMPDIR:-/tmp}/gpu_fifteen
mkdir -p "$cache"

export CUBLAS_WORKSPACE_CONFIG=:4096:8 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export MEGATRAIN_TIER_DEBUG=1 PYTORCH_ALLOC_CONF=expandable_segments:True # the log gets a traceback with each message
export TORCHINDUCTOR_CACHE_DIR=$cache/inductor TRITON_CACHE_DIR=$cache/triton PATH=$PATH:/usr/local/cuda/bin
export PYTHONPATH=${PYTHONPATH-}

python=("$py") bench=(--device cuda --scratch "$scratch" --out "$out/gpu.jsonl") traces=(--traces "$out")
one_step=("$py" tests/gpu/one_step.py)
# Only the plugins that are needed: an import warning of another one would end pytest before its first test.
pytest=(env PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 "$py" -m pytest -o addopts=--import-mode=importlib
  -W "ignore::pytest.PytestConfigWarning" -W "ignore:Synchronization debug mode" -p xdist -p timeout -p no:cacheprovider
  -v --tb=short -m gpu)
# Bits, waits and the order of streams, which no device in software shows.
short_tests=(-n 8 -k "(not hugging_face or llama or qwen2) and not killed and not every_size and not host_kernel")
for name in cuda_link cuda_order page_locking device_kernels steps kept_graphs parity kernels_of_layers; do
  short_tests+=("tests/gpu/test_$name.py")
done
all_tests=(-n 8 -k "not sanitizer and not shape_of_the_bench" tests/gpu)
sanitizer=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 "${one_step[@]}")
patience=1 # limits of lines are multiplied by it
gpu_gb=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | awk '{ print int($1 / 954); exit }')
[[ $gpu_gb ]] || gpu_gb=$("$py" -c 'import torch; print(torch.cuda.get_device_properties(0).total_memory // 10**9)' 2>/dev/null)
if [[ $is_quick ]]; then
  bench+=(--quick)
  patience=5 # on a processor that has other work
  if [[ $gpu_gb ]]; then
    short_tests=(tests/gpu/test_cuda_link.py)
    [[ -z ${NULL_COPY_BYTES-} ]] || short_tests+=(-p null_gpu.judge) # kernels do nothing there, so no number is right
  else
    python=("$py" tests/fakes/on_virtual_gpu.py)
    short_tests=(-m "not gpu" tests/gpu/test_page_locking.py) # those on a device in software
    one_step+=(--virtual)
    gpu_gb=141
  fi
  all_tests=("${short_tests[@]}") sanitizer=("${one_step[@]}")
else
  bench+=(--ram "${RAM:-110GiB}")
fi
has_room=$((${gpu_gb:-0} >= 100)) # for 7B with all of its state

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
  seconds=$(($(left "$1") - 10))
  shift 2
  run "gpu.py $parts $*" "$limit" log.txt "${python[@]}" bench/gpu.py "${bench[@]}" --cache "$cache" \
    --parts "$parts" --minutes "$(awk "BEGIN { print $seconds / 60 }")" "$@"
  find "$out" -name "*.json" -exec gzip -f {} +
}

find_packages() { # wheels on PYTHONPATH; an older numpy where numba refuses the one that is there
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
    sys.exit("torch finds no GPU" if scale > 1 else 0)  # the device in software is in no driver
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
# Functions run under `timeout` in a shell of their own.
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
      # SIGINT: pytest then reports the failures so far
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
while (($(du -sk "$out" | cut -f 1) > 15000)); do # the largest trace goes first
  largest=$(find "$out" -name "*.json.gz" -printf "%s %p\n" | sort -n | tail -n 1 | cut -d " " -f 2-)
  [[ $largest ]] || break
  note "removed $largest, as all files have more than 15 MB"
  rm "$largest"
done
free -g >>"$out/machine.txt" # some machines show more RAM once it was used
note "${#failed[@]} lines failed${failed[*]:+: $(printf '%s; ' "${failed[@]}")}"
((${#failed[@]} == 0))
