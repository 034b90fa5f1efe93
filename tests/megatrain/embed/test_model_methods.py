"""Using an offloaded module outside of its forward works, or is refused with a remedy."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatrain
from megatrain.embed.absent_parameters import AbsentWeightError, StoredParameter
from megatrain.embed.partition import OffloadError
from megatrain.embed.patches.module_methods import log_ignored_move
from megatrain.embed.weights import WeightInUseError, block_of
from oracles.embedded import RootParameters, Tied, assert_same_weights, pair_of, run_backward, small_store
from tiered import TieredStore

TWO = 2


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))


@pytest.fixture(params=["ram", "nvme"])
def home(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with small_store(tmp_path) as one:
        yield one


def x() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "sum": lambda p: p.sum(),
    "add": lambda p: p + 1,
    "compare": lambda p: p == p.new_zeros(()) if False else p.eq(0),
    "in place": lambda p: p.mul_(2),
    "data in place": lambda p: p.data.mul_(2),
    "detach": lambda p: p.detach().norm(),
    "numpy": lambda p: p.detach().numpy(),
    "list": lambda p: p.tolist(),
    "pointer": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "index": lambda p: p[0],
    "assign": lambda p: p.__setitem__(0, 0.0),
    "copy to": lambda p: p.copy_(torch.zeros(8, 8)),
    "copy from": lambda p: torch.zeros(8, 8).copy_(p),
    "out": lambda p: torch.add(torch.zeros(8, 8), 1, out=p.data),
    "to": lambda p: p.to(torch.float64),
    "clone": lambda p: p.clone(),
    "stack": lambda p: torch.stack([torch.zeros(8, 8), p]),
    "foreach": lambda p: torch._foreach_add([p], 1.0),
    "functional": lambda p: nn.functional.linear(torch.zeros(1, 8), p),
    "transposed": lambda p: torch.zeros(1, 8) @ p.T,
    "init": lambda p: nn.init.zeros_(p),
    "pickle": lambda p: torch.save(p, io.BytesIO()),
    "deepcopy": lambda p: copy.deepcopy(p),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "allclose": lambda p: torch.allclose(p, p),
    "printed": lambda p: format(p.sum(), ".3f"),
    "share": lambda p: p.share_memory_(),
}


def test_reading_an_offloaded_weight_is_refused_by_name(store: TieredStore) -> None:
    for home in ("ram", "nvme"):
        module = megatrain.offload(make(), store, weights=home, name=home)
        for read in READS.values():
            with torch.no_grad(), pytest.raises(AbsentWeightError) as caught:
                read(module[0].weight)
            assert re.fullmatch(
                r"\w+: the values of 0\.weight are in the tiered store\. They are in memory during the forward and "
                r"backward of the module\. Elsewhere, use `with megatrain\.gathered\(module\):` to read or change "
                r"them, or megatrain\.named_tensors\(model\) to send them to another program",
                str(caught.value),
            )


def test_offloaded_parameters_report_their_metadata(home: str, store: TieredStore) -> None:
    plain, module = pair_of(make)
    before = list(module.parameters())
    megatrain.offload(module, store, weights=home)
    for one, other in zip(plain.parameters(), module.parameters(), strict=True):
        assert isinstance(other, nn.Parameter) and isinstance(other, StoredParameter)
        assert (one.shape, one.dtype, one.device, one.requires_grad) == (
            other.shape,
            other.dtype,
            other.device,
            other.requires_grad,
        )
        assert (one.numel(), one.dim(), one.size(0), one.is_leaf, one.element_size(), len(one)) == (
            other.numel(),
            other.dim(),
            other.size(0),
            other.is_leaf,
            other.element_size(),
            len(other),
        )
        assert other.grad is None and other in set(module.parameters())
        assert str(tuple(one.shape)) in repr(other) and repr(other.detach())
    assert all(a is b for a, b in zip(before, module.parameters(), strict=True))
    assert str(plain) == str(module)
    run_backward(module, x())
    assert "gradient of 0.weight" in repr(module[0].weight.grad) and module[0].weight.grad.shape == (8, 8)
    module.requires_grad_(False)
    assert not module(x()).requires_grad
    module.requires_grad_(True)


def test_parameter_memory_is_released(home: str, store: TieredStore) -> None:
    module = make()
    storages = [parameter.untyped_storage()._weak_ref() for parameter in module.parameters()]
    megatrain.offload(module, store, weights=home)
    gc.collect()
    assert all(torch.UntypedStorage._expired(one) for one in storages)
    for one in storages:
        torch.UntypedStorage._free_weak_ref(one)
    run_backward(module, x())
    with torch._C.DisableTorchFunctionSubclass():
        assert all(parameter.untyped_storage().nbytes() == 4 for parameter in module.parameters())


def test_gathered_reads_and_changes(home: str, store: TieredStore) -> None:
    plain, module = pair_of(make)
    megatrain.offload(module, store, weights=home)
    with megatrain.gathered(module):
        for one, other in zip(plain.parameters(), module.parameters(), strict=True):
            assert torch.equal(one, other)
        with megatrain.gathered(module[0]):
            assert torch.equal(module(x()), plain(x()))
        kept = module[0].weight.detach().clone()
    for one in (plain, module):
        with torch.no_grad(), megatrain.gathered(one, writable=True):
            one[0].weight.mul_(TWO)
            one[0].bias.data = torch.full((8,), 5.0)
            one[1][0].weight.data.add_(1)
            one[1][0].bias.detach().numpy()[:] = 7
    assert torch.equal(module.state_dict()["0.weight"], kept * TWO)
    assert_same_weights(plain, module)
    with megatrain.gathered([module[0].weight, nn.Parameter(torch.zeros(1))]):
        assert torch.equal(module[0].weight, plain[0].weight)
    with contextlib.suppress(KeyError), megatrain.gathered(module, writable=True), torch.no_grad():
        for one in (plain, module):
            one[0].weight.zero_()
        raise KeyError
    assert_same_weights(plain, module)


def test_changes_while_reading_are_refused(store: TieredStore) -> None:
    ways = product(("in place", "data", "data replaced"), ("gathered", "forward"), ("ram", "nvme"))
    for index, (way, when, home) in enumerate(ways):
        check_change_is_refused(way, when, home, store, f"m{index}")


def check_change_is_refused(way: str, when: str, home: str, store: TieredStore, name: str) -> None:
    def change(weight: nn.Parameter) -> None:
        with torch.no_grad():
            if way == "in place":
                weight.mul_(TWO)
            elif way == "data":
                weight.data.mul_(TWO)
            else:
                weight.data = weight.data * TWO

    def run() -> None:
        if when == "forward":
            module(x())
            return
        with megatrain.gathered(module):
            change(module[0].weight)

    class Changes(nn.Linear):
        def forward(self, y: Tensor) -> Tensor:
            change(self.weight)
            return super().forward(y)

    module = nn.Sequential(Changes(8, 8), nn.Linear(8, 8))
    megatrain.offload(module, store, weights=home, name=name)
    try:  # also while another exception is being handled
        raise OSError
    except OSError:
        with pytest.raises(WeightInUseError, match=r"0\.weight was changed.*writable=True"):
            run()


def test_changed_weights_are_kept_despite_another_error(store: TieredStore) -> None:
    """The next save makes a new generation, and the low half of the changed weight's master is zero."""
    _, module = pair_of(lambda: make().bfloat16())
    megatrain.offload(module, store)
    optimizer = megatrain.TieredAdamW(module.parameters(), lr=1e-3)
    run_backward(module, x().bfloat16())
    optimizer.step()
    first = optimizer.state_dict()["tiered"]["generation"]
    try:
        raise OSError
    except OSError:
        with torch.no_grad(), megatrain.gathered(module[0].weight, writable=True):
            module[0].weight.fill_(0.5)
    assert optimizer.state_dict()["tiered"]["generation"] == first + 1
    group = optimizer.groups[0]
    with store.acquire(group.state.keys["low"], "ram") as lease:
        low = {entry.name: group.state.view("low", lease.tensor, entry).clone() for entry in group.layout.entries}
    assert not low["0.weight"].any() and low["0.bias"].any()


