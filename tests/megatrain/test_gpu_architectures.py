"""Machine code of all Triton kernels for GPUs from 2020 to 2026: registers, spills, width of loads. Needs no GPU."""

from __future__ import annotations

import importlib
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatrain.engine.device import device_kernels

#: A100, RTX 3090, RTX 4090, H100 and H200, B200, B300, RTX 5090 and RTX PRO 6000, DGX Spark.
CAPABILITIES = (80, 86, 89, 90, 100, 103, 120, 121)
MODULES = {"engine": "megatrain.engine.device.triton_kernels", "optim": "megatrain.optim.triton_kernels"}
MOST_REGISTERS = 128
WIDE = re.compile(r"(?:ld|st)\.global(?:\.\w+)*\.v4\.b32")
CODES = {
    "m": {"m_scale": "*fp32", "signed": "*fp32", "signed_cells": "*u8"},
    "v": {"v_scale": "*fp32", "unsigned": "*fp32", "unsigned_cells": "*u8"},
}
#: Update rule -> names of its moments, number of its scalars.
RULES = {"adamw": (("m", "v"), 7), "lion": (("m",), 6), "sgd": (("m",), 3), "nesterov": (("m",), 3)}
KEYS = dict.fromkeys(("num_rows", "first_key", "second_key", "first_index", "num_elements"), "i32")


@dataclass(frozen=True)
class Case:
    """Form of a kernel to compile.

    Attributes:
        types: Triton's types of parameters, by name. All other parameters have the type ``scalars``.
        constants: Values of compile-time parameters, by name. An update rule is given by its name.
        aligned: Names of parameters whose values are multiples of 16.
        is_wide: Whether threads must move 16 bytes at once.
    """

    module: str
    kernel: str
    types: dict[str, Any]
    constants: dict[str, Any]
    scalars: str = "i32"
    aligned: tuple[str, ...] = ()
    is_wide: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def update(rule: str, grad: str, format_of_moments: str, *, is_table: bool = False) -> Case:
    """Return a case of the update kernel: for one range, given by arguments, or for the ranges in a table."""
    moments, num_scalars = RULES[rule]
    moment = {"fp32": "*fp32", "bf16": "*i16", "int8": "*u8"}[format_of_moments]
    types = {"weight": "*i16", "low": "*i16", "grad": grad, **dict.fromkeys(moments, moment), **KEYS}
    codes = {name: kind for each in moments for name, kind in CODES[each].items()}
    types |= codes if format_of_moments == "int8" else {}
    types |= {"rows": "*i64", "decision": "*fp32"} if is_table else {}
    optional = ("m", "v", "rows", "decision", *CODES["m"], *CODES["v"])
    constants = {"block_elements": 1024, "rule": rule, **{name: None for name in optional if name not in types}}
    aligned = (*(name for name, kind in types.items() if kind.startswith("*")), "num_elements")
    scalars = {"scalars": ("fp32",) * num_scalars}
    return Case("optim", "update", {**types, **scalars}, constants, "fp32", aligned, is_wide=True)


