"""Optimizers refuse invalid settings and calls, and handle gradients that are cleared, replaced or not finite."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import megatrain
from megatrain.embed.groups import Settings
from megatrain.embed.step_settings import StepCounter
from megatrain.embed.weights import WeightInUseError
from megatrain.optim.clip import NonFiniteGradientError
from megatrain.optim.elementwise import AdamW
from oracles.embedded import assert_same_weights, batches, make, pair_of, run_backward, small_store
from tiered import CapacityError, TieredError


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
@pytest.mark.parametrize("is_tiered", [False, True])
def test_nonfinite_gradients_leave_weights_unchanged(nonfinite: Any, is_tiered: bool, tmp_path: Path) -> None:
    plain, module = pair_of(make)
    with small_store(tmp_path) as store:
        if is_tiered:
            megatrain.offload(module, store)
        optimizer = megatrain.TieredAdamW(module.parameters(), store=store, max_grad_norm=1.0, nonfinite=nonfinite)
        run_backward(module, batches(1)[0], float("inf"))
        if nonfinite == "stop":
            with pytest.raises(NonFiniteGradientError, match="nothing was updated"):
                optimizer.step()
        else:
            optimizer.step()
        assert_same_weights(plain, module)
        run_backward(module, batches(1)[0])
        optimizer.step()
        assert float(optimizer.state[next(module.parameters())]["step"]) == 1


def test_measured_norm_is_discarded_when_gradients_change(tmp_path: Path) -> None:
    for is_tiered in (False, True):
        _, module = pair_of(make)
        with small_store(tmp_path / str(is_tiered)) as store:
            if is_tiered:
                megatrain.offload(module, store)
            optimizer = megatrain.TieredAdamW(module.parameters(), store=store, max_grad_norm=1.0)
            one, other = batches(2)
            run_backward(module, one, 1000.0)
            large = optimizer.measure_grad_norm()
            module.zero_grad()
            run_backward(module, other)
            optimizer.step()
            assert optimizer.grad_norm is not None and large / 10_000 < optimizer.grad_norm < large / 100


@pytest.mark.parametrize("is_tiered", [False, True])
def test_zero_grad_of_either_object_clears_the_sums(is_tiered: bool, tmp_path: Path) -> None:
    plain, module = pair_of(make)
    one, other = batches(2)
    with small_store(tmp_path) as store:
        if is_tiered:
            megatrain.offload(module, store)
        optimizer = megatrain.TieredAdamW(module.parameters(), store=store, max_grad_norm=9.0, offload_gradients=True)
        twin = megatrain.TieredAdamW(plain.parameters(), store=store, max_grad_norm=9.0, name="twin")
        for clear in (
            module.zero_grad,
            optimizer.zero_grad,
            lambda: [setattr(p, "grad", None) for p in module.parameters()],
        ):
            run_backward(module, one)
            assert all(parameter.grad is not None for parameter in module.parameters())
            clear()
            assert all(parameter.grad is None for parameter in module.parameters())
            before = [p.detach().clone() for p in plain.parameters()]
            optimizer.step()  # there is no gradient
            assert all(torch.equal(a, b) for a, b in zip(before, module.state_dict().values(), strict=True))
            for this, chosen in ((plain, twin), (module, optimizer)):
                run_backward(this, other)
                chosen.step()
                chosen.zero_grad()
            assert twin.grad_norm == optimizer.grad_norm
        assert_same_weights(plain, module)


@pytest.mark.parametrize("is_tiered", [False, True])
def test_foreign_operations_on_stored_gradients_are_refused(is_tiered: bool, tmp_path: Path) -> None:
    _, module = pair_of(make)
    with small_store(tmp_path) as store:
        if is_tiered:
            megatrain.offload(module, store)
        megatrain.TieredAdamW(module.parameters(), store=store, offload_gradients=True)
        run_backward(module, batches(1)[0])
        for spoil in (
            lambda: torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0),
            lambda: torch.nn.utils.clip_grad_value_(module.parameters(), 1.0),
            lambda: torch.nn.utils.get_total_norm([p.grad for p in module.parameters()]),
            lambda: [p.grad.norm() for p in module.parameters()],  # type: ignore[union-attr]
            lambda: module.zero_grad(set_to_none=False),
        ):
            with pytest.raises(RuntimeError, match=r"moved to the tiered store.*max_grad_norm"):
                spoil()
        for foreign in (torch.optim.AdamW(module.parameters()), torch.optim.SGD(module.parameters(), lr=1.0)):
            with pytest.raises((ValueError, RuntimeError), match="TieredAdamW"):
                foreign.step()


def test_setting_a_gradient_by_hand_raises(tmp_path: Path) -> None:
    _, module = pair_of(make)
    with small_store(tmp_path) as store:
        optimizer = megatrain.TieredAdamW(module.parameters(), store=store, offload_gradients=True)
        module[0].weight.grad = torch.ones_like(module[0].weight)
        with pytest.raises(RuntimeError, match="set by the user"):
            optimizer.step()
        _, tiered = pair_of(make)
        megatrain.offload(tiered, store)
        with pytest.raises(RuntimeError, match="setting a gradient"):
            tiered[0].weight.grad = torch.ones(16, 8)


def test_invalid_optimizer_arguments_are_refused(tmp_path: Path) -> None:
    _, module = pair_of(make)
    _, other = pair_of(make)
    with small_store(tmp_path) as store:
        adamw = megatrain.TieredAdamW
        for options, message in (
            ({"lr": -1.0}, "lr=-1.0: it must be at least 0"),
            ({"weight_decay": -0.1}, "weight_decay=-0.1: it must be at least 0"),
            ({"betas": (0.9, 1.0)}, "betas=(0.9, 1.0): each must be at least 0 and below 1"),
            ({"betas": (-0.5, 0.9)}, "betas=(-0.5, 0.9): each must be at least 0 and below 1"),
            ({"eps": float("nan")}, "eps=nan: it must be at least 0"),
            ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0: pass the maximum norm, or 0 for no clipping"),
            ({"max_grad_norm": float("nan")}, "max_grad_norm=nan: pass the maximum norm, or 0 for no clipping"),
            ({"ema_decay": 1.0}, "ema_decay=1.0: it must be at least 0 (no average) and below 1"),
            ({"ema_decay": -0.5}, "ema_decay=-0.5: it must be at least 0 (no average) and below 1"),
            ({"state": "tape"}, 'this store has no tier "tape", only ram, nvme. Pass "auto" or one of these'),
            ({"nonfinite": "absent"}, 'nonfinite="absent": pass one of stop, skip, ignore'),
            ({"checkpoint": "absent"}, 'checkpoint="absent": pass one of auto, generation, tensors'),
            ({"state_dtype": "absent"}, 'state_dtype="absent": pass one of float32, bfloat16, int8'),
        ):
            with pytest.raises(ValueError) as caught:
                adamw(module.parameters(), store=store, **options)
            assert str(caught.value) == message
        for name in ("amsgrad", "maximize", "differentiable", "dampening"):
            with pytest.raises(ValueError, match=f"^{name}=True is not supported by the tiered optimizers$"):
                adamw([{"params": module.parameters(), name: True}], store=store)
        with pytest.raises(ValueError) as caught:
            megatrain.TieredSGD(module.parameters(), momentum=-0.5, store=store)
        assert str(caught.value) == "momentum=-0.5: it must be at least 0"
        zeros = {"lr": 0.0, "betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 0.0, "max_grad_norm": 0.0}
        adamw(copy.deepcopy(module).parameters(), store=store, name="zeros", amsgrad=False, **zeros)
        on_meta = nn.Linear(4, 4, device="meta")
        with pytest.raises(
            ValueError, match=r"^a parameter is on the meta device\. Load its weights first, or offload"
        ):
            adamw(on_meta.parameters(), store=store)
        adamw([*on_meta.requires_grad_(False).parameters(), nn.Parameter(torch.ones(2))], store=store, name="meta")
        with pytest.raises(TypeError, match=r"no option 'overlap'.*call megatrain\.offload"):
            adamw(module.parameters(), store=store, overlap=module)
        with pytest.raises(ValueError, match="open_store"):
            adamw(module.parameters())
        with pytest.raises(
            ValueError, match=r"^a parameter is torch\.float16, but master weights exist for float32 and"
        ):
            adamw(copy.deepcopy(module).half().parameters(), store=store)
        optimizer = adamw(module.parameters(), store=store)
        with pytest.raises(ValueError, match=r"First call megatrain\.offload"):
            megatrain.offload(module, store)
        with pytest.raises(ValueError) as caught:
            adamw(other.parameters(), store=store)  # the first optimizer already uses these block names
        assert str(caught.value) == (
            'this store already has blocks named "optimizer". Pass name="..." to the optimizer'
        )
        megatrain.offload(other, store)
        adamw(other.parameters())
        with pytest.raises(ValueError) as caught:
            adamw(other.parameters())
        assert str(caught.value) == "0 already has an optimizer. To replace it, open a new store"
        with megatrain.open_store(ram="8MiB") as elsewhere, pytest.raises(ValueError) as caught:
            adamw(megatrain.offload(make(), store, name="more").parameters(), store=elsewhere)
        assert str(caught.value) == "0 and the optimizer are in different stores"
        saved = optimizer.state_dict()
        for spoiled, message in (
            ([], "the saved state has groups of [] parameters, but this optimizer has groups of [8]"),
            (
                [{**saved["param_groups"][0], "amsgrad": True}],
                "the saved optimizer used amsgrad, which the tiered optimizers do not support",
            ),
        ):
            with pytest.raises(ValueError) as caught:
                optimizer.load_state_dict({**saved, "param_groups": spoiled})
            assert str(caught.value) == message
        with pytest.raises(TypeError, match="state_dict"):
            copy.deepcopy(optimizer)
        with pytest.raises(TypeError, match="in the store"):
            optimizer.state[module[0].weight] = {}
        run_backward(module, batches(1)[0])
        optimizer.step()
        module.bfloat16()
        run_backward(module, batches(1, torch.bfloat16)[0])
        with pytest.raises(RuntimeError, match="Move or convert the module before"):
            optimizer.step()


def test_enabling_momentum_after_construction_is_refused(tmp_path: Path) -> None:
    _, module = pair_of(make)
    named = dict(module.named_parameters())
    with small_store(tmp_path) as store:
        megatrain.offload(module, store)
        groups = [{"params": [named.pop("1.1.weight")], "momentum": 0.0}, {"params": list(named.values())}]
        optimizer = megatrain.TieredSGD(groups, lr=1e-2, momentum=0.9)  # layer 1.1 is in both groups
        run_backward(module, batches(1)[0])
        optimizer.step()
        _, other = pair_of(make)
        without = megatrain.TieredSGD(other.parameters(), store=store)
        without.param_groups[0]["momentum"] = 0.9
        run_backward(other, batches(1)[0])
        with pytest.raises(ValueError) as caught:
            without.step()
        assert str(caught.value) == (
            "a parameter of this group has no m, because its settings were different when its state was created. Pass "
            "the settings to the constructor"
        )
        assert not without.steps


def test_parameters_with_equal_settings_share_an_update_rule() -> None:
    """Equal numbers of different types are equal settings. The cache is cleared when it has 64 rules."""
    made: list[Any] = []

    def make_rule(settings: Mapping[str, Any]) -> AdamW:
        made.append(dict(settings))
        return AdamW(*settings["betas"])

    one, two, three, unused = (nn.Parameter(torch.zeros(2)) for _ in range(4))
    counter = StepCounter(("betas", "note"), make_rule)
    counter.steps[two] = 4
    kinds = {"weight": None, "m": None, "v": None}
    group: Any = SimpleNamespace(
        parameters={"1": one, "2": two, "3": three, "4": unused}, state=SimpleNamespace(kinds=kinds)
    )
    param_groups: list[dict[str, Any]] = [
        {"params": [one, two], "lr": 0.5, "weight_decay": 0.25, "betas": (0.5, 0), "note": None},
        {"params": [three, unused], "lr": 2, "betas": [0.5, 0.0], "note": None},
    ]
    found = counter.count_steps(param_groups, [(group, ["1", "2", "3"])])
    (rule,) = {id(settings.rule): settings.rule for settings in found.values()}.values()
    assert found == {
        id(one): Settings(rule, 1, 0.5, 0.25),
        id(two): Settings(rule, 5, 0.5, 0.25),
        id(three): Settings(rule, 1, 2.0, 0.0),
    }
    assert counter.steps == {one: 1, two: 5, three: 1} and len(made) == 1
    for index in range(1, 65):
        param_groups[1]["betas"] = (0.5, index / 100)
        counter.count_steps(param_groups, [(group, ["3"])])
    assert len(made) == 65 and counter.steps == {one: 1, two: 5, three: 65}
    param_groups[1]["betas"] = (0.5, 0.64)
    counter.count_steps(param_groups, [])
    assert len(made) == 66 and made[-1]["betas"] == (0.5, 0), "its rule was dropped with the others"


def test_constructor_without_space_raises_and_leaves_no_blocks(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    with megatrain.open_store(ram="1200KiB", path=tmp_path) as store:
        megatrain.offload(module, store, name="a", gradients="ram")
        known = [spec.key for spec in store.blocks()]
        with pytest.raises(CapacityError, match=r"ram.*Increase the size of a tier.*nvme=") as caught:
            megatrain.TieredAdamW(module.parameters())
        assert caught.value.tier == "ram"
        assert [spec.key for spec in store.blocks()] == known
        megatrain.TieredSGD(module.parameters(), lr=1e-2)  # SGD without momentum has no state
    other = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    with megatrain.open_store(ram="1000KiB", path=tmp_path) as store:
        with pytest.raises(CapacityError, match="Increase the size of a tier"):
            megatrain.offload(other, store)
        assert not list(store.blocks())
        other(torch.zeros(1, 256)).sum().backward()  # the module is unchanged


def test_state_too_large_for_the_remaining_ram_is_refused(tmp_path: Path) -> None:
    first, second = nn.Linear(16, 16), nn.Linear(512, 512)
    with megatrain.open_store(ram="3MiB", nvme=tmp_path, nvme_size="64MiB") as store:
        megatrain.TieredAdamW(first.parameters(), store=store, state="ram")
        with pytest.raises(CapacityError) as caught:
            megatrain.TieredAdamW(second.parameters(), store=store, name="second", offload_gradients=True)
        assert caught.value.tier == "ram" and "Increase the size of ram" in str(caught.value)


def test_partial_update_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, module = pair_of(make)
    with small_store(tmp_path) as store:
        megatrain.offload(module, store)
        optimizer = megatrain.TieredAdamW(module.parameters())
        run_backward(module, batches(1)[0])
        optimizer.step()

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr("megatrain.optim.elementwise.AdamW.update", interrupt)
            with pytest.raises(KeyboardInterrupt):
                optimizer.finish_updates()
        with pytest.raises(RuntimeError, match="halfway"):
            optimizer.state_dict()
        run_backward(module, batches(1)[0])
        optimizer.step()


def test_failed_update_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, module = pair_of(make)
    run_backward(plain, batches(1)[0])
    torch.optim.AdamW(plain.parameters(), lr=0.1).step()
    with small_store(tmp_path) as store:
        megatrain.offload(module, store)
        optimizer = megatrain.TieredAdamW(module.parameters(), lr=0.1)
        run_backward(module, batches(1)[0])
        optimizer.step()
        with monkeypatch.context() as patched:
            patched.setattr("megatrain.optim.elementwise.AdamW.update", Mock(side_effect=TieredError("no memory")))
            with pytest.raises(TieredError, match="no memory"):
                optimizer.finish_updates()
        optimizer.finish_updates()
        for wanted, parameter in zip(plain.state_dict().values(), module.state_dict().values(), strict=True):
            torch.testing.assert_close(parameter, wanted)


def test_step_during_a_gather_is_refused_without_loss(tmp_path: Path) -> None:
    plain, module = pair_of(make)
    with small_store(tmp_path) as store:
        megatrain.offload(module, store)
        optimizer = megatrain.TieredAdamW(module.parameters(), lr=0.1)
        run_backward(module, batches(1)[0])
        with megatrain.gathered(module), pytest.raises(WeightInUseError, match=r"step\(\) while .* is in use"):
            optimizer.step()
        assert_same_weights(plain, module)
        run_backward(plain, batches(1)[0])
        torch.optim.AdamW(plain.parameters(), lr=0.1).step()
        optimizer.step()
        for wanted, parameter in zip(plain.state_dict().values(), module.state_dict().values(), strict=True):
            torch.testing.assert_close(parameter, wanted)
