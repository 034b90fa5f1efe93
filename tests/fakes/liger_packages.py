"""liger-kernel for tests: a stand-in made of torch operations, and the real package in Triton's interpreter."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

STAND_IN = Path(__file__).parent / "stand_in_liger"
PACKAGES = ("liger_kernel", "liger_kernel.transformers")


@contextmanager
def stand_in_liger() -> Iterator[None]:
    """Make ``import liger_kernel`` find the stand-in, even if the real package is installed."""
    hidden = _forget()
    for name in PACKAGES:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None, is_package=True)
        sys.modules[name].__path__ = [str(STAND_IN.joinpath(*name.split(".")))]
    try:
        yield
    finally:
        _forget()
        sys.modules.update(hidden)


def _forget() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]
    return {name: sys.modules.pop(name) for name in names}


def extend_triton_interpreter() -> None:
    """Add to Triton's interpreter the functions that liger-kernel needs, for the rest of the process.

    TRITON_INTERPRET=1 must be set before the process first imports Triton. numpy has no bfloat16, so inputs must be
    fp32. Other inputs work only in kernels that convert loaded values to fp32 themselves.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    patch_tensor, convert = interpreter._patch_lang_tensor, interpreter._implicit_cvt

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)  # Triton's __index__ fails with numpy 2.5, because scalars are 1-element arrays
        scope.set_attr(tensor, "__index__", lambda scalar: int(scalar.handle.data.item()))

    def convert_floats_to_tensors(value: Any) -> Any:
        if not isinstance(value, float):
            return convert(value)
        return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)

    interpreter._patch_lang_tensor, interpreter._implicit_cvt = patch, convert_floats_to_tensors
    # libdevice functions are machine code, which the interpreter cannot run, so replace them.
    in_words = {"rsqrt": lambda x: tl.math.rsqrt(x), "tanh": lambda x: 1 - 2 / (tl.exp(2 * x) + 1)}
    for name in ("rms_norm", "geglu"):
        module = importlib.import_module(f"liger_kernel.ops.{name}")
        for function in in_words.keys() & vars(module).keys():
            setattr(module, function, in_words[function])
