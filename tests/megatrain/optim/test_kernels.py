"""The kernels' machine code has no fused multiply-adds, and uses vector instructions, also for roots and divisions."""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatrain.optim import clip, kernels
from megatrain.optim.adafactor import Adafactor
from megatrain.optim.base import GRADIENT_DTYPES, Segment, Update
from megatrain.optim.elementwise import SGD, AdamW, ElementwiseOptimizer, Lion
from megatrain.optim.muon import Muon
from megatrain.optim.threads import KernelThreads

# vfmadd213ps, vfnmsub231ss ... on x86; fmla, fmls, fmadd, fnmsub ... on ARM
FUSED = re.compile(r"^\s*(vfn?m(add|sub)\w*|fml[as]|fn?m(add|sub))\s", re.MULTILINE)


UPDATES = {
    f"{name}, {form}": getattr(each, form) for name, each in kernels.UPDATES.items() for form in ("update", "rows")
}
UPDATES |= {name: getattr(kernels, name) for name in ("apply_factored", "apply_vector", "muon_apply", "muon_direction")}
SUMS = (
    "squared_norms_rows",
    "adafactor_columns",
    "adafactor_square_sums",
    "adafactor_vector",
    "add_in_place",
    "squared_norms",
)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    for optimizer in (
        AdamW(),
        Lion(),
        SGD(),
        SGD(nesterov=True),
        SGD(momentum=0.0),
        Adafactor(),
        Muon(AdamW()),
    ):
        optimizer.warm_up()
        if isinstance(optimizer, ElementwiseOptimizer):
            compile_row_kernels(optimizer)
    clip.warm_up()
    clip.squared_norms([torch.zeros(1, dtype=dtype) for dtype in GRADIENT_DTYPES], KernelThreads(1))


def compile_row_kernels(optimizer: ElementwiseOptimizer) -> None:
    """Compile or load the kernel with row arguments."""
    rows = np.zeros((0, len(optimizer.row_kinds) + 2), np.int64)
    for split_master in (False, True):
        for dtype in GRADIENT_DTYPES:
            optimizer.make_row_update(split_master, dtype, Segment(0, 0, 0.0), Update(step=1, lr=0.0))(rows)


@functools.cache
def machine_code(kernel: Any) -> list[str]:
    """Return the machine code of every variant: fp32 and split masters, fp32 and bf16 gradients."""
    # a kernel loaded from numba's cache has only object code, so compile this one again
    fresh = kernel.__class__(kernel.py_func, targetoptions=dict(kernel.targetoptions))
    for signature in kernel.signatures:
        fresh.compile(signature)
    return list(fresh.inspect_asm().values())


@pytest.mark.parametrize("name", [*UPDATES, *SUMS])
def test_no_product_and_sum_are_fused(name: str) -> None:
    variants = machine_code(UPDATES[name] if name in UPDATES else getattr(kernels, name))
    assert len(variants) >= 2
    for code in variants:
        assert len(code) > 1000
        assert FUSED.search(code) is None, FUSED.search(code)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86 mnemonics")
@pytest.mark.parametrize("name", UPDATES)
def test_every_variant_of_an_update_works_on_whole_vectors(name: str) -> None:
    operations = dict.fromkeys(("adamw, update", "adamw, rows", "apply_vector"), ("sqrtps", "divps", "mulps", "subps"))
    variants = machine_code(UPDATES[name])
    assert len(variants) >= (2 if name.startswith("muon") else 4)  # a Muon kernel takes no master or no gradient
    for code in variants:
        for operation in operations.get(name, ("mulps", "subps")):
            assert re.search(rf"\sv?{operation}\s.*%[xyz]mm", code), operation


def test_the_pattern_finds_fused_operations() -> None:
    assert FUSED.search("  \tvfmadd213ps\t%zmm0, %zmm1, %zmm2\n")
    assert FUSED.search("\tvfnmadd231ss\t%xmm0, %xmm1, %xmm2\n")
    assert FUSED.search("\tfmla\tv0.4s, v1.4s, v2.4s\n")
    assert FUSED.search("\tvmulps\t%zmm0, %zmm1, %zmm2\n") is None


#: Program that prints numba's cache hits and misses for two rules with equal types, and one weight that each rule
#: updated.
CACHED = """
import torch
from megatrain.optim import kernels
from megatrain.optim.base import Segment, Update
from megatrain.optim.elementwise import SGD
for nesterov in (False, True):
    blocks = {"weight": torch.ones(4), "m": torch.ones(4)}
    SGD(0.5, nesterov).update(blocks, torch.ones(4), [Segment(0, 4, 0.0)], Update(step=1, lr=0.125))
    stats = kernels.UPDATES["nesterov" if nesterov else "sgd"].update.stats
    print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()), float(blocks["weight"][0]))
"""


def test_another_process_loads_each_rule_from_the_cache(tmp_path: Path) -> None:
    """Compilation would take seconds at each start, and a rule must not get another rule's machine code."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-P", "-c", CACHED]
    for counts in ("0 1", "1 0"):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
        assert done.stdout.splitlines() == [f"{counts} 0.8125", f"{counts} 0.78125"]
