"""Print the table of docs/what_fits.md for modules other than language models: ``python docs/what_fits_modules.py``.

``plan`` traces only language models. For any module, ``megatrain.offload`` determines which parameters share a block.
The bytes in a store and the minimum GPU memory and RAM are sums over blocks. The order in which ``offload`` and
``TieredAdamW`` register blocks determines their homes. The modules are on the meta device. They are made with the
default arguments of diffusers' classes, which give the published models. This program needs diffusers and peft.
"""

# ruff: noqa: E501 - sentences of the page

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402

from megatrain.embed.partition import UnitPart, partition  # noqa: E402
from megatrain.machine.planned_machine import PlannedMachine, find_machine  # noqa: E402
from tiered.units import GiB  # noqa: E402

MACHINES = ("laptop-32gb", "rtx4090-128gb", "rtx-pro-6000-256gb", "h200-1.5tb")
#: Defaults of ``open_store``: shares of free RAM and of a drive's free space, and the number of kept checkpoints.
RAM_SHARE, DRIVE_SHARE, KEPT = 0.95, 0.9, 2
GRADIENT_BYTES = 4
RANK = 16


def modules() -> dict[str, Callable[[], nn.Module]]:
    """Return the constructor of each transformer, by its title in the table."""
    import diffusers

    return {
        "Flux.1-dev": lambda: diffusers.FluxTransformer2DModel(guidance_embeds=True),
        "Flux.2-dev": diffusers.Flux2Transformer2DModel,
        "Qwen-Image": diffusers.QwenImageTransformer2DModel,
        "Wan2.2-T2V-A14B, one of its two transformers": diffusers.WanTransformer3DModel,
    }


@dataclass(frozen=True)
class Needs:
    """Memory needs of one module, in bytes.

    Attributes:
        parameters: Number of parameters, including adapters.
        trained: Number of trained parameters.
        stored: Weights, gradients and optimizer state.
        gpu: Minimum GPU tier: a layer with its gradients, and the modules that contain it.
        ram: Minimum RAM tier: the update of a layer, or the minimum GPU tier if that is larger.
        blocks: For each block, in the order of registration, its size and whether checkpoints contain it.
        open_ram: RAM that homes must leave free.
    """

    parameters: int
    trained: int
    stored: int
    gpu: int
    ram: int
    blocks: tuple[tuple[int, bool], ...]
    open_ram: int

    def on(self, ram_bytes: int, drive_bytes: int) -> tuple[int, int] | None:
        """Return the bytes of homes in RAM, and of homes and checkpoints on drives, or None if they do not fit."""
        in_ram = on_drive = 0
        for nbytes, is_durable in self.blocks:
            if in_ram + nbytes + self.open_ram <= ram_bytes:
                in_ram += nbytes
            else:
                on_drive += nbytes * (1 + KEPT if is_durable else 1)
        has_room = not on_drive or self.ram <= ram_bytes - in_ram
        return (in_ram, on_drive) if has_room and on_drive <= drive_bytes else None


def needs_of(module: nn.Module) -> Needs:
    """Return the needs of a bf16 module that is trained fully or partly with AdamW."""
    units = partition(module, "model")
    parts = list(dict.fromkeys(part for unit in units for part in unit.parts))
    trained = [part for part in parts if part.layout.trainable]
    weights = [(part.weight_bytes, True) for part in parts]
    gradients = [(part.gradient_bytes, False) for part in trained]
    state = [(part.layout.num_elements * size, True) for part in trained for size in _state_bytes(part)]
    blocks = (*weights, *gradients, *state)
    gpu = max(_gpu_bytes(unit, units) for unit in units)
    return Needs(
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        trained=sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad),
        stored=sum(nbytes for nbytes, _ in blocks),
        gpu=gpu,
        ram=max(*map(_update_bytes, parts), gpu),
        blocks=blocks,
        open_ram=max(sum(_working_bytes(part) for part in unit.parts) for unit in units),
    )


def _state_bytes(part: Any) -> tuple[int, ...]:
    """Return the bytes of AdamW's state per parameter: the low half of a bf16 weight's master, m and v."""
    return (2, 4, 4) if part.dtype == torch.bfloat16 else (4, 4)