BLOCK, WARPS = device_kernels._BLOCK_COLUMNS, device_kernels._LOGIT_WARPS
FACTORS = dict.fromkeys(("divisor", "z_factor", "share", "label_weight"), "fp32")
LOGITS = {"logits": "*bf16", "labels": "*i64"}
CASES = {
    "adamw, bf16 gradients": update("adamw", "*i16", "fp32"),
    "adamw, fp32 gradients": update("adamw", "*fp32", "fp32"),
    "adamw, bf16 moments": update("adamw", "*fp32", "bf16"),
    "adamw, int8 moments": update("adamw", "*fp32", "int8"),
    "lion, int8 moments": update("lion", "*fp32", "int8"),
    "nesterov, int8 moments": update("nesterov", "*fp32", "int8"),
    "adamw, a table": update("adamw", "*fp32", "fp32", is_table=True),
    "lion": update("lion", "*i16", "fp32"),
    "lion, a table": update("lion", "*i16", "fp32", is_table=True),
    "sgd": update("sgd", "*i16", "fp32"),
    "nesterov": update("nesterov", "*i16", "fp32"),
    "nesterov, a table": update("nesterov", "*i16", "fp32", is_table=True),
    "average": Case(
        "optim", "average", {"weight": "*i16", "low": "*i16", "ema": "*fp32", "share": "fp32"},
        {"block_elements": 1024},
        aligned=("weight", "low", "ema", "num_elements"), is_wide=True,
    ),
    "squared_norms": Case(
        "optim", "squared_norms", {"grad": "*fp32", "partials": "*fp64", "num_elements": "i64"},
        {"rows": None, "block_elements": 65_536, "num_lanes": 64, "unroll": 16}, options={"num_warps": 1},
    ),
    "squared_norms, a table": Case(
        "optim", "squared_norms", {"rows": "*i64", "grad": "*fp32", "partials": "*fp64", "num_elements": "i32"},
        {"block_elements": 65_536, "num_lanes": 64, "unroll": 16}, options={"num_warps": 1},
    ),
    "sum_in_order": Case("optim", "sum_in_order", {"values": "*fp64", "total": "*fp64"}, {}, options={"num_warps": 1}),
    "group_rows": Case(
        "engine", "group_rows", {"indexes": "*i64", "groups": "*i32"},
        {"block_rows": device_kernels._BLOCK_ROWS, "block_compared": device_kernels._BLOCK_COMPARED},
    ),
    "add_rows": Case(
        "engine", "add_rows", {"target": "*fp32", "rows": "*bf16", "groups": "*i32"}, {"block_columns": BLOCK},
    ),
    "copy_rows": Case(
        "engine", "copy_rows", {"out": "*bf16", "rows": "*bf16", "indexes": "*i64"},
        {"block_columns": BLOCK, "unit": 8}, is_wide=True,
    ),
    "add_logits": Case(
        "engine", "add_logits", {**LOGITS, **dict.fromkeys(("max_logits", "exp_sums", "label_logits"), "*fp32")},
        {"block_columns": device_kernels._BLOCK_LOGITS, "unit": 8, "logit_sums": None}, is_wide=True,
        options={"num_warps": WARPS},
    ),
    "logits_gradient": Case(
        "engine", "logits_gradient",
        {**LOGITS, **FACTORS, "gradient": "*bf16", "log_sums": "*fp32"},
        {"block_columns": BLOCK, "unit": 8, "weights": None}, is_wide=True,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ModuleType]]:
    """Yield the modules of kernels by name, imported for Triton's compiler instead of its interpreter."""
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        for path in MODULES.values():
            patch.delitem(sys.modules, path, raising=False)
            patch.delattr(importlib.import_module(path.rpartition(".")[0]), "triton_kernels", raising=False)
        yield {name: importlib.import_module(path) for name, path in MODULES.items()}
        for path in MODULES.values():
            sys.modules.pop(path)


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """Return the resource usage of a kernel as cuobjdump reports it: REG, STACK, SHARED and LOCAL."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = Path(importlib.import_module("triton").__file__ or "").parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    done = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True)
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", done.stdout)}


def test_every_kernel_has_a_case(compiler: dict[str, ModuleType]) -> None:
    jitted = importlib.import_module("triton").JITFunction
    for name, module in compiler.items():
        public = {kernel: each for kernel, each in vars(module).items() if not kernel.startswith("_")}
        kernels = {kernel for kernel, each in public.items() if isinstance(each, jitted)}
        assert kernels == {case.kernel for case in CASES.values() if case.module == name}


def forms() -> Iterator[Any]:
    """Yield each capability with each case. On one architecture, cases that no other test compiles are not slow."""
    for capability, name in itertools.product(CAPABILITIES, CASES):
        is_quick = capability == 90 and ("int8" in name or "table" in name)
        yield pytest.param(capability, name, marks=[] if is_quick else [pytest.mark.slow])


@pytest.mark.parametrize(("capability", "name"), list(forms()))
def test_kernels_spill_no_registers(
    capability: int, name: str, compiler: dict[str, ModuleType], tmp_path: Path
) -> None:
    triton = importlib.import_module("triton")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    case = CASES[name]
    module = compiler[case.module]
    kernel = getattr(module, case.kernel)
    constants = {key: value for key, value in case.constants.items() if key in kernel.arg_names}
    constants |= {"rule": module.RULES[constants["rule"]]} if "rule" in constants else {}
    signature: dict[str, Any] = dict.fromkeys(kernel.arg_names, case.scalars)
    signature |= {key: kind for key, kind in case.types.items() if key in signature}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = {(kernel.arg_names.index(key),): [["tt.divisibility", 16]] for key in case.aligned if key in signature}
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=target, options={**module.LAUNCH_OPTIONS, **case.options})
    found = resources(compiled.asm["cubin"], tmp_path)
    print(capability, name, found)
    assert found["REG"] <= MOST_REGISTERS
    assert found["STACK"] == found["LOCAL"] == 0
    assert bool(WIDE.search(compiled.asm["ptx"])) or not case.is_wide
