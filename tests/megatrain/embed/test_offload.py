"""Offloaded modules have the same outputs, gradients and weights as plain modules, bit for bit."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatrain
from megatrain.embed.weights import block_of
from oracles.embedded import (
    HOMES,
    ZOO,
    Checkpointed,
    Tied,
    assert_same_gradients,
    assert_same_weights,
    pair_of,
    run_backward,
    small_store,
    stored_gradient,
)
from tiered import CapacityError


def inputs(count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(4, 8, generator=generator).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("name", list(ZOO))
@pytest.mark.parametrize("homes", ["ram", "all on a drive"])
def test_outputs_gradients_and_weights_match_a_plain_module(name: str, homes: str, tmp_path: Path) -> None:
    plain, module = pair_of(ZOO[name])
    is_away = homes != "ram"
    with small_store(tmp_path) as store:
        assert megatrain.offload(module, store, **HOMES[homes]) is module
        trained = [p for p in plain.parameters() if p.requires_grad]
        twin = megatrain.TieredAdamW(trained, lr=1e-2, store=store, max_grad_norm=1.0)
        state = "nvme" if is_away else "auto"
        optimizer = megatrain.TieredAdamW(module.parameters(), lr=1e-2, max_grad_norm=1.0, state=state)
        xs = iter(inputs(6))
        for _ in range(3):
            for x in (next(xs), next(xs)):
                assert torch.equal(run_backward(plain, x), run_backward(module, x))
                assert_same_gradients(plain, module)
            twin.step()
            optimizer.step()
            assert optimizer.grad_norm == twin.grad_norm
            plain.zero_grad()
            assert all(p.grad is None for p in module.parameters())
        assert_same_weights(plain, module)
        stats = store.stats()
        assert all(tier.home_bytes <= tier.high_water_bytes <= tier.capacity_bytes for tier in stats.tiers.values())
        if is_away:
            assert stats.tiers["ram"].leased_bytes == 0


@pytest.mark.parametrize("name", ["encoder", "tied", "checkpoint", "rooted"])
@pytest.mark.parametrize("homes", list(HOMES))
def test_bf16(name: str, homes: str, tmp_path: Path) -> None:
    """With one micro-batch per step, results are bit-identical to plain bf16. The next test uses several."""
    plain, module = pair_of(lambda: ZOO[name]().bfloat16())
    with small_store(tmp_path) as store:
        megatrain.offload(module, store, **HOMES[homes])
        twin = megatrain.TieredAdamW(plain.parameters(), lr=1e-2, store=store, max_grad_norm=1.0)
        optimizer = megatrain.TieredAdamW(module.parameters(), lr=1e-2, max_grad_norm=1.0)
        for x in inputs(3, torch.bfloat16):
            assert torch.equal(run_backward(plain, x), run_backward(module, x))
            assert_same_gradients(plain, module)
            twin.step()
            optimizer.step()
            plain.zero_grad()
        assert_same_weights(plain, module)


def test_bf16_gradients_are_summed_in_fp32(tmp_path: Path) -> None:
    plain, module = pair_of(lambda: ZOO["sequential"]().bfloat16())
    exact = copy.deepcopy(plain)
    with small_store(tmp_path) as store:
        megatrain.offload(module, store)
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in exact.parameters()]
        for x in inputs(3, torch.bfloat16):
            run_backward(module, x, 1 / 3)
            run_backward(plain, x, 1 / 3)
            run_backward(exact, x, 1 / 3)
            for total, parameter in zip(sums, exact.parameters(), strict=True):
                assert parameter.grad is not None
                total += parameter.grad.float()
            exact.zero_grad()
        for total, parameter, other in zip(sums, module.parameters(), plain.parameters(), strict=True):
            found = stored_gradient(parameter)
            assert found is not None and torch.equal(found, total)
            assert other.grad is not None
            torch.testing.assert_close(
                found, other.grad.float(), rtol=3 * 2**-8, atol=3 * 2**-8 * float(total.abs().max())
            )


@pytest.mark.parametrize("name", ["encoder", "lstm", "tied", "checkpoint", "convolutions"])
def test_autocast(name: str, tmp_path: Path) -> None:
    plain, module = pair_of(ZOO[name])
    with small_store(tmp_path) as store:
        megatrain.offload(module, store, **HOMES["all on a drive"])
        for x in inputs(2):
            outs = []
            for one in (plain, module):
                with torch.autocast("cpu", torch.bfloat16):
                    outs.append(run_backward(one, x))
            assert torch.equal(*outs)
            assert_same_gradients(plain, module)


def test_any_ram_size_works_or_is_refused_before_training(tmp_path: Path) -> None:
    """A store that is too small is refused before the first step, never in the middle of a step."""
    size, refused, worked = 16 << 10, 0, 0
    while worked < 3:
        _, module = pair_of(lambda: Tied(reads_directly=True))
        model = nn.Sequential(nn.Linear(8, 8), module)
        with small_store(tmp_path / str(size), size) as store:
            told: CapacityError | None = None
            try:
                megatrain.offload(model, store)
                optimizer = megatrain.TieredAdamW(model.parameters(), max_grad_norm=1.0)
            except CapacityError as error:
                told = error
            if told is not None:
                refused += 1
                assert told.tier in ("ram", "nvme") and "Increase" in str(told), str(told)
            else:
                worked += 1
                for x in inputs(2):
                    run_backward(model, x)
                    optimizer.step()
                optimizer.state_dict()
                assert 0.5 * size < store.stats().tiers["ram"].high_water_bytes <= size
        size = int(size * 1.1) // 4096 * 4096 + 4096
    assert refused > 2


def test_no_grad_forwards_between_training_steps(tmp_path: Path) -> None:
    plain, module = pair_of(ZOO["encoder"])
    with small_store(tmp_path) as store:
        megatrain.offload(module, store, **HOMES["all on a drive"])
        for x in inputs(2):
            out, expected = module(x), plain(x)
            with torch.no_grad():
                assert torch.equal(module(x), expected)
            with torch.inference_mode():
                assert torch.equal(module(x), expected)
            module.eval()
            with torch.no_grad():
                module(x)
            module.train()
            out.sum().backward()
            expected.sum().backward()
            assert_same_gradients(plain, module)


def test_retain_graph_and_autograd_grad(tmp_path: Path) -> None:
    plain, module = pair_of(ZOO["tied"])
    with small_store(tmp_path) as store:
        megatrain.offload(module, store, **HOMES["all on a drive"])
        (x,) = inputs(1)
        for one in (plain, module):
            loss = one(x).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
        assert_same_gradients(plain, module)
        grads = [torch.autograd.grad(one(x).square().mean(), list(one.parameters())) for one in (plain, module)]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
        assert_same_gradients(plain, module)


def test_a_backward_in_another_thread(tmp_path: Path) -> None:
    plain, module = pair_of(ZOO["encoder"])
    with small_store(tmp_path) as store:
        megatrain.offload(module, store, **HOMES["all on a drive"])
        optimizer = megatrain.TieredAdamW(module.parameters())
        for x in inputs(2):
            run_backward(plain, x)
            loss = module(x).float().square().mean()
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
            assert_same_gradients(plain, module)
        optimizer.step()
        optimizer.finish_updates()


class _Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.parametrize("where", ["forward", "interrupt", "backward", "recompute"])
def test_training_continues_after_an_error(where: str, tmp_path: Path) -> None:
    fails = _Fails()
    plain, module = pair_of(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), fails, nn.ReLU()), nn.Linear(8, 8))
    )
    broken = module[1][1]
    with small_store(tmp_path) as store:
        megatrain.offload(module, store, **HOMES["all on a drive"])
        optimizer = megatrain.TieredAdamW(module.parameters(), lr=1e-2)
        twin = megatrain.TieredAdamW(plain.parameters(), lr=1e-2, store=store)
        x, y = inputs(2)
        if where in ("forward", "interrupt"):
            broken.error = OSError("the line is cut") if where == "forward" else KeyboardInterrupt()
            with pytest.raises(type(broken.error)):
                module(x)
        else:
            out = (
                module(x) if where == "backward" else torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)
            )
            if where == "backward":
                out.register_hook(lambda gradient: (_ for _ in ()).throw(OSError("cut")))
                out = out.sum()
            else:
                out, broken.error = out.sum(), OSError("cut")
            with pytest.raises(OSError, match="cut"):
                out.backward()
        broken.error = None
        module.zero_grad()
        for one in (x, y):
            run_backward(plain, one)
            run_backward(module, one)
            assert_same_gradients(plain, module)
        twin.step()
        optimizer.step()
        assert_same_weights(plain, module)
        assert store.stats().tiers["ram"].leased_bytes == 0


def test_a_graph_that_is_out_of_date_is_refused(tmp_path: Path) -> None:
    """Plain torch detects the update from the weights' version counters, which hooks on saved tensors hide."""
    _, module = pair_of(ZOO["sequential"])
    with small_store(tmp_path) as store:
        megatrain.offload(module, store)
        optimizer = megatrain.TieredAdamW(module.parameters())
        x, y = inputs(2)
        old = module(x.requires_grad_()).sum()
        run_backward(module, y)
        optimizer.step()
        with pytest.raises(RuntimeError, match="Run the forward again"):
            old.backward()