def test_a_view_that_outlives_its_weights_is_refused(store: TieredStore) -> None:
    class Leaks(nn.Linear):
        def forward(self, y: Tensor) -> Tensor:
            self.kept = self.weight.detach()[0]
            return super().forward(y)

    module = nn.Sequential(Leaks(8, 8), nn.Linear(8, 8))
    megatrain.offload(module, store, weights="nvme")
    with pytest.raises(WeightInUseError, match="a view of the weights"):
        module(x())
    with pytest.raises(WeightInUseError, match="a view of the weights"), megatrain.gathered(module[1]):
        kept = module[1].weight.detach()
    assert kept.shape == (8, 8)


def test_returned_parameters_work_or_are_refused(home: str, store: TieredStore) -> None:
    """A module that returns a parameter, or a view of a parameter, works correctly or is refused."""

    class Positions(nn.Module):
        def __init__(self, whole: bool) -> None:
            super().__init__()
            self.table, self.whole = nn.Parameter(torch.randn(8, 8)), whole

        def forward(self) -> Tensor:
            return self.table if self.whole else self.table[:4]

    class Model(nn.Module):
        def __init__(self, whole: bool) -> None:
            super().__init__()
            self.positions, self.layer = Positions(whole), nn.Linear(8, 8)

        def forward(self, y: Tensor) -> Tensor:
            return self.layer(y * self.positions()[:4])

    for whole in (True, False):
        plain, module = pair_of(lambda whole=whole: Model(whole))
        megatrain.offload(module, store, weights=home, name=f"whole{whole}")
        run_backward(plain, x())
        if home == "nvme" and not whole:
            with pytest.raises(WeightInUseError, match="leave="):
                run_backward(module, x())
        else:
            run_backward(module, x())
            with store.acquire(block_of(module.layer.weight).gradients.key, "ram"):
                assert module.positions.table.grad is not None


