"""Cost and memory savings of offload_activations: training steps with saved tensors in memory or on a drive.

    python bench/activations.py --json
    python bench/activations.py --quick              # a minute, a small model
    python bench/activations.py --tokens 1x1x2048 --ram 256MiB

Each side runs in a separate process. It loads the same Llama, runs one unmeasured step, and then measured forwards and
backwards without recompute. ``held`` is how much a forward increases resident memory, once all queued writes are on the
drive. It is measured after the timed steps. Until a write is complete, its bytes stay in the RAM tier, whose capacity
limits them. ``peak`` is the maximum resident memory during the measured steps, minus the memory before the first step.
It includes gradients and the store's RAM tier. Both sides run with glibc's MALLOC_MMAP_THRESHOLD_ at 64 KiB. Otherwise,
freed memory would stay in the heap and hide the effect.

Claims: loss and gradients are bit-identical on both sides. Offloading makes a forward hold less memory, by at least 0.8
of the bytes that it offloads. No tensor stays in memory because a tier is full, and no tier exceeds its capacity.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # set before importing torch; `import megatrain` sets it too late
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import AutoModelForCausalLM

from bench.common import Report, step_shape
from bench.models import write_llama
from megatrain import offload_activations
from megatrain.optim.threads import default_num_threads
from tiered import NvmeTier, RamTier, TieredStore
from tiered.units import KiB, parse_size

PLAIN, STORED = "plain", "stored"
MIN_BYTES = 64 * KiB


def main() -> int:
    """Run the bench, or one side of it. Return 1 if a row fails, except for timing rows."""
    arguments = parse_arguments()
    torch.set_num_threads(default_num_threads())
    if arguments.side:
        print(json.dumps(measure(arguments)))
        return 0
    shape = arguments.tokens
    report = Report("activations", as_json=arguments.json, tokens_per_step=shape[0] * shape[1] * shape[2])
    hidden, layers, vocabulary = (256, 4, 1024) if arguments.quick else (1024, 8, 8192)
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        model = write_llama(Path(scratch, "model"), hidden=hidden, layers=layers, vocabulary=vocabulary)
        report.row("model", f"llama {hidden}x{layers}, vocabulary {vocabulary}", "")
        report.row("shape", "x".join(map(str, shape)), "micro-batches x rows x tokens")
        report.row("ram_tier", arguments.ram, "")
        sides = {side: run_side(arguments, side, model) for side in (PLAIN, STORED)}
        compare(report, sides, shape[0])
    return 0 if report.all_ok else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--quick", action="store_true", help="a model of 3.7 M parameters")
    parser.add_argument(
        "--tokens", type=step_shape, default=(1, 1, 1024), help="micro-batches x rows x tokens of a step"
    )
    parser.add_argument("--steps", type=int, default=5, help="counted steps of each side")
    parser.add_argument("--ram", default="32MiB", help="RAM tier that activations pass through")
    parser.add_argument("--scratch", help="folder on the drive to use; default: the system's")
    parser.add_argument("--side", choices=(PLAIN, STORED), help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    return parser.parse_args()


def run_side(arguments: argparse.Namespace, side: str, model: Path) -> dict[str, Any]:
    """Measure one side in a separate process, and return its measurements."""
    options = ["--steps", str(arguments.steps), "--ram", arguments.ram, "--scratch", str(model.parent)]
    options += ["--tokens", "x".join(map(str, arguments.tokens)), "--side", side, "--model", str(model)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIN_BYTES)}
    command = [sys.executable, __file__, *options]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one side's steps in this process, and return the measurements."""
    model = AutoModelForCausalLM.from_pretrained(arguments.model)
    num_micro_batches, rows, length = arguments.tokens
    torch.manual_seed(3)
    batches = torch.randint(0, model.config.vocab_size, (num_micro_batches, rows, length))
    with ExitStack() as stack:
        store: TieredStore | None = None
        context: Any = nullcontext()
        if arguments.side == STORED:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.scratch))
            drive = NvmeTier([folder], parse_size("64GiB"))
            store = stack.enter_context(TieredStore([RamTier(parse_size(arguments.ram)), drive]))
            context = offload_activations(store, model=model, min_bytes=MIN_BYTES)
        before_bytes = resident_bytes()
        step(model, batches, context)
        reset_peak()
        before = None if store is None else (context.stats(), store.stats())
        seconds = []
        for _ in range(arguments.steps):
            started_s = time.perf_counter()
            loss = step(model, batches, context)
            seconds.append(time.perf_counter() - started_s)
        found = {"seconds": seconds, "loss": loss, "gradients": hash_of(model)}
        found["peak_bytes"] = peak_bytes() - before_bytes
        if store is not None and before is not None:
            found |= moved(context, store, before, arguments.steps)
        held = [held_bytes(model, batches[-1], context, store) for _ in range(arguments.steps)]
        found["held_bytes"] = statistics.median(held)
    return found


