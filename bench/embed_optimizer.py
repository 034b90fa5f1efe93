"""TieredAdamW in an ordinary training loop with all state in RAM, compared with AdamW and offloading optimizers.

    python bench/embed_optimizer.py --json
    python bench/embed_optimizer.py --quick           # a few seconds, 1M parameters
    python bench/embed_optimizer.py --sizes 100M --threads 2

Every side has a copy of one Llama model, and the sides alternate on the same tokens. Two times are measured: the
optimizer's step, including any norm and clipping, and the whole step. `tiered` keeps only the state in the store.
`offload` keeps the whole module in the store, and updates it in the next forward.

Claim: with and without clipping, a step of `tiered` takes at most as long as torch's fused AdamW. If a CUDA device
exists, all sides use it, and the optimizers of torchao and bitsandbytes also run if they are installed. On the CPU, a
row shows the error message of each of these libraries instead. There, `by_parameter` represents the host's part of
torchao's step: torch's fused AdamW with one optimizer per parameter, without the copies to and from the GPU.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
import torch
from torch import Tensor, nn

from bench.common import Report, step_shape
from bench.models import llama_config
from megatrain import TieredAdamW, offload, open_store

#: (hidden, layers, vocabulary) of a Llama.
SHAPES = {"1M": (128, 4, 1024), "10M": (256, 8, 8192), "100M": (768, 12, 8192)}
SETTINGS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MAX_NORM = 0.5
TARGET_RATIO, TARGET_LOSS = 1.0, 1e-5
#: Bytes per parameter that a side needs: weight, gradient, two moments, and working memory for a forward and a step.
SIDE_BYTES = 20


@dataclass
class Side:
    """One optimizer with a separate copy of the model.

    Attributes:
        name: Name in the printed rows.
        clips: Whether the optimizer clips the gradients itself.
        step_s, whole_s, losses: Optimizer seconds, total seconds and loss, for each step so far.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    clips: bool
    step_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def step(self, ids: Tensor, max_norm: float) -> None:
        """Run and time one training step."""
        if self.clips:
            self.optimizer.max_grad_norm = max_norm  # type: ignore[attr-defined]
        start_s = _now_s(ids.device)
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        before_s = _now_s(ids.device)
        if max_norm and not self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self.optimizer.step()
        after_s = _now_s(ids.device)
        self.optimizer.zero_grad()
        self.whole_s.append(_now_s(ids.device) - start_s)
        self.step_s.append(after_s - before_s)
        self.losses.append(loss.item())

    def clear_times(self) -> None:
        """Clear the measurements, but keep the training state."""
        for figures in (self.step_s, self.whole_s, self.losses):
            figures.clear()


