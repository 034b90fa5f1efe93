"""A suspended forward keeps its modes, random state and bindings, and its caller keeps its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatrain.engine.unit.state import RandomStates, ThreadModes
from megatrain.engine.unit.suspend import SuspendedForward, UnitCall, suspend

CPU = torch.device("cpu")
CALL = UnitCall(3, (), {}, None)


def test_modes_random_numbers_and_bindings_belong_to_the_forward() -> None:
    random, globals_, seen = RandomStates(CPU), {"name": "caller"}, []

    def observe() -> tuple[str, bool, bool, Tensor]:
        return globals_["name"], torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.rand(1)

    def function(forward: SuspendedForward) -> str:
        forward.bind(globals_, "name", "forward")
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        seen.append(observe())
        suspend(CALL)
        seen.append(observe())
        return "end"

    outer = ThreadModes.current("cpu")
    forward = SuspendedForward(1, function, random, CPU, seed=5)

    def check(call: Any, result: Any) -> None:
        assert ThreadModes.current("cpu") == outer and globals_ == {"name": "caller"}
        assert (forward.call, forward.result) == (call, result)
        assert (forward.modes.grad_enabled, forward.modes.autocast[0][1]) == (False, True)

    forward.start()
    check(CALL, None)
    torch.manual_seed(99)  # the forward restores its random state when it continues
    forward.resume(lambda: None)
    check(None, "end")
    torch.manual_seed(5)
    assert seen == [("forward", False, True, torch.rand(1)) for _ in range(2)]