def test_computation_inside_gathered_is_differentiable(home: str, store: TieredStore) -> None:
    plain, module = pair_of(make)
    megatrain.offload(module, store, weights=home)
    y = x().requires_grad_()
    with megatrain.gathered(module[0]):
        loss = nn.functional.linear(y, module[0].weight).square().sum()
    loss.backward()
    expected = x().requires_grad_()
    nn.functional.linear(expected, plain[0].weight).square().sum().backward()
    assert torch.equal(y.grad, expected.grad) and module[0].weight.grad is not None


def test_state_dict(home: str, store: TieredStore, tmp_path: Path) -> None:
    plain, module = pair_of(lambda: nn.Sequential(Tied(), RootParameters(), make()))
    megatrain.offload(module, store, weights=home)
    assert_same_weights(plain, module)
    assert_same_weights(plain[0], module[0])
    state = module.state_dict()
    assert state["0.head.weight"] is state["0.embed.weight"]
    assert not any(isinstance(one, nn.Parameter) for one in state.values())
    state["0.head.weight"].zero_()  # the state dict is the caller's copy, so this does not change the module
    assert_same_weights(plain, module)
    variables = module.state_dict(keep_vars=True)
    assert variables["0.head.weight"] is module[0].embed.weight
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    other = nn.Sequential(Tied(), RootParameters(), make())
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert_same_weights(plain, other)
    assert [type(one) for one in module.state_dict(prefix="p.")] == [str] * len(state)