def test_activations_that_were_changed_in_place_are_refused(tmp_path: Path) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.sigmoid(self.layer(x))
            y += 1
            return y

    plain, module = pair_of(InPlace)
    with small_store(tmp_path) as store:
        megatrain.offload(module, store)
        for one in (plain, module):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                one(inputs(1)[0]).sum().backward()


def test_two_modules_in_one_store(tmp_path: Path) -> None:
    plain, module = pair_of(ZOO["encoder"])
    _, reference = pair_of(ZOO["encoder"], seed=1)
    with small_store(tmp_path) as store:
        megatrain.offload(module, store)
        with pytest.raises(ValueError, match="name="):
            megatrain.offload(reference, store)
        assert all(block_of(p) is None for p in reference.parameters())
        megatrain.offload(reference.requires_grad_(False), store, name="reference")
        (x,) = inputs(1)
        (module(x) - reference(x)).square().mean().backward()
        _, same = pair_of(ZOO["encoder"], seed=1)
        (plain(x) - same(x).detach()).square().mean().backward()
        assert_same_gradients(plain, module)


def test_layers_of_a_tiered_module_can_be_called_alone(tmp_path: Path) -> None:
    plain, module = pair_of(ZOO["encoder"])
    with small_store(tmp_path) as store:
        megatrain.offload(module, store, weights="nvme")
        x = torch.randn(2, 3, 8)
        assert torch.equal(module.encoder.layers[1](x), plain.encoder.layers[1](x))


