"""liger-kernel for tests: one with torch in the place of its kernels, and the real one in Triton's interpreter."""

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
    """Let ``import liger_kernel`` find the stand-in, installed or not."""
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


def complete_interpreter() -> None:
    """Add to Triton's interpreter what liger-kernel's kernels use and it lacks; for the rest of the process.

    To be called with TRITON_INTERPRET=1 since before the process first imported Triton. fp32 only, but where a kernel
    itself turns what it loads into fp32: numpy knows no bfloat16.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    patch_tensor, convert = interpreter._patch_lang_tensor, interpreter._implicit_cvt

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)  # its own fails with numpy 2.5, as scalars are arrays of one element
        scope.set_attr(tensor, "__index__", lambda scalar: int(scalar.handle.data.item()))

    def with_floats(value: Any) -> Any:
        if not isinstance(value, float):
            return convert(value)
        return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)

    interpreter._patch_lang_tensor, interpreter._implicit_cvt = patch, with_floats
    # Functions of libdevice are machine code.
    in_words = {"rsqrt": lambda x: tl.math.rsqrt(x), "tanh": lambda x: 1 - 2 / (tl.exp(2 * x) + 1)}
    for name in ("rms_norm", "geglu"):
        module = importlib.import_module(f"liger_kernel.ops.{name}")
        for function in in_words.keys() & vars(module).keys():
            setattr(module, function, in_words[function])