def _update_bytes(part: Any) -> int:
    """Return the bytes in RAM during the update of a part."""
    of_each = part.dtype.itemsize + GRADIENT_BYTES + sum(_state_bytes(part))
    return int(part.layout.num_elements * of_each) if part.layout.trainable else 0


def _working_bytes(part: Any) -> int:
    return int(24 * part.layout.num_elements if part.layout.trainable else 2 * part.weight_bytes)


def _gpu_bytes(unit: UnitPart, units: Sequence[UnitPart]) -> int:
    around = [other for other in units if other.name == "" or f"{unit.name}.".startswith(f"{other.name}.")]
    weights = {part: part.weight_bytes for other in around for part in other.parts}
    return sum(weights.values()) + sum(part.gradient_bytes for part in unit.parts)


def build_module(make: Callable[[], nn.Module], *, lora: bool) -> nn.Module:
    """Return a module on the meta device in bf16, with adapters on its attention if ``lora``."""
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    with torch.device("meta"), contextlib.redirect_stderr(io.StringIO()):
        module: Any = make().to(torch.bfloat16)
        if lora:
            from peft import LoraConfig

            module.requires_grad_(False)
            module.add_adapter(LoraConfig(r=RANK, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    found: nn.Module = module
    return found


def _gib(nbytes: float) -> str:
    gib = nbytes / GiB
    return f"{gib / 1024:,.2f} TiB" if gib >= 1024 else f"{gib:,.0f} GiB" if gib >= 10 else f"{gib:,.1f} GiB"


def cell(needs: Needs, machine: PlannedMachine) -> str:
    """Return the table cell that says where a module fits on a machine."""
    if machine.file.gpu is not None and needs.gpu > machine.file.gpu.memory.nbytes:
        return "GPU too small"
    drive_bytes = int(sum(drive.size.nbytes for _, drive in machine.drives) * DRIVE_SHARE)
    place = needs.on(int(machine.ram.free * RAM_SHARE), drive_bytes)
    if place is None:
        return "does not fit"
    in_ram, on_drive = place
    return " + ".join([f"{_gib(in_ram)} RAM"] * bool(in_ram) + [f"{_gib(on_drive)} drives"] * bool(on_drive))


def lines() -> Iterator[str]:
    """Yield the lines of the table."""
    machines = [find_machine(name) for name in MACHINES]
    yield f"| module | trained | in the store | a GPU needs | RAM needs | {' | '.join(f'`{name}`' for name in MACHINES)} |"
    yield "|---" * (5 + len(MACHINES)) + "|"
    for title, make in modules().items():
        for lora in (False, True):
            needs = needs_of(build_module(make, lora=lora))
            what = f"LoRA, {needs.trained / 1e6:,.0f} M" if lora else f"all {needs.trained / 1e9:,.1f} B"
            cells = [_gib(needs.stored), _gib(needs.gpu), _gib(needs.ram), *(cell(needs, one) for one in machines)]
            yield f"| {title} | {what} | {' | '.join(cells)} |"


HEAD = f"""## Modules that are not language models

[Any module](any_module.md) can be offloaded. `plan` traces only language models, so this table has bytes and no speeds. The bytes are calculated; the
modules were not run.

| column | meaning |
|---|---|
| in the store | 2 bytes per frozen parameter (bf16 weights), 16 per trained parameter (bf16 weights, fp32 gradients, AdamW's moments and the low halves of the fp32 masters) |
| a GPU needs | memory for the largest layer, its gradients and the modules around that layer |
| RAM needs | memory for the update of the largest layer, or the minimum GPU memory if that is larger |
| a machine | RAM and drive space that the module takes there with `open_store(ram="auto", ...)`; the drive space includes two checkpoints |

LoRA rows have adapters of rank {RANK} on the attention projections. The table does not count:

- activations; use activation checkpointing, and move the inputs of layers with `offload_activations`
- latents and VAE
- text encoders; an encoder in the store takes 2 bytes per parameter

`python docs/what_fits_modules.py` makes the table from the classes of diffusers, with their default arguments.

"""


def section() -> str:
    """Return the section of the page that contains the table."""
    return HEAD + "\n".join(lines()) + "\n"


if __name__ == "__main__":
    print(section(), end="")
