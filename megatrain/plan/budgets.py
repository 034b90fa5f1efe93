"""Memory of a run's tiers that blocks cannot use (workspaces, buffers), and the rules for homes in GPU memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from megatrain.base.precision import MASTER_ELEMENTS
from megatrain.engine.program.block_keys import state_key, stored_keys
from megatrain.engine.program.step_program import StepProgram
from megatrain.machine.profiles import MachineProfile
from megatrain.optim.average import EMA
from megatrain.plan.placement import TierBudget
from megatrain.plan.residents import Residency
from megatrain.plan.run_spec import RunSpec
from tiered.units import PAGE_BYTES, round_up

#: Name of the read-only tier that contains the model's folder.
FOLDER = "folder"


def with_folder(budgets: Mapping[str, TierBudget], program: StepProgram, reader_bytes: int) -> dict[str, TierBudget]:
    """Add the model's folder as a tier after RAM, if it can be the home of some blocks.

    Args:
        reader_bytes: RAM for the buffers of the folder's readers.
    """
    nbytes = sum(block.nbytes for block in program.blocks.values() if block.in_place)
    if not nbytes:
        return dict(budgets)
    result: dict[str, TierBudget] = {}
    for name, budget in budgets.items():
        result[name] = budget
        if name == "ram":
            result[name] = replace(budget, workspace_bytes=budget.workspace_bytes + reader_bytes)
            result[FOLDER] = TierBudget(
                FOLDER, nbytes, lambda n: n, links=((FOLDER, "ram"),), is_addressable=False, is_read_only=True
            )
    return result


def teacher_bytes(run: RunSpec) -> int:
    """Return the bytes of the teacher's scores that the loss reads in one step."""
    return run.batch.num_tokens * run.objective.loss.token_nbytes


def with_workspace(budgets: Mapping[str, TierBudget], nbytes: int, compute_tier: str) -> dict[str, TierBudget]:
    """Add ``nbytes`` of workspace to RAM, and to a compute tier other than RAM, which gets a copy of the same data."""
    out = dict(budgets)
    for tier in dict.fromkeys(("ram", compute_tier)):
        out[tier] = replace(out[tier], workspace_bytes=out[tier].workspace_bytes + round_up(nbytes, PAGE_BYTES))
    return out


def with_residents(
    budgets: Mapping[str, TierBudget], run: RunSpec, program: StepProgram, profile: MachineProfile | None
) -> dict[str, TierBudget]:
    """Return the budgets with the rules for homes in GPU memory, and with the RAM needed to load weights.

    Args:
        profile: Rates of the machine if a GPU computes, else None. Without rates, blocks are ranked by saved bytes.
    """
    budgets = {**budgets, "ram": replace(budgets["ram"], filling_bytes=filling_bytes(program))}
    if program.compute_tier == "ram":
        return budgets
    kinds = set(run.placement.residents)
    if not program.updates.in_compute_tier:
        kinds.discard("optimizer")  # updates run in RAM, so the state stays there
    gpu = profile.gpu if profile is not None else None
    rate = profile.adamw_params_per_s.get(_weight_dtype_name(program)) if profile is not None else None
    residency = Residency(frozenset(kinds))
    if gpu is not None:
        residency = replace(
            residency,
            bus_s_per_byte=0.5 / gpu.h2d_bytes_per_s + 0.5 / gpu.d2h_bytes_per_s,
            host_update_s_per_element=1 / rate if rate and run.optimizer.optim == "adamw" else 0.0,
        )
    return {**budgets, program.compute_tier: replace(budgets[program.compute_tier], residency=residency)}


def _weight_dtype_name(program: StepProgram) -> str:
    """Return the name of the weights' dtype, which is the key of the update rates."""
    dtype = next(block.dtype for block in program.blocks.values() if block.kind == "weights" and not block.num_packed)
    return str(dtype).removeprefix("torch.")


def filling_bytes(program: StepProgram) -> int:
    """Return the RAM needed to load or save the largest layout's weights together with their fp32 masters."""
    peak, elements = 0, Counter[str]()  # elements by complete layout, because an export gathers all parts and shards
    for block in program.blocks.values():
        if block.kind == "weights":
            elements[block.tensor_key] += block.num_elements * program.sharding.shards.size
    for key, block in program.blocks.items():
        if block.kind == "weights":
            parts = [block.nbytes]
            if block.dtype.itemsize == 2:
                low_keys = stored_keys(state_key(key.rsplit("/", 1)[0], "low"), program.blocks)
                parts += [
                    4 * min(elements[block.tensor_key], MASTER_ELEMENTS),
                    max((program.blocks[part].nbytes for part in low_keys), default=0),
                ]
            averages = stored_keys(state_key(key.rsplit("/", 1)[0], EMA.name), program.blocks)
            parts.append(max((program.blocks[part].nbytes for part in averages), default=0))
            peak = max(peak, sum(round_up(nbytes, PAGE_BYTES) for nbytes in parts))
    return peak
