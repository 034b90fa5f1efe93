"""Job for the process of one side in `gpu.py`, and the initial weights and tokens that all sides share."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.gpu_sides.cases import Part, merged, write_shape
from megatrain.converters.spec import build_graph
from megatrain.optim.threads import default_num_threads

SEED = 42
#: Size of the pool of random numbers for all weights. It is prime, so that rows of a matrix do not repeat.
_NUM_RANDOM = 4_194_301


@dataclass(frozen=True)
class Job:
    """Task and settings of the process that runs one side.

    Attributes:
        side: Name of the side, as in `cases`.
        model: Folder with ``config.json``.
        rows, length, micro_rows: Shape of a step; see `Part`.
        num_steps: Number of measured steps.
        has_warm_up: Whether an unmeasured step runs first.
        budget_s: Time limit of the process, including startup. The side skips steps that would exceed it.
        device: "cuda" or "cpu".
        dtype: Compute dtype of the layers.
        scratch: Folder of this side.
        result: File for the measurements.
        has_profile: Whether to run one additional step under torch's profiler.
        profile: File for the profiler's trace, or "".
        ram: Size of our RAM tier, "" for auto, or "tight" for a quarter above the minimum.
        drive: Folder of our NVMe tier, or "".
        tables: Additional tables of our config.
        trace: File for the timeline of the last step, or "".
        megatrain: Folder of the reference's checkout.
        layers_to_try: Reduced numbers of layers to try if the model does not fit.
        matmul: Number of rows and columns of the square matrices whose product is timed.
    """

    side: str
    model: str
    rows: int
    length: int
    micro_rows: int
    num_steps: int
    has_warm_up: bool
    budget_s: float
    device: str
    dtype: str
    num_threads: int
    scratch: str
    result: str
    ram: str = ""
    drive: str = ""
    tables: Mapping[str, Any] = field(default_factory=dict)
    trace: str = ""
    has_profile: bool = False
    profile: str = ""
    megatrain: str = ""
    layers_to_try: tuple[int, ...] = ()
    matmul: int = 8192

    def to_json(self) -> str:
        """Return the job as JSON, for the command line of the side's process."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Job:
        """Return the job that ``to_json`` wrote."""
        values = json.loads(text)
        return cls(**{**values, "layers_to_try": tuple(values["layers_to_try"])})

    @property
    def torch_dtype(self) -> torch.dtype:
        """Compute dtype of the layers."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def tokens(self) -> Tensor:
        """Return a step's token ids, [rows, length], on the CPU, without padding.

        All sides and steps get the same ids, so that the losses show the effect of updates.
        """
        config = json.loads((Path(self.model) / "config.json").read_text(encoding="utf-8"))
        generator = torch.Generator().manual_seed(1)
        return torch.randint(0, config["vocab_size"], (self.rows, self.length), generator=generator)

    def micro_batches(self) -> list[dict[str, Tensor]]:
        """Return the step's tokens as micro-batches of ``micro_rows`` rows, all labelled, on the CPU."""
        return [{"input_ids": part, "labels": part.clone()} for part in self.tokens().split(self.micro_rows)]


@dataclass(frozen=True)
class StepSeen:
    """Measurements that a side makes in one step.

    Attributes:
        loss: Loss before the update.
        parts_s: Seconds of each part, by name.
        num_drops: Number of buffers freed to make space for buffers of different sizes, by tier.
    """

    loss: float
    parts_s: Mapping[str, float]
    num_drops: Mapping[str, int] = field(default_factory=dict)


def make_job(
    side: str,
    part: Part,
    folder: Path,
    *,
    budget_s: float,
    device: str,
    quick: bool,
    num_steps: int | None = None,
    layers: int | None = None,
    ram: str = "",
    tables: Mapping[str, Any] | None = None,
    **more: Any,
) -> Job:
    """Return the job for one side of a part. Create ``folder`` and write the model's config to it.

    Args:
        num_steps: Replacement for the part's number of steps.
        layers: Replacement for the part's number of layers.
        tables: Additional tables of our config.
        more: Other fields of the job, by name.
    """
    folder.mkdir()
    if layers is not None:
        part = replace(part, layers=layers)
    return Job(
        side=side,
        model=str(write_shape(folder / "model", part, quick=quick)),
        rows=part.rows,
        length=part.length,
        micro_rows=part.micro_rows,
        num_steps=max(1, part.num_steps) if num_steps is None else num_steps,
        has_warm_up=part.num_steps > 0,
        budget_s=budget_s,
        device=device,
        dtype="bfloat16" if device == "cuda" else "float32",
        num_threads=default_num_threads(),
        scratch=str(folder),
        result=str(folder / "result.json"),
        ram="tight" if quick and part.uses_drive else ram,
        drive=str(folder / "drive") if part.uses_drive else "",
        tables=merged(part.tables, tables or {}),
        matmul=512 if quick else 8192,
        **more,
    )


def fill_weights(views: Mapping[str, Tensor]) -> None:
    """Fill fp32 CPU tensors, given by parameter name, with initial weights; see ``fill_range``."""
    for name, tensor in views.items():
        fill_range(name, tensor.dim(), 0, tensor.view(-1))


def fill_range(name: str, num_dimensions: int, start: int, out: Tensor) -> None:
    """Fill ``out`` with a parameter's elements from ``start`` on: norms 1, biases 0, matrices N(0, 0.02).

    Each matrix is a different slice of one pool of random numbers, because drawing 20 B numbers takes minutes.
    """
    if num_dimensions == 1:
        out.fill_(0.0 if name.endswith("bias") else 1.0)
        return
    noise, at, done = _random_numbers(), zlib.crc32(name.encode()) % _NUM_RANDOM, 0
    while done < out.numel():
        offset = (start + done) % _NUM_RANDOM
        part = out[done : done + _NUM_RANDOM - offset]
        part.copy_(noise[at + offset : at + offset + part.numel()])
        done += part.numel()


@functools.cache
def _random_numbers() -> Tensor:
    """Return the pool of random numbers, repeated once so that a slice can begin anywhere in the pool."""
    numbers = torch.randn(_NUM_RANDOM, generator=torch.Generator().manual_seed(SEED)) * 0.02
    return torch.cat([numbers, numbers])


def seeded_model(folder: str | Path, *, dtype: torch.dtype, device: str, is_real: bool = True) -> nn.Module:
    """Return the Hugging Face model of a folder with our random initial weights, rounded to ``dtype``.

    This needs memory for the model and one unit in fp32.

    Args:
        is_real: Whether to draw random weights. A test of whether the model fits uses a constant, which takes no time.
    """
    graph = build_graph(folder, attn_implementation="sdpa", dtype=dtype)
    model: nn.Module = graph.model
    for layout in graph.layouts.values():
        if is_real:
            views = {entry.name: torch.empty(entry.shape) for entry in layout.entries}
            fill_weights(views)
        else:
            options = {"dtype": dtype, "device": device}
            views = {entry.name: torch.full(entry.shape, 0.01, **options) for entry in layout.entries}
        for name, tensor in views.items():
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._parameters[leaf] = nn.Parameter(tensor.to(device, dtype))
    graph.model.tie_weights()
    return model.to(device)
