"""Updates of ordinary parameters that are made while the next forward runs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.embed.groups import InterruptedUpdateError, OrdinaryGroup

WIDTH, NUM_LAYERS = 800, 4  # 0.64 M elements each: more than are put together, so every layer is a group


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def train(folder: Path, *, overlap: bool, ram: str, steps: int = 4, **options: Any) -> tuple[list[float], Any]:
    """Return the losses and what ``state_dict`` gives after the last step, which nobody has waited for."""
    model = make()
    with megatrain.open_store(ram=ram, nvme=folder, nvme_size="256MiB") as store:
        optimizer = megatrain.TieredAdamW(
            model.parameters(), lr=1e-2, store=store, max_grad_norm=0.1, overlap=model if overlap else None, **options
        )
        losses = []
        for step in range(steps):
            for part in range(2):
                loss = loss_of(model, 2 * step + part)
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("offload_gradients", [False, True])
@pytest.mark.parametrize("ram", ["128MiB", "24MiB"])
def test_gives_the_same_bits(ram: str, offload_gradients: bool, tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", overlap=False, ram=ram, offload_gradients=offload_gradients)
    behind = train(tmp_path / "behind", overlap=True, ram=ram, offload_gradients=offload_gradients)
    assert behind[0] == plain[0]
    assert all(torch.equal(value, plain[1][name]) for name, value in behind[1].items())


def test_a_module_waits_for_its_own_parameters_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, order, may_go_on = make(), [], threading.Event()
    with megatrain.open_store(ram="128MiB", nvme=tmp_path, nvme_size="256MiB") as store:
        optimizer = megatrain.TieredAdamW(model.parameters(), store=store, overlap=model)
        update = OrdinaryGroup.update

        def slow(group: OrdinaryGroup, work: Any) -> None:
            is_last = group is optimizer.groups[-1]
            if is_last:
                assert may_go_on.wait(60)
            update(group, work)
            order.append("last update" if is_last else "update")

        monkeypatch.setattr(OrdinaryGroup, "update", slow)
        loss_of(model, 0).backward()
        optimizer.step()
        assert model[0].weight.grad is None, "gradients are consumed"
        model[0](torch.zeros(1, WIDTH))
        order.append("first forward")
        may_go_on.set()
        model[-1](torch.zeros(1, WIDTH))
        order.append("last forward")
        optimizer.finish_updates()
        assert order.index("first forward") < order.index("last update") < order.index("last forward")


def test_an_update_that_fails_is_told_and_none_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    with megatrain.open_store(ram="128MiB", nvme=tmp_path, nvme_size="256MiB") as store:
        optimizer = megatrain.TieredAdamW(model.parameters(), store=store, overlap=model)
        before = [parameter.clone() for parameter in model.parameters()]

        def fail(*_: Any) -> None:
            raise OSError("no")

        loss_of(model, 0).backward()
        with monkeypatch.context() as patched:
            patched.setattr(OrdinaryGroup, "update", fail)
            optimizer.step()
            with pytest.raises(OSError, match="no"):
                loss_of(model, 1)
            with pytest.raises(OSError, match="no"):
                optimizer.finish_updates()
        with pytest.raises(InterruptedUpdateError):
            optimizer.finish_updates()
        assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
        loss_of(model, 1).backward()
        optimizer.step()
        optimizer.finish_updates()
        assert not torch.equal(before[0], model[0].weight)