def _clamp(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.01, 0.01)


def test_sparse_gradients_are_used_as_dense_ones(tmp_path: Path) -> None:
    plain, module = pair_of(lambda: Tied(sparse=True))
    with small_store(tmp_path) as store:
        megatrain.offload(module, store)
        for x in inputs(2):
            plain.zero_grad()
            module.zero_grad()
            run_backward(plain, x)
            run_backward(module, x)
            assert_same_gradients(plain, module)


def test_user_hooks_run_and_failing_hooks_leave_no_blocks(tmp_path: Path) -> None:
    plain, module = pair_of(ZOO["sequential"])
    seen: list[Any] = []
    module[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    with small_store(tmp_path) as store:
        megatrain.offload(module, store)
        before = dict(module.named_parameters())
        for one in (plain, module):
            one[2].weight.register_post_accumulate_grad_hook(_clamp)
            one[2].bias.register_hook(lambda gradient: gradient * 2)
        handle = module[0].register_forward_pre_hook(lambda *_: 1 / 0, prepend=True)
        (x,) = inputs(1)
        with pytest.raises(ZeroDivisionError):
            module(x)
        handle.remove()
        assert torch.equal(run_backward(plain, x), run_backward(module, x))
        assert_same_gradients(plain, module)
        assert torch.equal(seen[0], plain[0].weight.grad)
        assert all(before[name] is parameter for name, parameter in module.named_parameters())


def test_meta_device_module_can_be_loaded_after_offload(tmp_path: Path) -> None:
    plain, _ = pair_of(ZOO["encoder"])
    with torch.device("meta"):
        module = ZOO["encoder"]()
    with small_store(tmp_path) as store:
        megatrain.offload(module, store, weights="nvme")
        (x,) = inputs(1)
        with pytest.raises(RuntimeError, match="no values yet"):
            module(x)
        module.load_state_dict(plain.state_dict())
        assert torch.equal(run_backward(plain, x), run_backward(module, x))
        assert_same_gradients(plain, module)


@pytest.mark.filterwarnings("ignore")  # the compiler warns about code that it cannot trace
def test_compiled_module(tmp_path: Path) -> None:
    plain, module = pair_of(ZOO["sequential"])
    with small_store(tmp_path) as store:
        megatrain.offload(module, store)
        compiled = torch.compile(module, backend="eager")
        for x in inputs(2):
            plain.zero_grad()
            module.zero_grad()
            assert torch.equal(run_backward(plain, x), run_backward(compiled, x))
            assert_same_gradients(plain, module)


def test_checkpointed_modules_are_recomputed() -> None:
    """Otherwise the tests with checkpointed modules would prove nothing."""
    model = Checkpointed(reentrant=False, inside=True)
    calls: list[None] = []
    model.blocks[0].mlp[0].register_forward_hook(lambda *_: calls.append(None))
    run_backward(model, inputs(1)[0])
    assert len(calls) == 2
