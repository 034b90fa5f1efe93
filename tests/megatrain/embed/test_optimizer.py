"""Optimizers in a custom training loop: bit-identical for every placement, with schedulers and parameter groups."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import megatrain
from megatrain.embed import updates_in_ram
from megatrain.embed.ordinary_groups import DeviceCopies
from megatrain.optim.average import WeightAverage
from oracles.embedded import Tied, assert_same_weights, batches, make, pair_of, run_backward, small_store
from tiered import TieredStore
from tiered.ext import HostSlab

KINDS = {
    "adamw": lambda params, **options: megatrain.TieredAdamW(params, lr=1e-2, weight_decay=0.1, **options),
    "lion": lambda params, **options: megatrain.TieredLion(params, lr=1e-3, weight_decay=0.1, **options),
    "sgd": lambda params, **options: megatrain.TieredSGD(params, lr=1e-2, momentum=0.9, nesterov=True, **options),
    "adafactor": lambda params, **options: megatrain.TieredAdafactor(params, lr=1e-2, **options),
}


def muon(params: Any, **options: Any) -> megatrain.TieredMuon:
    """Return an optimizer that uses Muon for matrices and AdamW for all other parameters."""
    own = list(params)
    groups = [
        {"params": [p for p in own if p.ndim == 2]},
        {"params": [p for p in own if p.ndim != 2], "use_muon": False},
    ]
    return megatrain.TieredMuon(groups, lr=1e-2, adjust_lr_fn="match_rms_adamw", **options)


KINDS["muon"] = muon
PLACES: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain, gradients leave": {"offload_gradients": True},
    "plain, on a drive": {"offload_gradients": True, "state": "nvme"},
    "tiered": {"tier": {}},
    "tiered, weights on a drive": {"tier": {"weights": "nvme"}},
    "tiered, gradients on a drive": {"tier": {"gradients": "nvme"}},
    "tiered, all on a drive": {"tier": {"weights": "nvme", "gradients": "nvme"}, "state": "nvme"},
}


def train(
    kind: str, place: dict[str, Any], folder: Path, dtype: torch.dtype, micro: int, max_grad_norm: float
) -> tuple[dict[str, Tensor], list[float | None]]:
    """Train 5 steps. Return the final weights, and the gradient norm of each step."""
    module, _ = pair_of(lambda: make().to(dtype))
    options = {name: value for name, value in place.items() if name != "tier"}
    norms = []
    with small_store(folder) as store:
        if "tier" in place:
            megatrain.offload(module, store, **place["tier"])
        optimizer = KINDS[kind](module.parameters(), store=store, max_grad_norm=max_grad_norm, **options)
        xs = iter(batches(5 * micro, dtype))
        for _ in range(5):
            for _ in range(micro):
                run_backward(module, next(xs), 100 / micro)
            optimizer.step()
            norms.append(optimizer.grad_norm)
            module.zero_grad()
        weights = {name: numbers.clone() for name, numbers in module.state_dict().items()}
        assert all(
            tier.home_bytes <= tier.high_water_bytes <= tier.capacity_bytes for tier in store.stats().tiers.values()
        )
    return weights, norms


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(
    ("dtype", "micro", "max_grad_norm"), [(torch.float32, 1, 0.0), (torch.float32, 3, 0.5), (torch.bfloat16, 1, 0.5)]
)
def test_updates_are_bitwise_equal_for_any_placement(
    kind: str, dtype: torch.dtype, micro: int, max_grad_norm: float, tmp_path: Path
) -> None:
    places = (
        PLACES if kind == "adamw" else {name: PLACES[name] for name in ("plain", "tiered", "tiered, all on a drive")}
    )
    found = {
        name: train(kind, place, tmp_path / str(number), dtype, micro, max_grad_norm)
        for number, (name, place) in enumerate(places.items())
    }
    weights, norms = found["plain"]
    for name, (other, other_norms) in found.items():
        assert other_norms == norms, name
        assert all(torch.equal(numbers, other[key]) for key, numbers in weights.items()), name
    assert (norms[0] is None) == (max_grad_norm == 0)


def test_gradient_buffer_is_freed_before_a_larger_one_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    slabs: list[HostSlab] = []

    def make_slab(nbytes: int, *, pin: bool) -> HostSlab:
        assert pin and all(slab._tensor is None for slab in slabs)
        slabs.append(HostSlab(nbytes))
        return slabs[-1]

    monkeypatch.setattr("megatrain.embed.ordinary_groups.HostSlab", make_slab)
    copies = DeviceCopies()
    monkeypatch.setattr(copies, "_copy", lambda target, source, device: target.copy_(source))
    for count in (10, 5000, 20):
        assert torch.equal(copies.copy_to_ram(torch.arange(count)), torch.arange(count))
    assert [slab.nbytes for slab in slabs] == [4096, 40960]


def test_small_parameters_share_a_kernel_call(tmp_path: Path) -> None:
    parameters = [nn.Parameter(torch.ones(3, 5)) for _ in range(20)]
    with small_store(tmp_path) as store:
        optimizer = megatrain.TieredAdamW(parameters, store=store)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        with mock.patch.object(updates_in_ram, "group_calls", wraps=updates_in_ram.group_calls) as group_calls:
            optimizer.step()
    assert [call.args[0] for call in group_calls.call_args_list] == [[15] * 20]


def test_bf16_with_several_micro_batches(tmp_path: Path) -> None:
    """Plain gradients are summed in bf16, offloaded gradients in fp32. The weights differ by at most 2**-7."""
    names = ["plain", "plain, gradients leave", "tiered", "tiered, all on a drive"]
    found = [train("sgd", PLACES[name], tmp_path / name, torch.bfloat16, 3, 0.5) for name in names]
    for weights, norms in found[2:]:
        assert norms == found[1][1]
        assert all(torch.equal(numbers, found[1][0][key]) for key, numbers in weights.items())
    for key, numbers in found[0][0].items():
        torch.testing.assert_close(numbers, found[1][0][key], rtol=2**-7, atol=2**-7)


def torch_twin(kind: str, parameters: Any) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, foreach=False)
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True, foreach=False)
    return transformers.Adafactor(parameters, lr=1e-2, scale_parameter=False, relative_step=False, warmup_init=False)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adafactor"])
def test_results_match_torch(kind: str, tmp_path: Path) -> None:
    """After 20 steps in fp32, the weights are within a relative 1e-5 of torch's."""
    plain, module = pair_of(make)
    other = torch_twin(kind, plain.parameters())
    with small_store(tmp_path) as store:
        megatrain.offload(module, store, weights="nvme")
        optimizer = KINDS[kind](module.parameters(), max_grad_norm=0.05)
        for x in batches(20):
            run_backward(plain, x)
            run_backward(module, x)
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            other.step()
            optimizer.step()
            plain.zero_grad()
            assert optimizer.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        for expected, found in zip(plain.state_dict().values(), module.state_dict().values(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: numbers.clone() for name, numbers in module.state_dict().items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected) and all(torch.equal(found[name], one) for name, one in expected.items())


AVERAGED = {
    "offloaded": ("adamw", "tiered, all on a drive", torch.bfloat16),
    "ordinary": ("adamw", "plain", torch.float32),
}
OTHERS_AVERAGED = {
    "adafactor": ("adafactor", "tiered", torch.float32),
    "lion": ("lion", "plain, on a drive", torch.bfloat16),
    "sgd": ("sgd", "plain, gradients leave", torch.float32),
}


@pytest.mark.parametrize("case", AVERAGED)
def test_averages_match_torch(case: str, tmp_path: Path) -> None:
    check_averages(*AVERAGED[case], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS_AVERAGED)
def test_averages_of_other_optimizers(case: str, tmp_path: Path) -> None:
    check_averages(*OTHERS_AVERAGED[case], tmp_path)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("adamw", torch.bfloat16), pytest.param("sgd", torch.float32, marks=pytest.mark.slow)],
)
def test_averages_are_updated_for_many_parameters_at_once(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The averages are bit-identical to averages that are updated one group at a time."""

    def train(folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        module, _ = pair_of(lambda: make().to(dtype))
        with small_store(tmp_path / folder) as store:
            optimizer = KINDS[kind](module.parameters(), store=store, ema_decay=0.8)
            for x in batches(3, dtype):
                run_backward(module, x)
                optimizer.step()
                optimizer.zero_grad()
            weights = weights_of(module)
            with optimizer.averaged_parameters():
                return weights, weights_of(module)

    with mock.patch.object(WeightAverage, "supports_rows", False):
        expected = train("apart")
    with mock.patch.object(WeightAverage, "update", side_effect=AssertionError("of one group")):
        found = train("together")
    for mine, others in zip(found, expected, strict=True):
        assert_equal(mine, others)
    assert any(not torch.equal(found[0][name], one) for name, one in found[1].items())


def check_averages(kind: str, place: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Compare averages with torch's ``AveragedModel``.

    Check that they can replace the weights, and be saved and loaded.
    """
    options = dict(PLACES[place])
    tier = options.pop("tier", None)

    def build(folder: str, seed: int = 0, **more: Any) -> tuple[nn.Module, Any, TieredStore]:
        module, _ = pair_of(lambda: make().to(dtype), seed)
        store = stack.enter_context(small_store(tmp_path / folder))
        if tier is not None:
            megatrain.offload(module, store, **tier)
        return module, KINDS[kind](module.parameters(), store=store, **options, **more), store

    def step(module: nn.Module, optimizer: Any, x: Tensor) -> None:
        run_backward(module, x)
        optimizer.step()
        optimizer.zero_grad()

    xs = batches(8, dtype)
    with ExitStack() as stack:
        module, optimizer, store = build("averaged", ema_decay=0.8)
        without, other, _ = build("without")
        with pytest.raises(ValueError, match=r"ema_decay=0\.999"), other.averaged_parameters():
            pass
        twin = make().float()
        twin.load_state_dict(module.state_dict())
        oracle = AveragedModel(twin, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        oracle.update_parameters(twin)  # torch's average starts with the weights of the first call
        with optimizer.averaged_parameters():  # before any step the averages are the weights
            assert_equal(weights_of(module), weights_of(without))
        for x in xs[:4]:
            step(module, optimizer, x)
            step(without, other, x)
            # The averages are of the fp32 masters, also for bf16 weights, so torch's average also gets the masters.
            twin.load_state_dict(masters_of(module, optimizer))
            oracle.update_parameters(twin)
            with optimizer.averaged_parameters():
                averages, said = weights_of(module), forward_without_grad(module, x)
                for name, expected in oracle.module.state_dict().items():
                    torch.testing.assert_close(averages[name].float(), expected, rtol=2**-8, atol=2**-9)
                for forbidden in (optimizer.step, optimizer.state_dict, optimizer.averaged_parameters().__enter__):
                    with pytest.raises(RuntimeError, match=r"inside of averaged_parameters\(\)"):
                        forbidden()
            now = weights_of(module)
            assert_equal(now, weights_of(without))
            assert any(not torch.equal(averages[name], one) for name, one in now.items())
            assert not torch.equal(said, forward_without_grad(module, x))
        for name, parameter in module.named_parameters():
            expected = oracle.module.state_dict()[name]
            found = optimizer.state[parameter]["ema"]
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        # An error inside the context leaves the weights unchanged.
        with pytest.raises(KeyError), optimizer.averaged_parameters():
            raise KeyError
        assert_equal(weights_of(module), now)

        saved, weights = optimizer.state_dict(), weights_of(module)
        resumed, again, _ = build("resumed", seed=9, ema_decay=0.8)
        if tier is None:
            resumed.load_state_dict(weights)
        again.load_state_dict(saved)
        with again.averaged_parameters():
            assert_equal(weights_of(resumed), averages)
        for x in xs[4:]:
            step(module, optimizer, x)
            step(resumed, again, x)
        with again.averaged_parameters(), optimizer.averaged_parameters():
            assert_equal(weights_of(resumed), weights_of(module))
        if kind == "adamw":  # if the loaded state has no averages, they start from the weights
            resumed, again, _ = build("begun", seed=9, ema_decay=0.8)
            resumed.load_state_dict(weights)
            again.load_state_dict(other.full_state_dict())
            with again.averaged_parameters():
                assert_equal(weights_of(resumed), weights)
            assert "ema" not in again.full_state_dict()["state"][0]
        assert all(
            tier.home_bytes <= tier.high_water_bytes <= tier.capacity_bytes for tier in store.stats().tiers.values()
        )


def forward_without_grad(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = module(x)
    return found.clone()


def masters_of(module: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return the fp32 masters: the weights themselves, or bf16 weights combined with their low halves."""
    masters = {name: numbers.float() for name, numbers in module.state_dict().items()}
    optimizer.finish_updates()
    for name, parameter in module.named_parameters():
        group, entry = optimizer._saved.group_of(parameter)
        masters[name] = group.read_master(entry).reshape(parameter.shape).clone()
    return masters


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=8),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10.0),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)],
        milestones=[2],
    ),
    "transformers": lambda o: transformers.get_linear_schedule_with_warmup(o, 2, 6),
}


@pytest.mark.parametrize("name", list(SCHEDULERS))
@pytest.mark.parametrize("is_tiered", [False, True])
def test_schedulers(name: str, is_tiered: bool, tmp_path: Path) -> None:
    plain, module = pair_of(make)
    other = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    with small_store(tmp_path) as store:
        if is_tiered:
            megatrain.offload(module, store)
        optimizer = megatrain.TieredAdamW(module.parameters(), lr=1e-2, store=store)
        schedules = [SCHEDULERS[name](one) for one in (other, optimizer)]
        for x in batches(5):
            for one, chosen, schedule in zip((plain, module), (other, optimizer), schedules, strict=True):
                chosen.zero_grad()
                loss = run_backward(one, x).square().mean()
                chosen.step()
                schedule.step(*([1.0] if name == "plateau" else []))
                assert loss.isfinite()
            for group, twin in zip(optimizer.param_groups, other.param_groups, strict=True):
                assert group["lr"] == twin["lr"] and tuple(group["betas"]) == tuple(twin["betas"])
        schedules[1].load_state_dict(schedules[0].state_dict())
        for expected, found in zip(plain.state_dict().values(), module.state_dict().values(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    named = list(module.named_parameters())
    return [
        {"params": [p for name, p in named if name.endswith("weight")], "betas": (0.8, 0.95), "weight_decay": 0.3},
        {"params": [p for name, p in named if name.endswith("bias")], "lr": 3e-2, "weight_decay": 0.0, "eps": 1e-6},
    ]


@pytest.mark.parametrize("place", ["plain", "plain, on a drive", "tiered, all on a drive"])
def test_groups_of_parameters(place: str, tmp_path: Path) -> None:
    plain, module = pair_of(make)
    other = torch.optim.AdamW(groups_of(plain), lr=1e-2, foreach=False)
    with small_store(tmp_path) as store:
        options = dict(PLACES[place])
        if "tier" in options:
            megatrain.offload(module, store, **options.pop("tier"))
        optimizer = megatrain.TieredAdamW(groups_of(module), lr=1e-2, store=store, **options)
        for step, x in enumerate(batches(6)):
            for one, chosen in ((plain, other), (module, optimizer)):
                chosen.zero_grad()
                run_backward(one, x)
                chosen.step()
                if step == 2:
                    chosen.param_groups[0]["lr"] /= 2
        for expected, found in zip(plain.state_dict().values(), module.state_dict().values(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.01])
def test_cleared_gradients_are_not_used(max_grad_norm: float, tmp_path: Path) -> None:
    """Gradients that were already offloaded are cleared: one gradient before a step, or all between two backwards."""
    plain, module = pair_of(make)
    with small_store(tmp_path) as store:
        options = {"lr": 0.1, "store": store, "max_grad_norm": max_grad_norm}
        twin = megatrain.TieredSGD(plain.parameters(), **options)
        optimizer = megatrain.TieredSGD(module.parameters(), **options, offload_gradients=True, name="offloading")
        xs = batches(3)
        for one, chosen in ((plain, twin), (module, optimizer)):
            run_backward(one, xs[0], 100)
            one[0].weight.grad = None
            chosen.step()
            chosen.zero_grad()
            run_backward(one, xs[1], 100)
            for parameter in one.parameters():
                parameter.grad = None
            run_backward(one, xs[2])
            chosen.step()
        assert_same_weights(plain, module)


class EitherWeight(nn.Module):
    """Module with two weights in one block. Each forward uses one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor, name: str) -> Tensor:
        return x @ (self.first if name == "first" else self.second)


def test_separate_gradients_of_one_block_are_all_used(tmp_path: Path) -> None:
    """One weight's gradient is only on the drive when another weight's gradient arrives."""
    plain, module = pair_of(EitherWeight)
    with small_store(tmp_path, "256KiB") as store:
        megatrain.offload(module, store, gradients="nvme")
        optimizer = megatrain.TieredSGD(module.parameters(), lr=0.5)
        twin = megatrain.TieredSGD(plain.parameters(), lr=0.5, store=store)
        for x, name in zip(batches(3), ("first", "second", "first"), strict=True):
            for one in (plain, module):
                one(x, name).square().mean().backward()
            evict_from_ram(store)
        twin.step()
        optimizer.step()
        assert_same_weights(plain, module)


@pytest.mark.parametrize(
    ("rates", "used"),
    [((1e-1, 1e-2), (("first", "second"),) * 2), ((1e-2, 1e-2), (("first",), ("first", "second")))],
    ids=["rates", "steps"],
)
def test_weights_of_one_block_have_separate_rates_and_steps(
    rates: tuple[float, float], used: tuple[tuple[str, ...], ...], tmp_path: Path
) -> None:
    plain, module = pair_of(EitherWeight)
    with small_store(tmp_path) as store:
        megatrain.offload(module, store)
        groups = [
            [{"params": [one.first], "lr": rates[0]}, {"params": [one.second], "lr": rates[1]}]
            for one in (plain, module)
        ]
        chosen = [torch.optim.AdamW(groups[0], foreach=False), megatrain.TieredAdamW(groups[1])]
        for x, names in zip(batches(2), used, strict=True):
            for one, optimizer in zip((plain, module), chosen, strict=True):
                optimizer.zero_grad()
                for name in names:
                    one(x, name).square().mean().backward()
                optimizer.step()
        for expected, found in zip(plain.state_dict().values(), module.state_dict().values(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_norm_is_measured_in_every_step(tmp_path: Path) -> None:
    """A change through ``data`` keeps the tensor and its version counter, but the next step measures the new norm."""
    plain, module = pair_of(make)
    with small_store(tmp_path) as store:
        optimizer = megatrain.TieredSGD(module.parameters(), lr=0.1, store=store, max_grad_norm=1.0)
        for factor in (1.0, 100.0):
            for parameter in module.parameters():
                parameter.grad = torch.ones_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad.data.mul_(factor)
            optimizer.step()
            assert optimizer.grad_norm == pytest.approx(factor * sum(p.numel() for p in plain.parameters()) ** 0.5)


def evict_from_ram(store: TieredStore) -> None:
    """Evict from RAM every block whose home is elsewhere, and fill the store's free RAM with NaN."""
    for spec in store.blocks():
        if spec.home != "ram" and "ram" in store.where(spec.key):
            store.evict(spec.key, "ram").wait()
    page = store.tier("ram").slot_bytes(1)
    keys = [f"elsewhere/{number}" for number in range(store.tier("ram").usage().free_bytes // page)]
    for key in keys:
        store.register(key, (page // 4,), torch.float32, home="ram")
        with store.acquire(key, "ram", "w") as lease:
            lease.tensor.fill_(torch.nan)
    store.unregister(*keys)


@pytest.mark.parametrize("is_tiered", [False, True])
def test_each_parameter_counts_its_own_steps(is_tiered: bool, tmp_path: Path) -> None:
    """Each parameter counts its own steps, as in torch."""
    plain, module = pair_of(lambda: nn.ModuleList([nn.Linear(8, 8) for _ in range(4)]))
    with small_store(tmp_path) as store:
        if is_tiered:
            megatrain.offload(module, store, leave=["2.*"])
        for one in (plain, module):
            one[2].requires_grad_(False)
        chosen = [
            torch.optim.AdamW(plain[:3].parameters(), lr=1e-2, foreach=False),
            megatrain.TieredAdamW(module[:3].parameters(), lr=1e-2, store=store),
        ]
        for step, x in enumerate(batches(6)):
            for one, optimizer in zip((plain, module), chosen, strict=True):
                optimizer.zero_grad()
                used = (0, 1, 2, 3) if step % 2 else (0, 2, 3)
                (sum(one[number](x) for number in used) * 1.0).square().mean().backward()  # type: ignore[union-attr]
                optimizer.step()
                if step == 2:
                    optimizer.add_param_group({"params": list(one[3].parameters()), "lr": 1e-3})
                    one[2].requires_grad_(True)
        for (name, expected), found in zip(plain.state_dict().items(), module.state_dict().values(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=name)
        steps = [float(chosen[0].state[p]["step"]) for p in plain.parameters()]
        assert steps == [float(chosen[1].state[p]["step"]) for p in module.parameters()] == [6, 6, 3, 3, 3, 3, 3, 3]


def test_two_modules_with_the_same_names_in_one_optimizer(tmp_path: Path) -> None:
    _, one = pair_of(make)
    plain, other = pair_of(make, seed=1)
    with small_store(tmp_path) as store:
        megatrain.offload(one, store, name="one")
        megatrain.offload(other, store, name="other")
        optimizer = megatrain.TieredAdamW([*one.parameters(), *other.parameters()], weight_decay=1.0)
        run_backward(one, batches(1)[0])
        optimizer.step()
        assert_same_weights(plain, other)
        assert all(parameter not in optimizer.state for parameter in other.parameters())
        assert all(parameter in optimizer.state for parameter in one.parameters())


def test_a_closure(tmp_path: Path) -> None:
    plain, module = pair_of(make)
    (x,) = batches(1)
    with small_store(tmp_path) as store:
        megatrain.offload(module, store)
        optimizer = megatrain.TieredAdamW(module.parameters(), max_grad_norm=1.0)
        twin = megatrain.TieredAdamW(plain.parameters(), store=store, max_grad_norm=1.0)

        def closure(one: nn.Module, chosen: torch.optim.Optimizer) -> Callable[[], Tensor]:
            def run() -> Tensor:
                chosen.zero_grad()
                return run_backward(one, x).square().mean()

            return run

        for _ in range(3):
            losses = [chosen.step(closure(one, chosen)) for one, chosen in ((plain, twin), (module, optimizer))]
            assert torch.equal(*losses)
        assert_same_weights(plain, module)


def test_readers_see_the_last_step(tmp_path: Path) -> None:
    plain, module = pair_of(make)
    (x,) = batches(1)
    with small_store(tmp_path) as store:
        megatrain.offload(module, store, weights="nvme")
        optimizer = megatrain.TieredAdamW(module.parameters(), lr=1e-1)
        twin = megatrain.TieredAdamW(plain.parameters(), lr=1e-1, store=store)
        for reads in (
            lambda one: one.state_dict()["0.weight"].clone(),
            lambda one: one(x).detach(),
            lambda one: read(one[0].weight),
            lambda one: (twin if one is plain else optimizer).state[one[0].weight]["exp_avg"].clone(),
        ):
            for one, chosen in ((plain, twin), (module, optimizer)):
                run_backward(one, x)
                chosen.step()
                chosen.zero_grad()
            assert torch.equal(reads(plain), reads(module))


def read(parameter: Tensor) -> Tensor:
    with megatrain.gathered(parameter):
        return parameter.detach().clone()


def test_tied_weights_are_updated_once(tmp_path: Path) -> None:
    plain, module = pair_of(Tied)
    with small_store(tmp_path) as store:
        megatrain.offload(module, store)
        assert module.head.weight is module.embed.weight
        optimizer = megatrain.TieredAdamW(module.parameters(), lr=1e-2)
        twin = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        for x in batches(3):
            for one, chosen in ((plain, twin), (module, optimizer)):
                chosen.zero_grad()
                run_backward(one, x)
                chosen.step()
        state = module.state_dict()
        assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
        torch.testing.assert_close(state["head.weight"], plain.head.weight.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", ["plain, gradients leave", "tiered"])
def test_a_second_step_without_a_backward_warns(place: str, tmp_path: Path) -> None:
    module, _ = pair_of(make)
    options = {name: value for name, value in PLACES[place].items() if name != "tier"}
    with small_store(tmp_path) as store:
        if "tier" in PLACES[place]:
            megatrain.offload(module, store)
        optimizer = KINDS["adamw"](module.parameters(), store=store, **options)
        (x,) = batches(1, torch.float32)
        optimizer.step()  # no backward has run yet
        run_backward(module, x, 1.0)
        optimizer.step()
        after = {name: numbers.clone() for name, numbers in module.state_dict().items()}
        with pytest.warns(UserWarning, match="without a backward since the last step"):
            optimizer.step()
        assert all(torch.equal(numbers, after[name]) for name, numbers in module.state_dict().items())
        run_backward(module, x, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()  # no warning, as in torch: the gradients were cleared
