"""Bytes per parameter that a step moves between RAM and the drive, by gradient dtype, clipping and RAM size.

    python bench/step_bytes.py --json
    python bench/step_bytes.py --quick        # a minute, a small model

All cases compute in bf16, with an fp32 master and AdamW. The first case clips gradients by the exact global norm and
holds them in fp32 (the default). The second case holds them in bf16. The third case neither clips nor holds gradients.
The fourth case is like the third, but with the weights in RAM. Each case runs with three sizes of the RAM tier: the
minimum, twice the minimum, and enough for everything.

Claims, with the minimum: in the second case, a step reads 16 bytes per parameter from the drive and writes 14. In the
third case, it reads 14 and writes 12. In the fourth case, it reads 10 and writes 10. Moved bytes equal planned bytes.
Losses are bit-identical for all sizes of RAM.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # `import megatrain` would set this too late, after torch
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.common import QUICKSTART, Report, step_shape
from bench.models import write_llama
from bench.sides import Ours, batches, run_config
from megatrain.config.schema import RunConfig
from megatrain.optim.threads import default_num_threads
from megatrain.plan.planner import plan_run
from megatrain.plan.shortfall import DoesNotFitError
from megatrain.training.resolve import resolve

LR = 1e-4
KINDS = ("weights", "gradients", "optimizer", "activations")
#: Relative tolerance of the targets. It is needed because activations and gathered embedding rows also move.
TOLERANCE = 0.05


@dataclass(frozen=True)
class Case:
    """Precision, clipping and placement to measure. ``target`` has the bytes read and written per parameter."""

    name: str
    target: tuple[float, float] | None = None
    precision: Mapping[str, Any] = field(default_factory=dict)
    max_grad_norm: float = 1.0
    in_ram: tuple[str, ...] = ()

    @property
    def placement(self) -> dict[str, list[str]]:
        """Config table ``[placement]`` that keeps only `in_ram` in RAM."""
        return {kind: ["ram" if kind in self.in_ram else "nvme"] for kind in KINDS}


CASES = (
    Case("clipped"),
    Case("clipped_bf16_gradients", (16, 14), {"grad_dtype": "bfloat16"}),
    Case("unclipped", (14, 12), max_grad_norm=0.0),
    Case("unclipped_weights_in_ram", (10, 10), max_grad_norm=0.0, in_ram=("weights",)),
)


def main() -> int:
    """Run the bench. Return 1 if a row fails."""
    arguments = parse_arguments()
    torch.set_num_threads(default_num_threads())
    shape = arguments.tokens
    report = Report("step_bytes", as_json=arguments.json, tokens_per_step=shape[0] * shape[1] * shape[2])
    hidden, layers, vocabulary = (128, 4, 1024) if arguments.quick else (768, 12, 8192)
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        model = write_llama(Path(scratch, "model"), hidden=hidden, layers=layers, vocabulary=vocabulary)
        for case in (case for case in CASES if arguments.only in (None, case.name)):
            losses = {}
            for size, config in configs(case, partial(make_config, model, shape, Path(scratch))):
                losses[size] = measure(f"{case.name}.{size}", case if size == "least" else None, config, report)
            same = len(set(losses.values())) == 1
            report.row(f"{case.name}.losses_are_the_same", int(same), "1", target=1, ok=same)
    return 0 if report.all_ok else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--quick", action="store_true", help="a model of 1 M parameters instead of 97.5 M")
    parser.add_argument("--tokens", type=step_shape, default=(1, 1, 64), help="micro-batches x rows x tokens of a step")
    parser.add_argument("--only", choices=[case.name for case in CASES], help="one case")
    parser.add_argument("--scratch", type=Path, help="folder on the drive; default: the temporary folder")
    return parser.parse_args()


def make_config(
    model: Path, shape: tuple[int, int, int], scratch: Path, case: Case, ram: str, *, is_placed: bool
) -> RunConfig:
    """Return a case's config with the RAM size ``ram``. With ``is_placed``, all kinds but `in_ram` are on the drive."""
    return run_config(
        model,
        QUICKSTART / "loomings.txt",
        shape,
        scratch,
        precision={"compute_dtype": "bfloat16", **case.precision},
        optimizer={"learning_rate": LR, "max_grad_norm": case.max_grad_norm},
        tiers={"ram": {"size": ram}, "nvme": [{"path": str(Path(tempfile.mkdtemp(dir=scratch), "drive"))}]},
        **({"placement": case.placement} if is_placed else {}),
    )


def configs(case: Case, make: Any) -> Iterator[tuple[str, RunConfig]]:
    """Yield the config of a case for each size of the RAM tier, together with the size's name."""
    least = 1 << 20
    try:
        plan_run(resolve(make(case, f"{least}B", is_placed=True)))
    except DoesNotFitError as error:
        least = error.need_bytes
    yield "least", make(case, f"{least}B", is_placed=True)
    yield "twice", make(case, f"{2 * least}B", is_placed=False)
    yield "all", make(case, "8GiB", is_placed=False)


def measure(name: str, targets: Case | None, config: RunConfig, report: Report) -> float:
    """Run two steps, print rows about the moved bytes, and return the second loss."""
    with Ours(config, 2) as side:
        for micro_batches in islice(batches(config), 2):
            loss = side.step(micro_batches, LR).loss
        side.finish()
        planned, moved, number = side.planned_bytes(), side.moved_bytes(), side.plan.graph.num_parameters
        report.row(f"{name}.ram_tier", side.plan.budgets["ram"], "bytes")
        for index, (link, way) in enumerate((("nvme->ram", "read"), ("ram->nvme", "written"))):
            value = side.plan.traffic.get(link, 0) / number
            target = targets.target[index] if targets is not None and targets.target is not None else None
            ok = None if target is None else value <= target + TOLERANCE * target
            report.row(f"{name}.{way}", value, "bytes/parameter", target=target, ok=ok)
            if link in planned:
                same = moved[link] == planned[link]
                report.row(f"{name}.{way}.moved", moved[link], "bytes", target=planned[link], ok=same)
    return loss


if __name__ == "__main__":
    sys.exit(main())