def main() -> int:
    """Run the bench. Return 1 if a row fails, except for timing rows."""
    arguments = parse_arguments()
    num_micro_batches, rows, length = step_shape(arguments.tokens)
    assert num_micro_batches == 1, "one micro-batch: the optimizer does not see accumulation"
    report = Report("embed_optimizer", as_json=arguments.json, tokens_per_step=rows * length)
    for size in arguments.sizes:
        for num_threads in arguments.threads:
            print_size(report, size, num_threads, arguments, (rows, length))
    return 0 if report.all_ok else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--quick", action="store_true", help="1M parameters, 3 rounds")
    parser.add_argument("--sizes", type=lambda text: text.split(","), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--threads", type=lambda text: [int(part) for part in text.split(",")], help="e.g. 1,2")
    parser.add_argument("--tokens", help="of a step: 1 x rows x tokens of a row, e.g. 1x2x128")
    parser.add_argument("--rounds", type=int, help="measured steps of each side, after two warm-up steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scratch", type=Path, help="accepted by every bench; nothing is written here")
    arguments = parser.parse_args()
    arguments.sizes = arguments.sizes or (["1M"] if arguments.quick else ["10M", "100M"])
    arguments.threads = arguments.threads or [torch.get_num_threads()]
    arguments.tokens = arguments.tokens or ("1x1x32" if arguments.quick else "1x2x128")
    arguments.rounds = arguments.rounds or (3 if arguments.quick else 7)
    return arguments


def print_size(
    report: Report, size: str, num_threads: int, arguments: argparse.Namespace, shape: tuple[int, int]
) -> None:
    """Measure one size with one number of threads and print its rows."""
    torch.set_num_threads(num_threads)
    model = build_model(size, arguments.device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    prefix = f"{size}.{num_threads}t"
    report.row(f"{prefix}.parameters", num_parameters, "parameters")
    need = 4 * SIDE_BYTES * num_parameters
    if need > psutil.virtual_memory().available:
        report.row(f"{prefix}.skipped", need, "bytes needed")
        return
    peers = dict(find_peers(arguments.device))
    for name, found in peers.items():
        if isinstance(found, str):
            report.row(f"{prefix}.{name}.step", None, f"skipped: {found}")
    ids = torch.randint(0, SHAPES[size][2], shape, generator=torch.Generator().manual_seed(0)).to(arguments.device)
    with open_sides(model, num_parameters, num_threads, peers) as sides:
        for clipping, max_norm in (("free", 0.0), ("clipped", MAX_NORM)):
            measure(sides, ids, max_norm, arguments.rounds)
            print_sides(report, f"{prefix}.{clipping}", sides)


def build_model(size: str, device: str) -> nn.Module:
    """Return a Llama of the given size with random fp32 weights."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    config = llama_config(*SHAPES[size], use_cache=False)
    model: nn.Module = LlamaForCausalLM(config).to(device)
    return model


def find_peers(device: str) -> Iterator[tuple[str, Callable[[Any], torch.optim.Optimizer] | str]]:
    """Yield each peer's name, with a constructor for its optimizer or the reason why it cannot run."""
    for name, make in (("torchao", _torchao), ("bitsandbytes", _bitsandbytes)):
        if find_spec(name) is None:
            yield name, f"{name} is not installed"
        elif device == "cpu":
            yield name, f"{name} {version(name)}: {_error_message(make)}"
        else:
            yield name, make
    if device == "cpu":
        yield "by_parameter", ByParameter


def _error_message(make: Callable[[Any], torch.optim.Optimizer]) -> str:
    """Try a library's optimizer without a GPU. Return the first line of its error, or a note if there is no error."""
    try:
        make([nn.Parameter(torch.zeros(1 << 16))])
    except (AssertionError, RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return "can be made without a GPU, and is not measured there"


class ByParameter(torch.optim.Optimizer):
    """torch's fused AdamW with one optimizer per parameter, like the host's part of torchao's CPUOffloadOptimizer."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(list(parameters), {})
        held = [parameter for group in self.param_groups for parameter in group["params"]]
        self._each = [torch.optim.AdamW([parameter], fused=True, **SETTINGS) for parameter in held]

    def step(self, closure: Any = None) -> None:
        """Update all parameters in order."""
        assert closure is None
        for optimizer in self._each:
            optimizer.step()


def _torchao(parameters: Any) -> torch.optim.Optimizer:
    from torchao.optim import CPUOffloadOptimizer

    optimizer: torch.optim.Optimizer = CPUOffloadOptimizer(parameters, torch.optim.AdamW, fused=True, **SETTINGS)
    return optimizer


def _bitsandbytes(parameters: Any) -> torch.optim.Optimizer:
    from bitsandbytes.optim import PagedAdamW32bit

    optimizer: torch.optim.Optimizer = PagedAdamW32bit(parameters, **SETTINGS)
    return optimizer


@contextmanager
def open_sides(
    model: nn.Module, num_parameters: int, num_threads: int, peers: dict[str, Callable[[Any], Any] | str]
) -> Iterator[list[Side]]:
    """Yield all sides, each with a copy of the model. Our sides keep all their state in RAM."""
    device = next(model.parameters()).device
    with open_store(ram=2 * SIDE_BYTES * num_parameters + (64 << 20)) as store:
        plain, tiered = copy.deepcopy(model), copy.deepcopy(model)
        fused = torch.optim.AdamW(plain.parameters(), fused=True, **SETTINGS)
        sides = [
            Side("torch_fused", plain, fused, clips=False),
            Side("tiered", tiered, _our_optimizer(tiered, store, num_threads, "optimizer"), clips=True),
        ]
        for name, make in peers.items():
            if not isinstance(make, str):
                theirs = copy.deepcopy(model)
                sides.append(Side(name, theirs, make(theirs.parameters()), clips=False))
        if device.type == "cpu":
            whole = offload(model, store)
            sides.append(Side("offload", whole, _our_optimizer(whole, store, num_threads, "unused"), clips=True))
        yield sides


def _our_optimizer(model: nn.Module, store: Any, num_threads: int, name: str) -> TieredAdamW:
    optimizer = TieredAdamW(model.parameters(), store=store, name=name, **SETTINGS)
    optimizer.threads.num_threads = num_threads
    return optimizer


def measure(sides: Sequence[Side], ids: Tensor, max_norm: float, num_rounds: int) -> None:
    """Run steps of all sides in turn. The first two steps of each side are a warm-up."""
    for number in range(2 + num_rounds):
        for side in sides:
            if number == 2:
                side.clear_times()
            side.step(ids, max_norm)


def print_sides(report: Report, prefix: str, sides: Sequence[Side]) -> None:
    """Print times, ratios to torch's fused AdamW, and whether all sides computed the same losses."""
    reference = sides[0]
    for side in sides:
        for what, seconds in (("step", side.step_s), ("whole", side.whole_s)):
            report.row(f"{prefix}.{side.name}.{what}", statistics.median(seconds), "s")
            report.row(f"{prefix}.{side.name}.{what}.each", [round(each, 6) for each in seconds], "s")
    for side in sides[1:]:
        target = TARGET_RATIO if side.name == "tiered" else None
        # `offload` defers updates to the next forward, so only its "whole" time includes them.
        kinds = ("whole",) if side.name == "offload" else ("step", "whole")
        for what in kinds:
            mine, theirs = getattr(side, f"{what}_s"), getattr(reference, f"{what}_s")
            ratios = [my / their for my, their in zip(mine, theirs, strict=True)]
            ratio = statistics.median(ratios)
            ok = None if target is None else ratio <= target
            name = f"{prefix}.ratio.{what}.{side.name}/torch_fused"
            report.row(name, ratio, "x", target=target, ok=ok, timing=True)
            report.row(f"{name}.each", [round(each, 4) for each in ratios], "x")
        pairs = zip(side.losses, reference.losses, strict=True)
        difference = max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)
        is_close = difference <= TARGET_LOSS
        report.row(f"{prefix}.loss.{side.name}", difference, "relative", target=TARGET_LOSS, ok=is_close)


def _now_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    sys.exit(main())