def step(model: torch.nn.Module, batches: torch.Tensor, context: Any) -> float:
    """Run one forward and backward per micro-batch, and return the sum of the losses."""
    model.zero_grad(set_to_none=True)
    total = 0.0
    for batch in batches:
        with context:
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        total += loss.item()
        loss.backward()
    return total


def held_bytes(model: torch.nn.Module, batch: torch.Tensor, context: Any, store: TieredStore | None) -> int:
    """Return how many bytes a forward adds to resident memory. With a store, they include the bytes in its RAM tier."""
    wait_for_writes(store)
    before_bytes = resident_bytes()
    with context:
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    wait_for_writes(store)
    grown_bytes = resident_bytes() - before_bytes
    del loss  # `loss` has kept the graph alive until here.
    return grown_bytes


def wait_for_writes(store: TieredStore | None) -> None:
    """Wait until all queued writes are on the drive. Without a store, do nothing."""
    if store is not None:
        store.wait_idle()


def moved(context: Any, store: TieredStore, before: Any, num_steps: int) -> dict[str, Any]:
    """Return the mean bytes moved and seconds waited per step.

    The result also contains the bytes for which the store had no room, and the largest excess over a tier's capacity.
    """
    earlier, tiers_earlier = before
    now, tiers = context.stats(), store.stats() - tiers_earlier
    names = ("offloaded_bytes", "restored_bytes", "deduplicated_bytes", "pack_wait_s", "unpack_wait_s")
    found = {name: (getattr(now, name) - getattr(earlier, name)) / num_steps for name in names}
    found |= {f"link.{name}": link.num_bytes / num_steps for name, link in tiers.links.items()}
    found["no_room_bytes"] = now.no_room_bytes
    found["over_capacity_bytes"] = max(tier.high_water_bytes - tier.capacity_bytes for tier in tiers.tiers.values())
    return found


def compare(report: Report, sides: dict[str, dict[str, Any]], num_micro_batches: int) -> None:
    """Print the measurements, and whether the claims hold."""
    plain, stored = sides[PLAIN], sides[STORED]
    for name, side in sides.items():
        report.row(f"{name}.step", statistics.median(side["seconds"]), "s")
        report.row(f"{name}.steps", side["seconds"], "s")
        report.row(f"{name}.held", side["held_bytes"], "bytes")
        report.row(f"{name}.peak", side["peak_bytes"], "bytes")
    for name, unit in (("offloaded_bytes", "bytes"), ("restored_bytes", "bytes"), ("deduplicated_bytes", "bytes")):
        report.row(f"{STORED}.{name}", stored[name], f"{unit}/step")
    for name in [name for name in stored if name.startswith("link.")]:
        report.row(f"{STORED}.{name}", stored[name], "bytes/step")
    report.row(f"{STORED}.pack_wait", stored["pack_wait_s"], "s/step")
    report.row(f"{STORED}.unpack_wait", stored["unpack_wait_s"], "s/step")
    report.row("loss", stored["loss"], "", target=plain["loss"], ok=stored["loss"] == plain["loss"])
    differ = int(stored["gradients"] != plain["gradients"])
    report.row("gradients_that_differ", differ, "", target=0, ok=differ == 0)
    least = int(0.8 * stored["offloaded_bytes"] / num_micro_batches)
    freed = plain["held_bytes"] - stored["held_bytes"]
    report.row("freed", freed, "bytes", target=least, ok=freed >= least)
    report.row("no_room", stored["no_room_bytes"], "bytes", target=0, ok=stored["no_room_bytes"] == 0)
    over = stored["over_capacity_bytes"]
    report.row("over_capacity", max(0, over), "bytes", target=0, ok=over <= 0)
    ratio = statistics.median(stored["seconds"]) / statistics.median(plain["seconds"])
    report.row("slowdown", ratio, "x")


def hash_of(model: torch.nn.Module) -> str:
    """Return a digest of all gradients."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        assert parameter.grad is not None
        digest.update(parameter.grad.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def resident_bytes() -> int:
    """Return the current resident bytes of the process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def reset_peak() -> None:
    """Reset the kernel's record of peak memory."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_bytes() -> int:
    """Return the peak resident bytes of the process since ``reset_peak``."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * KiB
    raise RuntimeError("the kernel reports no VmHWM")


if __name__ == "__main__":
    raise SystemExit(main())
