"""Updates with state in RAM are bit-identical to updates that fetch the state, and never use stale addresses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatrain import TieredAdafactor, TieredAdamW, TieredLion, TieredSGD, gathered, offload, open_store

KINDS = {
    "adamw": lambda parameters, **options: TieredAdamW(parameters, lr=1e-2, weight_decay=0.1, **options),
    "lion": lambda parameters, **options: TieredLion(parameters, lr=1e-3, weight_decay=0.1, **options),
    "sgd": lambda parameters, **options: TieredSGD(parameters, lr=1e-2, momentum=0.9, **options),
    "adafactor": lambda parameters, **options: TieredAdafactor(parameters, lr=1e-2, **options),
    "adamw, int8": lambda parameters, **options: TieredAdamW(parameters, lr=1e-2, state_dtype="int8", **options),
    "lion, bfloat16": lambda parameters, **options: TieredLion(parameters, lr=1e-3, state_dtype="bfloat16", **options),
}


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Return parameters of several shapes: one is transposed in memory, one is larger than a kernel's range."""
    torch.manual_seed(0)
    shapes = [(7,), (33, 5), (3, 4, 5), (1100, 1000)]
    made = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    return [*made, nn.Parameter(torch.randn(6, 9).to(dtype).t())]


def give_gradients(own: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for number, parameter in enumerate(own):
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = None if number == 1 and step == 1 else gradient


def same_bits(found: list[nn.Parameter], expected: list[nn.Parameter]) -> bool:
    return all(torch.equal(one.detach(), two.detach()) for one, two in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_updates_in_ram_match_fetched_updates_bitwise(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    near, far = parameters(dtype), parameters(dtype)
    options: dict[str, Any] = {"max_grad_norm": 1.0}
    with open_store(ram="64MiB", nvme=tmp_path, nvme_size="128MiB") as store:
        in_ram = KINDS[kind](near, store=store, name="near", **options)
        fetched = KINDS[kind](far, store=store, name="far", state=["nvme"], **options)
        for step in range(4):
            for own in (near, far):
                give_gradients(own, step)
            in_ram.step()
            fetched.step()
            assert in_ram.grad_norm == fetched.grad_norm
            assert same_bits(near, far), step
        assert not same_bits(near, parameters(dtype))


@pytest.mark.parametrize(("state_dtype", "rounding"), [("int8", 2**-4), ("bfloat16", 2**-7)])
def test_low_precision_moments_convert_to_and_from_torch(state_dtype: Any, rounding: float, tmp_path: Path) -> None:
    """Moments in int8 or bf16 match torch's within rounding, and can be exchanged with torch's optimizer."""
    module, plain = nn.Linear(70, 30), nn.Linear(70, 30)
    plain.load_state_dict(module.state_dict())
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    gradients = [[torch.randn(p.shape) for p in plain.parameters()] for _ in range(3)]
    with open_store(ram="64MiB", path=tmp_path) as store:
        optimizer = TieredAdamW(module.parameters(), lr=1e-2, store=store, state_dtype=state_dtype, seed=3)
        for step in gradients:
            for own in (plain, module):
                for parameter, gradient in zip(own.parameters(), step, strict=True):
                    parameter.grad = gradient.clone()
            reference.step()
            optimizer.step()
        for mine, other in zip(module.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(mine, other, atol=2e-3)
            for name in ("exp_avg", "exp_avg_sq"):
                found, exact = optimizer.state[mine][name], reference.state[other][name]
                assert found.shape == exact.shape and found.dtype == torch.float32
                assert float((found - exact).abs().max()) <= rounding * float(exact.abs().max())
        torch.optim.AdamW(plain.parameters(), lr=1e-2).load_state_dict(optimizer.full_state_dict())
        optimizer.load_state_dict(reference.state_dict())
        for mine, other in zip(module.parameters(), plain.parameters(), strict=True):
            found, exact = optimizer.state[mine]["exp_avg"], reference.state[other]["exp_avg"]
            assert float((found - exact).abs().max()) <= rounding / 2 * float(exact.abs().max())
        with pytest.raises(ValueError, match='state_dtype="fp8": pass one of float32, bfloat16, int8'):
            TieredAdamW(plain.parameters(), store=store, name="other", state_dtype="fp8")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="has no state_dtype"):
            TieredAdafactor(plain.parameters(), store=store, name="other", state_dtype="int8")


@pytest.mark.parametrize("state_dtype", ["int8", "bfloat16"])
def test_low_precision_moments_match_in_an_offloaded_module(state_dtype: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4))
    tiered = copy.deepcopy(plain)
    with open_store(ram="64MiB", path=tmp_path) as store:
        offload(tiered, store)
        optimizers = [
            TieredAdamW(own.parameters(), lr=1e-2, store=store, name=name, state_dtype=state_dtype)
            for name, own in (("plain", plain), ("tiered", tiered))
        ]
        for step in range(3):
            inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(step))
            for own, optimizer in zip((plain, tiered), optimizers, strict=True):
                optimizer.zero_grad()
                own(inputs).square().mean().backward()
                optimizer.step()
        with gathered(tiered):
            assert same_bits(list(tiered.parameters()), list(plain.parameters()))


def test_parameters_with_replaced_data_are_still_updated(tmp_path: Path) -> None:
    plain, moved = parameters(), parameters()
    with open_store(ram="64MiB", path=tmp_path) as store:
        first = TieredAdamW(plain, store=store, name="plain")
        second = TieredAdamW(moved, store=store, name="moved")
        for step in range(4):
            give_gradients(plain, step)
            give_gradients(moved, step)
            first.step()
            second.step()
            with torch.no_grad():
                for parameter in moved:
                    parameter.data = parameter.detach().clone()
            if step == 1:
                second.load_state_dict(second.state_dict())
        assert same_bits(moved, plain)


def test_a_converted_parameter_is_refused(tmp_path: Path) -> None:
    own = parameters()
    with open_store(ram="64MiB", path=tmp_path) as store:
        optimizer = TieredAdamW(own, store=store)
        give_gradients(own, 0)
        optimizer.step()
        own[0].data = own[0].data.bfloat16()
        own[0].grad = torch.ones(7, dtype=torch.bfloat16)
        with pytest.raises(RuntimeError, match="Move or convert the module before"):
            optimizer.step()


def test_backward_of_a_graph_older_than_the_step_raises() -> None:
    parameter = nn.Parameter(torch.ones(4))
    with open_store(ram="16MiB") as store:
        optimizer = TieredAdamW([parameter], store=store)
        loss = (parameter * parameter).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