def test_load_state_dict(home: str, store: TieredStore) -> None:
    source, module = make(), make()
    megatrain.offload(module, store, weights=home)
    module.load_state_dict(source.state_dict())
    assert_same_weights(source, module)
    extra = {**make().state_dict(), "other": torch.zeros(1)}
    with pytest.raises(RuntimeError, match="Unexpected key"):
        module.load_state_dict(extra)
    part = {"0.weight": torch.ones(8, 8)}
    with pytest.raises(RuntimeError, match="Missing key"):
        module.load_state_dict(part)
    result = module.load_state_dict(part, strict=False)
    assert len(result.missing_keys) == 7 and bool((module.state_dict()["0.weight"] == 1).all())
    with pytest.raises(RuntimeError, match="size mismatch"):
        module.load_state_dict({"0.weight": torch.ones(2)}, strict=False)
    with pytest.raises(OffloadError, match="assign=True"):
        module.load_state_dict(source.state_dict(), assign=True)
    module[1].load_state_dict(source[1].state_dict())
    assert_same_weights(source[1], module[1])
    module(x()).sum().backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traces_of_jit_are_refused(store: TieredStore) -> None:
    """Every way to start a trace is refused, and the module still works."""
    model = make().eval()
    expected = model(x())
    megatrain.offload(model, store)
    for module in (model, model[0], nn.Sequential(model)):
        with pytest.raises(OffloadError, match=r"torch\.jit\.trace does not support.*ordinary module"):
            torch.jit.trace(module, x())
    assert torch.equal(model(x()), expected)


def test_copies_and_pickles_are_refused(store: TieredStore) -> None:
    module = megatrain.offload(make(), store)
    for spoil in (
        lambda: copy.deepcopy(module),
        lambda: copy.deepcopy(module[1]),
        lambda: copy.deepcopy({"model": module}),
        lambda: torch.save(module, io.BytesIO()),
        lambda: torch.save(module[1], io.BytesIO()),
    ):
        with pytest.raises(AbsentWeightError):
            spoil()


def test_conversions_are_refused_and_moves_ignored(store: TieredStore) -> None:
    module = megatrain.offload(make(), store)
    for spoil in (module.half, module.bfloat16, module.double, lambda: module.to(torch.float16), module[1].half):
        with pytest.raises(OffloadError, match="Convert it before"):
            spoil()
    assert all(buffer.dtype in (torch.float32, torch.int64) for buffer in module.buffers())
    assert module.to("cpu") is module.cpu() is module.float() is module.to(torch.float32) is module
    module.to("meta")
    assert all(one.device.type == "cpu" for one in [*module.parameters(), *module.buffers()])
    run_backward(module, x())


def test_ignored_move_reports_the_input_device(store: TieredStore, caplog: pytest.LogCaptureFixture) -> None:
    module = megatrain.offload(make(), store)
    log_ignored_move.cache_clear()
    module.to("cpu")
    assert not caplog.records
    module.to("meta")  # represents any device that the store does not compute on
    module.to("meta")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert 'to "meta" is ignored, because its store' in record.message and 'gpu="auto"' in record.message


def test_excluded_parameters_stay_ordinary(store: TieredStore) -> None:
    plain, module = pair_of(make)
    megatrain.offload(module, store, leave=["1.1.*", "0.bias"])
    assert [block_of(p) is None for p in module.parameters()] == [False, True, False, False, True, True]
    optimizers = [
        megatrain.TieredAdamW(plain.parameters(), lr=1e-2, store=store, max_grad_norm=0.1, name="plain"),
        megatrain.TieredAdamW(module.parameters(), lr=1e-2, max_grad_norm=0.1),
    ]
    for _ in range(3):
        for one, optimizer in zip((plain, module), optimizers, strict=True):
            optimizer.zero_grad()
            run_backward(one, x())
            optimizer.step()
    assert optimizers[0].grad_norm == optimizers[1].grad_norm
    assert_same_weights(plain, module)


