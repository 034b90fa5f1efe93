"""Host copies answer a model's queries exactly as the tensor would, or not at all."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fakes.waits import counted_waits
from megatrain.engine.device.host_io import HostMirror

POSITIONS = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])
MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])

Look = Callable[[torch.Tensor, torch.Tensor], Any]

ANSWERED: dict[str, Look] = {
    "is anything padding": lambda positions, mask: bool(mask.to(device=mask.device, dtype=torch.bool).all()),
    "as a sum": lambda positions, mask: bool(mask.bool()[:, -3:].sum() == 6),
    "inverted": lambda positions, mask: bool((~mask.bool()).any()),
    "packed documents": lambda positions, mask: bool(
        (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)[:, -1].eq(0).all()
    ),
    "the longest": lambda positions, mask: int(torch.max(positions) + 1),
    "reverse operands": lambda positions, mask: (1 - mask).sum().item(),
    "made on the device": lambda positions, mask: (torch.arange(5, device=positions.device) + 2)[3].item(),
    "moved": lambda positions, mask: positions.to("cpu").unsqueeze(0).expand(1, 2, 5).max().item(),
    "as an index": lambda positions, mask: list(range(mask[0].sum())),  # type: ignore[call-overload]
    "as a list": lambda positions, mask: positions[:, 1].tolist(),
    "by a list": lambda positions, mask: positions[:, [-1, 0]].tolist(),
    "contains": lambda positions, mask: (4 in positions, 7 in positions),
}
NOT_ANSWERED: dict[str, Look] = {
    "computed from floats": lambda positions, mask: bool((positions.float() * 0.3).sum() > 1),
    "of random numbers": lambda positions, mask: int(torch.randint_like(positions, 5).sum()),
    "mixed with an unknown tensor": lambda positions, mask: bool((positions + torch.ones(5, dtype=torch.long)).any()),
    "another operation": lambda positions, mask: int(positions.prod()),
    "larger than any input": lambda positions, mask: bool((positions[:, None] >= positions[:, :, None]).all()),
}


def changed_in_place(positions: torch.Tensor, mask: torch.Tensor) -> Any:
    shifted = positions + 1
    shifted[0, 0] = 50
    return shifted.max().item()


def changed_through_a_view(positions: torch.Tensor, mask: torch.Tensor) -> Any:
    shifted = positions + 1
    shifted[1].mul_(0)
    return (shifted == 0).any().item()


NOT_ANSWERED["changed in place"] = changed_in_place
NOT_ANSWERED["changed through a view"] = changed_through_a_view


def looked(look: Look) -> tuple[Any, HostMirror]:
    mirror = HostMirror()
    positions, mask = POSITIONS.clone(), MASK.clone()
    mirror.register(positions, POSITIONS)
    mirror.register(mask, MASK)
    with mirror:
        return look(positions, mask), mirror


@pytest.mark.parametrize("name", ANSWERED)
def test_mirrored_reads_match_the_tensor(name: str) -> None:
    look = ANSWERED[name]
    expected = look(POSITIONS, MASK)
    with counted_waits() as waits:
        answer, mirror = looked(look)
    assert answer == expected and type(answer) is type(expected)
    assert 1 <= mirror.num_answers <= 2
    waits.pop("tolist", None)  # counts the call itself, which the mirror handles
    assert set(waits) == {"numpy"}, "the tensor itself is not read"


@pytest.mark.parametrize("name", NOT_ANSWERED)
def test_uncertain_values_are_read_from_the_device(name: str) -> None:
    torch.manual_seed(1)
    expected = NOT_ANSWERED[name](POSITIONS, MASK)
    torch.manual_seed(1)
    with counted_waits() as waits:
        answer, mirror = looked(NOT_ANSWERED[name])
    assert answer == expected
    assert mirror.num_answers == 0 and waits["_local_scalar_dense"] == 1


def test_changed_input_is_no_longer_mirrored() -> None:
    mirror, positions = HostMirror(), POSITIONS.clone()
    mirror.register(positions, POSITIONS)
    positions.add_(1)
    with mirror:
        assert positions.max().item() == 5
    assert mirror.num_answers == 0


def test_index_list_is_copied_to_the_device_once() -> None:
    mirror, positions = HostMirror(), POSITIONS.clone()
    indices = []
    for _ in range(2):  # two passes
        mirror.register(positions, POSITIONS)
        with mirror:
            assert 4 in positions[:, [-1, 0]]
        indices += mirror._lists.values()
        mirror.forget()
    assert indices[0] is indices[1] and mirror.num_answers == 2


def test_mirror_errors_match_torch() -> None:
    mirror, positions = HostMirror(), POSITIONS.clone()
    mirror.register(positions, POSITIONS)
    with mirror, pytest.raises(RuntimeError, match="ambiguous"):
        bool(positions)


def test_mirror_keeps_no_tensors() -> None:
    mirror, host = HostMirror(), POSITIONS.clone()
    device = host.clone()
    mirror.register(device, host)
    with mirror:
        result = device + 1
        assert result.max().item() == 5
    assert len(mirror._mirrored) == 2
    del result
    gc.collect()
    assert len(mirror._mirrored) == 1, "known tensors die with their owners"
    mirror.forget()
    assert len(mirror._mirrored) == 0
    with mirror:
        assert (device + 1).max().item() == 5
    assert mirror.num_answers == 1