def test_unsupported_modules_are_refused(store: TieredStore) -> None:
    module = make()
    for spoil, message in (
        (lambda: megatrain.offload(nn.ReLU(), store), "ReLU has no parameters to offload"),
        (
            lambda: megatrain.offload(nn.Linear(2, 2), store, leave=["*"]),
            "Linear has no parameters to offload besides ['*']",
        ),
        (
            lambda: megatrain.offload(make().half(), store),
            "0.weight is trained in torch.float16, but master weights exist only for float32 and bfloat16. First "
            "convert the model: model.to(torch.bfloat16)",
        ),
        (
            lambda: megatrain.offload(make().double(), store),
            "0.weight is trained in torch.float64, but master weights exist only for float32 and bfloat16. First "
            "convert the model: model.to(torch.bfloat16)",
        ),
        (
            lambda: megatrain.offload(make(), store, weights="tape"),
            'this store has no tier "tape", only ram, nvme. Pass "auto" or one of these',
        ),
        *(
            (
                lambda start=start: megatrain.offload(shared_memory(start), store),
                "0.weight and 1.0.weight are two parameters that share memory. Tie them by assigning one parameter to "
                "both modules: module.weight = the other module's parameter",
            )
            for start in (0, 63)
        ),
        (
            lambda: megatrain.offload(make_integer_module(), store),
            'steps has the dtype torch.int64. Leave it out: leave=["steps"]',
        ),
        (
            lambda: megatrain.offload(make(), store, gradient_lanes=2),
            "gradient_lanes without group: a single process adds gradients in order of arrival",
        ),
    ):
        with pytest.raises(ValueError) as caught:
            spoil()
        assert str(caught.value) == message
    assert not list(store.blocks())
    megatrain.offload(shared_memory(64), store, name="neighbours")
    megatrain.offload(module, store)
    with pytest.raises(OffloadError) as refused:
        megatrain.offload(module, store, name="again")
    assert str(refused.value) == "0.weight is already in a store, because megatrain.offload was called before"
    with pytest.raises(OffloadError) as refused:
        megatrain.offload(make(), store)
    assert str(refused.value) == (
        'this store already has a module "model". Choose another: megatrain.offload(..., name="...")'
    )
    frozen = make().half().requires_grad_(False)
    megatrain.offload(frozen, store, name="frozen")
    assert frozen[0](x().half()).dtype == torch.float16


def shared_memory(start: int) -> nn.Module:
    """Return a module whose second weight begins at this element of the memory of the first, which has 64 elements."""
    module, memory = make(), torch.randn(128)
    module[0].weight.data, module[1][0].weight.data = memory[:64].view(8, 8), memory[start : start + 64].view(8, 8)
    return module


def make_integer_module() -> nn.Module:
    module = make()
    module.register_parameter("steps", nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False))
    return module


def test_training_weights_frozen_at_offload_raises(store: TieredStore) -> None:
    module = make()
    module[0].requires_grad_(False)
    megatrain.offload(module, store)
    optimizer = megatrain.TieredAdamW(module.parameters())
    run_backward(module, x())
    optimizer.step()
    module[0].requires_grad_(True)
    with pytest.raises(WeightInUseError, match="frozen when it was offloaded"):
        module(x())


def test_functional_call_uses_the_given_parameters(home: str, store: TieredStore) -> None:
    plain, module = pair_of(make)
    megatrain.offload(module, store, weights=home)
    other = {name: numbers + 1 for name, numbers in plain.state_dict().items() if numbers.is_floating_point()}
    results = [torch.func.functional_call(one, dict(other), (x(),)) for one in (plain, module)]
    assert torch.equal(*results)
    own = torch.func.functional_call(module, dict(module.named_parameters()), (x(),))
    assert torch.equal(own, torch.func.functional_call(plain, dict(plain.named_parameters()), (x(),)))


def test_module_of_a_closed_store_raises(tmp_path: Path) -> None:
    module = make()
    with small_store(tmp_path) as store:
        megatrain.offload(module, store)
    with pytest.raises(Exception, match="the store is closed"):
        module(x())
