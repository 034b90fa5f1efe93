"""``offload_activations``: gradients are bit-identical to plain PyTorch's, and memory stays within its limits."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from megatrain import offload_activations
from megatrain.embed.source_storages import WeakStorage
from oracles.tiered_run import write_tiny_model
from tiered import CapacityError, GpuTier, KiB, MiB, NvmeTier, RamTier, TieredError, TieredStore

Step = Callable[[], Tensor]


def open_store(folder: Path, ram_bytes: int = 8 * MiB, nvme_bytes: int = 256 * MiB) -> TieredStore:
    return TieredStore([RamTier(ram_bytes, pin_memory=False), NvmeTier([folder / "drive"], nvme_bytes)])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    with open_store(tmp_path) as opened:
        yield opened


def gradients(parameters: list[Tensor], step: Step, context: offload_activations | None = None) -> list[Tensor]:
    """Return the loss and all gradients of one step."""
    for parameter in parameters:
        parameter.grad = None
    torch.manual_seed(1)
    if context is None:
        loss = step()
    else:
        with context:
            loss = step()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in parameters if parameter.grad is not None)]


def saved_storages(step: Step, stays: Iterable[Tensor]) -> list[int]:
    """Return the size in bytes of each storage that plain PyTorch saves for the backward, except those in ``stays``."""
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        step()
    stay = {tensor.untyped_storage().data_ptr() for tensor in stays}
    return [storage.nbytes() for address, storage in found.items() if address not in stay]


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) > 1
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


def mlp() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 256),
        nn.GELU(),
        nn.LayerNorm(256),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(256, 64),
    )
    return model, torch.randn(128, 64)


class Attention(nn.Module):
    """Attention whose q, k and v are views of one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)
        self.register_buffer("scale", torch.rand(1, 1, 64, 64))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(*x.shape[:2], 4, 16).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        fused = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = torch.softmax(q @ k.transpose(-1, -2) * self.scale.expand(2, 4, 64, 64), dim=-1)
        return (fused + scores @ v).transpose(1, 2).reshape(x.shape)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 8, 3, stride=2)
        self.norm = nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu_(self.norm(self.first(x.to(memory_format=torch.channels_last))))
        return nn.functional.max_pool2d(self.second(x), 2)


class Recurrent(nn.Module):
    """A fused LSTM, followed by a GRU cell in a loop. Each call of the cell gets a view of the LSTM's output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.cell = nn.LSTM(32, 48, num_layers=2, batch_first=True), nn.GRUCell(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        state = torch.zeros_like(y[:, 0])
        for t in range(y.shape[1]):
            state = self.cell(y[:, t], state)
        return state


def case(name: str) -> tuple[nn.Module, Step]:
    torch.manual_seed(0)
    model, x = {
        "mlp": mlp,
        "attention": lambda: (Attention(), torch.randn(2, 64, 64)),
        "convolutions": lambda: (Convolutions(), torch.randn(2, 3, 32, 32)),
        "recurrent": lambda: (Recurrent(), torch.randn(4, 12, 32)),
    }[name]()
    return model, lambda: model(x).square().mean()


@pytest.mark.parametrize("knows_model", [False, True])
@pytest.mark.parametrize("name", ["mlp", "attention", "convolutions", "recurrent"])
def test_gradients_match_plain_pytorch_bitwise(store: TieredStore, name: str, knows_model: bool) -> None:
    model, step = case(name)
    parameters = list(model.parameters())
    buffers = {key: value.clone() for key, value in model.state_dict().items()}
    expected = gradients(parameters, step)
    saved = sum(saved_storages(step, [*parameters, *(model.buffers() if knows_model else [])]))
    model.load_state_dict(buffers)
    activations = offload_activations(store, min_bytes=1, model=model if knows_model else None)
    assert_same_bits(gradients(parameters, step, activations), expected)
    stats = activations.stats()
    assert stats.no_room_bytes == 0
    # The LSTM may save a 2 KiB storage, free it, and save the same values again.
    assert stats.offloaded_bytes == saved or (name == "recurrent" and 0 <= stats.offloaded_bytes - saved <= 2 * KiB)
    # The input is still in memory in the backward, and so are the buffers of a model that the context does not know.
    # These tensors need not be read back.
    alive = {"mlp": 128 * 64, "attention": 2 * 64 * 64}.get(name, 0)
    if not knows_model:
        alive += sum(buffer.numel() for buffer in model.buffers() if buffer.is_floating_point())
    assert stats.restored_bytes == stats.offloaded_bytes + stats.deduplicated_bytes - 4 * alive
    assert stats.in_use_bytes == 0, "the graph is gone"


def test_language_model_gradients_match_bitwise(store: TieredStore, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path / "model"), attn_implementation="sdpa")
    model.train()
    tokens = torch.randint(0, 1024, (2, 96))
    parameters = list(model.parameters())

    def step() -> Tensor:
        return model(input_ids=tokens, labels=tokens).loss

    expected = gradients(parameters, step)
    activations = offload_activations(store, min_bytes=16 * KiB)
    for _ in range(2):
        assert_same_bits(gradients(parameters, step, activations), expected)
    stats = activations.stats()
    # q, k and v save the same input, and so do gate and up. In two steps, each of four layers avoids three or more
    # copies.
    hidden_bytes = tokens.numel() * model.config.hidden_size * 4
    assert 2 * 4 * 3 * hidden_bytes <= stats.deduplicated_bytes < 2 * 4 * 10 * hidden_bytes
    assert stats.no_room_bytes == 0 and stats.in_use_bytes == 0
    for layer in model.model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    before = stats.offloaded_bytes
    assert_same_bits(gradients(parameters, step, activations), expected)
    assert 0 < activations.stats().offloaded_bytes - before < before / 4, "only inputs of the layers"


class Saved(torch.autograd.Function):
    """Autograd function that saves tensors. The function ``saved`` returns what the backward would get."""

    @staticmethod
    def forward(ctx, x: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *[None] * len(ctx.saved_tensors)


def save(*tensors: Tensor) -> Tensor:
    return Saved.apply(torch.zeros(1, requires_grad=True), *tensors)


def saved(graph: Tensor) -> tuple[Tensor, ...]:
    return graph.grad_fn.saved_tensors


def bits(tensor: Tensor) -> list[int]:
    """Return the bytes of all elements in logical order."""
    plain = tensor.resolve_conj().resolve_neg()
    return torch.empty(plain.shape, dtype=plain.dtype).copy_(plain).view(-1).view(torch.uint8).tolist()


def random_memory(num_bytes: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.complex128]
DTYPES += [torch.uint8, torch.int16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(store: TieredStore, dtype: torch.dtype) -> None:
    memory = random_memory(96 * dtype.itemsize) if dtype is not torch.bool else random_memory(96) % 2
    tensor = memory.view(dtype).view(8, 12)
    expected = bits(tensor)
    activations = offload_activations(store, min_bytes=1)
    with activations:
        graph = save(tensor, tensor[2:, 1::5], tensor.t())
    stats = activations.stats()
    # The whole storage is stored once. The strided view stores its own 6 x 3 elements.
    assert stats.offloaded_bytes == (8 * 12 + 6 * 3) * dtype.itemsize
    assert stats.deduplicated_bytes == 8 * 12 * dtype.itemsize
    del tensor, memory
    whole, part, turned = saved(graph)
    assert whole.dtype == part.dtype == dtype and turned.stride() == (1, 12)
    assert bits(whole) == expected
    assert bits(part) == bits(whole[2:, 1::5].clone()) and part.stride() == (12, 5)
    assert bits(turned.t()) == expected


def test_conjugate_and_negative_bits_are_restored(store: TieredStore) -> None:
    tensor = torch.randn(8, 4, dtype=torch.complex64)
    with offload_activations(store, min_bytes=1):
        graph = save(tensor.conj(), tensor.conj().imag)
    expected = tensor.conj().clone()
    del tensor
    conjugated, imaginary = saved(graph)
    assert conjugated.is_conj() and imaginary.is_neg()
    assert torch.equal(conjugated, expected) and torch.equal(imaginary, expected.imag)


def test_unusual_tensors_round_trip(store: TieredStore) -> None:
    sparse = torch.eye(4).to_sparse()
    with offload_activations(store, min_bytes=0):
        graph = save(torch.tensor(2.5), torch.empty(0, 3), sparse, torch.randn(3, requires_grad=True) * 2)
    scalar, empty, still_sparse, result = saved(graph)
    assert scalar.shape == () and float(scalar) == 2.5 and empty.shape == (0, 3)
    assert torch.equal(still_sparse.to_dense(), torch.eye(4)) and result.shape == (3,)


@st.composite
def views(draw: st.DrawFn) -> tuple[int, list[tuple[tuple[int, ...], tuple[int, ...], int]]]:
    """Draw a storage's number of elements, and (shape, stride, offset) of several views of the storage."""
    num_elements = draw(st.integers(1, 3000))
    found = []
    for _ in range(draw(st.integers(1, 5))):
        offset = draw(st.integers(0, num_elements - 1))
        left, shape, strides = num_elements - offset - 1, [], []
        for _ in range(draw(st.integers(0, 4))):
            stride = draw(st.one_of(st.just(0), st.just(1), st.integers(1, 70)))
            count = draw(st.integers(0 if draw(st.booleans()) else 1, 12))
            if stride and count > 1:
                count = min(count, left // stride + 1)
                left -= (count - 1) * stride
            shape.append(count)
            strides.append(stride)
        found.append((tuple(shape), tuple(strides), offset))
    return num_elements, found


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TieredStore]:
    with open_store(tmp_path_factory.mktemp("shared"), ram_bytes=MiB) as opened:
        yield opened


@given(views(), st.sampled_from([torch.int16, torch.float32, torch.complex128]), st.integers(0, 5000), st.booleans())
@settings(max_examples=60)
def test_views_round_trip_for_any_geometry(
    shared_store: TieredStore, drawn, dtype, min_bytes: int, is_gone: bool
) -> None:
    num_elements, geometries = drawn
    base = random_memory(num_elements * dtype.itemsize).view(dtype)
    tensors = [base.as_strided(*geometry) for geometry in geometries]
    expected = [bits(tensor) for tensor in tensors]
    with offload_activations(shared_store, min_bytes=min_bytes) as activations:
        graph = save(*tensors)
    if is_gone:
        del base, tensors
    found = saved(graph)
    for (shape, stride, _), tensor, contents in zip(geometries, found, expected, strict=True):
        assert tensor.shape == shape and tensor.stride() == stride and tensor.dtype == dtype
        assert bits(tensor) == contents
    del graph, found, tensor
    assert activations.stats().in_use_bytes == 0


# -- sharing -------------------------------------------------------------------------------------------------------


def test_views_of_one_storage_share_a_block_and_memory(store: TieredStore) -> None:
    base = torch.randn(64, 48)
    expected = base.clone()
    with offload_activations(store, min_bytes=1) as activations:
        graph = save(base, base.t(), base.view(-1)[16:], base[:, :24])
    stats = activations.stats()
    assert stats.offloaded_bytes == base.nbytes
    assert stats.deduplicated_bytes == base.nbytes + (base.nbytes - 64) + base.nbytes // 2
    del base
    found = saved(graph)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == 1
    assert torch.equal(found[1], expected.t()) and torch.equal(found[3], expected[:, :24])
    assert activations.stats().restored_bytes == stats.offloaded_bytes
    del found
    assert torch.equal(saved(graph)[2], expected.view(-1)[16:])
    assert activations.stats().restored_bytes == 2 * stats.offloaded_bytes, "no copy was left"


def test_a_part_is_not_read_from_a_much_larger_block(store: TieredStore) -> None:
    base = torch.randn(100, 1024)
    with offload_activations(store, min_bytes=1) as activations:
        graph = save(base, base[7], base[:, 5])
    assert activations.stats().offloaded_bytes == base.nbytes + base[7].nbytes + 100 * 4
    expected = base.clone()
    del base
    _, row, column = saved(graph)
    assert torch.equal(row, expected[7]) and torch.equal(column, expected[:, 5])


def test_reshaped_parts_share_a_block(store: TieredStore) -> None:
    base = torch.randn(3, 100, 64)
    with offload_activations(store, min_bytes=1) as activations:
        graph = save(base[0], base[0].view(100, 4, 16))
    stats = activations.stats()
    assert (stats.offloaded_bytes, stats.deduplicated_bytes) == (base[0].nbytes, base[0].nbytes)
    expected = base[0].clone()
    del base
    one, other = saved(graph)
    assert torch.equal(one, expected) and torch.equal(other.reshape(100, 64), expected)


def test_overlapping_windows_are_stored_once(store: TieredStore) -> None:
    base = torch.arange(4096.0)[:512]
    with offload_activations(store, min_bytes=1) as activations:
        graph = save(base.unfold(0, 64, 1))
    assert activations.stats().offloaded_bytes == base.nbytes
    expected = base.clone().unfold(0, 64, 1)
    del base
    assert torch.equal(saved(graph)[0], expected)


def test_a_part_is_stored_if_its_storage_has_no_room(tmp_path: Path) -> None:
    with TieredStore([RamTier(12 * KiB)]) as store:
        base = torch.arange(4096.0)
        with offload_activations(store, tier="ram", min_bytes=1) as activations:
            graph = save(base[:2304])
        stats = activations.stats()
        assert (stats.offloaded_bytes, stats.no_room_bytes) == (2304 * 4, 0)
        expected = base[:2304].clone()
        del base
        assert torch.equal(saved(graph)[0], expected)


def test_tensors_still_in_use_are_not_read_back(store: TieredStore) -> None:
    base = torch.randn(64, 64)
    with offload_activations(store, min_bytes=1) as activations:
        graph = save(base.t())
    (found,) = saved(graph)
    assert found.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    assert activations.stats().restored_bytes == 0 < activations.stats().offloaded_bytes


def test_changed_storage_is_stored_again(store: TieredStore) -> None:
    base = torch.ones(4096)
    with offload_activations(store, min_bytes=1) as activations:
        first = save(base)
        second = save(base.view(64, 64))
        base.add_(1)
        third = save(base)
    assert activations.stats().offloaded_bytes == 2 * base.nbytes
    assert float(saved(third)[0].sum()) == 8192
    for graph in (first, second):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved(graph)
    del base
    assert float(saved(third)[0].sum()) == 8192
    with pytest.raises(RuntimeError, match=r"is at version 1; expected version 0"):
        saved(first)


def test_data_alias_restores_values_from_before_an_in_place_change(store: TieredStore) -> None:
    """A ``data`` tensor has its own version counter, so an in-place change of its base raises no error.
    The old values are read back from the store.
    """
    base = torch.ones(4096)
    with offload_activations(store, min_bytes=1) as activations:
        first = save(base)
        second = save(base.data)
    assert activations.stats().offloaded_bytes == base.nbytes
    base.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved(first)
    assert float(saved(second)[0].sum()) == 4096


@pytest.mark.parametrize("min_bytes", [1, KiB, MiB])
def test_in_place_change_raises_as_in_plain_pytorch(store: TieredStore, min_bytes: int) -> None:
    x = torch.randn(32, 32, requires_grad=True)
    big = torch.randn(MiB // 4, requires_grad=True)
    with offload_activations(store, min_bytes=min_bytes):
        y = (x * 2).exp()
        loss = y.sum()
        small = (big * 2)[:4]
        other = (small * small).sum()
    y.add_(1)
    small.add_(1)
    for graph in (loss, other):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            graph.backward()


def test_a_small_part_does_not_keep_a_large_storage(store: TieredStore) -> None:
    base = torch.randn(MiB // 4)
    watched = WeakStorage(base.untyped_storage())
    with offload_activations(store, min_bytes=64 * KiB) as activations:
        graph = save(base[5:9], base[::65536])
    expected = base[5:9].clone(), base[::65536].clone()
    del base
    assert watched() is None
    for found, part in zip(saved(graph), expected, strict=True):
        assert (torch.equal(found, part) and found.stride() == part.stride()) or found.stride() == (65536,)
    assert activations.stats().offloaded_bytes == 0 < activations.stats().small_bytes


# -- tensors that stay ---------------------------------------------------------------------------------------------


def test_weights_are_not_offloaded(store: TieredStore) -> None:
    layer = nn.Linear(64, 64)
    frozen = nn.Parameter(torch.randn(64, 64), requires_grad=False)
    x = torch.randn(32, 64)
    with offload_activations(store, min_bytes=KiB, keep=lambda tensor: tensor.shape == x.shape) as activations:
        y = layer(x) @ frozen.t() @ layer.weight.view(64, 64)[:, :32]
        save(layer.weight, layer.weight.detach()[:1], frozen.expand(2, 64, 64))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = layer(x)
    assert activations.stats().offloaded_bytes == 0
    (y.sum() + z.sum()).backward()
    assert layer.weight.grad is not None


def test_model_parameters_are_not_offloaded(store: TieredStore) -> None:
    model = Attention()
    leaf = torch.randn(8, 64, requires_grad=True)
    with offload_activations(store, min_bytes=1) as unaware:
        save(leaf, leaf.t())
        assert unaware.stats().offloaded_bytes == 0, "it may be a weight"
        save(model.scale)
        assert unaware.stats().offloaded_bytes == model.scale.nbytes
    with offload_activations(store, min_bytes=1, model=[model]) as aware:
        save(model.scale.expand(2, 4, 64, 64), model.qkv.weight.detach())
        assert aware.stats().offloaded_bytes == 0
        save(leaf, leaf.t())
        assert aware.stats().offloaded_bytes == leaf.nbytes


# -- memory --------------------------------------------------------------------------------------------------------


def test_graph_keeps_no_memory_and_tiers_stay_within_capacity(tmp_path: Path) -> None:
    watched: list[WeakStorage] = []
    x = torch.randn(256, 256)
    weights = [torch.randn(256, 256, requires_grad=True) for _ in range(12)]

    def step() -> Tensor:
        y = x
        for weight in weights:
            y = torch.tanh(y @ weight)
            watched.append(WeakStorage(y.untyped_storage()))
        return y.sum()

    expected = gradients(weights, step)
    watched.clear()
    with open_store(tmp_path, ram_bytes=3 * x.nbytes, nvme_bytes=20 * x.nbytes) as store:
        activations = offload_activations(store, min_bytes=1)
        with activations:
            loss = step()
        assert [storage() for storage in watched] == [None] * 12
        stats = activations.stats()
        assert stats.offloaded_bytes == 13 * x.nbytes and stats.no_room_bytes == 0
        assert stats.in_use_bytes == 13 * x.nbytes
        loss.backward()
        assert_same_bits([loss.detach(), *(weight.grad for weight in weights)], expected)
        tiers = store.stats().tiers
        assert 2 * x.nbytes <= tiers["ram"].high_water_bytes <= 3 * x.nbytes
        assert tiers["nvme"].high_water_bytes == 13 * x.nbytes
        # RAM holds three tensors. The backward reads the last saved tensors first, so these may never be written.
        assert 10 * x.nbytes <= store.stats().links["ram->nvme"].num_bytes <= 13 * x.nbytes


@pytest.mark.parametrize("room_bytes", [0, 300 * KiB])
def test_tensors_without_space_stay_and_are_counted(
    tmp_path: Path, room_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = mlp()
    parameters = list(model.parameters())

    def step() -> Tensor:
        return model(x).square().mean()

    expected = gradients(parameters, step)
    with open_store(tmp_path, nvme_bytes=room_bytes) as store:
        activations = offload_activations(store, min_bytes=1)
        for _ in range(3):
            assert_same_bits(gradients(parameters, step, activations), expected)
        stats = activations.stats()
        assert stats.offloaded_bytes + stats.no_room_bytes == 3 * sum(saved_storages(step, parameters))
        assert (stats.offloaded_bytes == 0) == (room_bytes == 0)
        assert 0.9 * room_bytes <= store.stats().tiers["nvme"].high_water_bytes <= room_bytes
    assert len(caplog.records) == 1 and "room" in caplog.text


def test_tensor_larger_than_the_fast_tier_stays(tmp_path: Path) -> None:
    model, step = case("mlp")
    parameters = list(model.parameters())
    expected = gradients(parameters, step)
    with open_store(tmp_path, ram_bytes=64 * KiB) as store:
        activations = offload_activations(store, min_bytes=1)
        assert_same_bits(gradients(parameters, step, activations), expected)
        stats = activations.stats()
        saved = saved_storages(step, parameters)
        assert stats.no_room_bytes == sum(nbytes for nbytes in saved if nbytes > 64 * KiB) > 0
        assert stats.offloaded_bytes == sum(nbytes for nbytes in saved if nbytes <= 64 * KiB) > 0
        assert 32 * KiB <= store.stats().tiers["ram"].high_water_bytes <= 64 * KiB


def test_max_bytes_limits_offloading(store: TieredStore) -> None:
    model, step = case("mlp")
    activations = offload_activations(store, min_bytes=1, max_bytes=256 * KiB)
    gradients(list(model.parameters()), step, activations)
    stats = activations.stats()
    assert 128 * KiB < stats.offloaded_bytes <= 256 * KiB, "another activation of 128 KiB has no room"
    assert stats.offloaded_bytes + stats.no_room_bytes == sum(saved_storages(step, model.parameters()))
    assert stats.no_room_bytes == 5 * 128 * KiB


def test_step_leaves_no_blocks_and_the_next_one_reuses_its_files(store: TieredStore, tmp_path: Path) -> None:
    _, step = case("attention")
    files = []
    for _ in range(20):
        activations = offload_activations(store, min_bytes=1)
        with activations:
            loss = step()
        loss.backward()
        del loss
        activations.close()
        assert not list(store.blocks())
        files.append(sorted(path.stat().st_ino for path in tmp_path.rglob("*") if path.stat().st_size >= 16 * KiB))
    assert files[0] == files[-1] != []


@pytest.mark.parametrize("num_tiers", [1, 2])
def test_a_dead_block_makes_room_for_another_size(num_tiers: int, tmp_path: Path) -> None:
    """The bytes of the dead block may still be on their way to the drive."""
    tiers = [RamTier(2 * MiB, pin_memory=False), NvmeTier([tmp_path], MiB)]
    with TieredStore(tiers[:num_tiers]) as store:
        activations = offload_activations(store, min_bytes=1, tier="ram" if num_tiers == 1 else None, max_bytes=MiB)
        for num_elements in (MiB // 4, MiB // 4 * 5 // 8, MiB // 16, MiB // 4):
            with activations:
                graph = save(torch.arange(num_elements, dtype=torch.int32))
            assert torch.equal(saved(graph)[0], torch.arange(num_elements, dtype=torch.int32))
            assert activations.stats().no_room_bytes == 0
            del graph


def test_tensors_beyond_the_lookahead_leave_the_fast_tier(store: TieredStore) -> None:
    activations = offload_activations(store, min_bytes=1, tier="nvme", lookahead_bytes=512 * KiB)
    with activations:
        graphs = [save(torch.full((64 * KiB,), float(number))) for number in range(5)]
    store.wait_idle()
    near = [spec.key for spec in store.blocks() if "ram" in store.where(spec.key)]
    assert len(list(store.blocks())) == 5 and len(near) == 2
    assert [float(saved(graph)[0].mean()) for graph in reversed(graphs)] == [4.0, 3.0, 2.0, 1.0, 0.0]


def test_near_sizes_share_files(store: TieredStore, tmp_path: Path) -> None:
    activations = offload_activations(store, min_bytes=1)
    files = set()
    for num_elements in (100_000, 100_500, 99_900):
        with activations:
            graph = save(torch.arange(num_elements))
        assert torch.equal(saved(graph)[0], torch.arange(num_elements))
        del graph
        activations.close()
        files |= {path.stat().st_ino for path in tmp_path.rglob("*") if path.stat().st_size >= 400_000}
    assert len(files) == 1


# -- graphs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_inside", [False, True])
def test_double_backward(store: TieredStore, is_inside: bool) -> None:
    model, x = mlp()
    model[5].p = 0.0
    x.requires_grad_()
    parameters = [*model.parameters(), x]

    def penalty() -> Tensor:
        (slope,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        return (slope.norm() - 1).square()

    expected = gradients(parameters, penalty)
    for parameter in parameters:
        parameter.grad = None
    activations = offload_activations(store, min_bytes=1)
    if is_inside:
        found = gradients(parameters, penalty, activations)
    else:
        with activations:
            loss = model(x).square().mean()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = (slope.norm() - 1).square()
        loss.backward()
        found = [loss.detach(), *(parameter.grad for parameter in parameters if parameter.grad is not None)]
    assert_same_bits(found, expected)
    stats = activations.stats()
    assert 0 < stats.restored_bytes <= 2 * (stats.offloaded_bytes + stats.deduplicated_bytes), "once for each backward"


def test_retained_graph_supports_several_backwards(store: TieredStore) -> None:
    model, step = case("mlp")
    model.eval()
    parameters = list(model.parameters())
    expected = gradients(parameters, step)
    with offload_activations(store, min_bytes=1) as activations:
        loss = step()
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = None
        loss.backward(retain_graph=True)
        assert_same_bits([loss.detach(), *(parameter.grad for parameter in parameters)], expected)
    del loss
    assert activations.stats().in_use_bytes == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("is_inside", [False, True])
def test_offloading_works_with_recompute(store: TieredStore, use_reentrant: bool, is_inside: bool) -> None:
    model, x = mlp()
    x.requires_grad_()
    parameters = [*model.parameters(), x]

    def step() -> Tensor:
        y = model[0](x)
        for part in model[1:]:
            y = checkpoint(part, y, use_reentrant=use_reentrant)
        return y.square().mean()

    expected = gradients(parameters, step)
    activations = offload_activations(store, min_bytes=1)
    if is_inside:
        with activations:
            found = gradients(parameters, step)
    else:
        found = gradients(parameters, step, activations)
    assert_same_bits(found, expected)
    if not (is_inside and use_reentrant):  # otherwise the recompute also saves tensors
        assert activations.stats().restored_bytes == sum(saved_storages(step, parameters))


def test_several_training_and_no_grad_forwards_before_a_backward(store: TieredStore) -> None:
    (model, _), (reference, _) = mlp(), mlp()
    parameters = list(model.parameters())
    batches = [torch.randn(n, 64) for n in (128, 40, 96)]

    def train(context: AbstractContextManager[object]) -> list[Tensor]:
        torch.manual_seed(1)
        for parameter in parameters:
            parameter.grad = None
        losses = []
        for batch in batches:
            with torch.no_grad(), context:
                target = reference(batch)
                model(batch * 2)
            with context:
                losses.append((model(batch) - target).square().mean())
                with torch.no_grad():
                    model(batch)
        for loss in losses:
            loss.backward()
        return [*(loss.detach() for loss in losses), *(parameter.grad for parameter in parameters)]

    expected = train(nullcontext())
    activations = offload_activations(store, min_bytes=1)
    assert_same_bits(train(activations), expected)
    stats, num_rows = activations.stats(), sum(map(len, batches))
    saved, x = saved_storages(lambda: reference(batches[0]).square().mean(), reference.parameters()), batches[0]
    assert stats.offloaded_bytes == sum(saved) // len(x) * num_rows
    assert stats.restored_bytes == stats.offloaded_bytes - num_rows * x[0].nbytes, "the batches are still in memory"


def test_step_after_an_exception_is_correct(store: TieredStore) -> None:
    model, step = case("mlp")
    parameters = list(model.parameters())
    expected = gradients(parameters, step)
    activations = offload_activations(store, min_bytes=1)

    def broken() -> Tensor:
        loss = step()
        raise KeyError(loss.shape)

    with pytest.raises(KeyError):
        gradients(parameters, broken, activations)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    gc.collect()
    assert activations.stats().in_use_bytes == 0
    assert_same_bits(gradients(parameters, step, activations), expected)


def test_forward_without_backward_frees_its_blocks(store: TieredStore) -> None:
    activations = offload_activations(store, min_bytes=1)
    model, step = case("mlp")
    with activations:
        loss = step()
    pages = sum(-(-nbytes // (4 * KiB)) for nbytes in saved_storages(step, model.parameters()))
    assert activations.stats().in_use_bytes == pages * 4 * KiB
    written = store.stats().links["ram->nvme"].num_bytes
    del loss
    assert activations.stats().in_use_bytes == 0
    assert store.stats().links["ram->nvme"].num_bytes == written, "dead tensors are not written"


def test_saved_outputs_make_no_cycle(store: TieredStore) -> None:
    gc.collect()
    gc.disable()
    try:
        for min_bytes in (1, MiB):
            y = torch.randn(4096, requires_grad=True).sum() * torch.ones(4096)
            with offload_activations(store, min_bytes=min_bytes):
                y = y.exp()
            watched = WeakStorage(y.untyped_storage())
            del y
            assert watched() is None
    finally:
        gc.enable()


# -- other contexts ------------------------------------------------------------------------------------------------


def test_outer_hooks_get_tensors_that_stay(store: TieredStore) -> None:
    got: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> tuple[str, Tensor]:
        got.append(tuple(tensor.shape))
        return "outer", tensor.detach()

    first, weight = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
    x = torch.randn(64, 64)
    around = torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[1])
    with around, offload_activations(store, min_bytes=KiB) as activations:
        y = (x @ first) @ weight
        loss = (y[0, :4] * 1).exp().sum()
    assert (64, 64) in got and (4,) in got, "the outer hooks handle the weight"
    assert activations.stats().offloaded_bytes == 2 * x.nbytes
    loss.backward()
    assert weight.grad is not None and first.grad is not None


def test_inner_hooks_and_nested_contexts(store: TieredStore) -> None:
    model, step = case("mlp")
    parameters = list(model.parameters())
    expected = gradients(parameters, step)
    outer, inner = offload_activations(store, min_bytes=1), offload_activations(store, min_bytes=100 * KiB)

    def nested() -> Tensor:
        with inner:
            return step()

    assert_same_bits(gradients(parameters, nested, outer), expected)
    saved = saved_storages(step, parameters)
    assert inner.stats().offloaded_bytes == sum(nbytes for nbytes in saved if nbytes >= 100 * KiB)
    assert outer.stats().offloaded_bytes == sum(nbytes for nbytes in saved if nbytes < 100 * KiB)
    assert_same_bits(gradients(parameters, lambda: outer.__enter__() and leave(outer, step), outer), expected)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def leave(context: offload_activations, step: Step) -> Tensor:
    try:
        return step()
    finally:
        context.__exit__(None, None, None)


def test_several_threads(store: TieredStore) -> None:
    activations = offload_activations(store, min_bytes=1)
    cases = [mlp() for _ in range(4)]
    for model, _ in cases:
        model.eval()
    expected = [gradients(list(model.parameters()), lambda m=model, x=x: m(x).square().mean()) for model, x in cases]
    losses_and_gradients: dict[int, list[Tensor]] = {}

    def train(number: int) -> None:
        model, x = cases[number]
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = None
            with activations:
                loss = model(x).square().mean()
            loss.backward()
        losses_and_gradients[number] = [loss.detach(), *(parameter.grad for parameter in model.parameters())]

    threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(losses_and_gradients) == [0, 1, 2, 3]
    for number, ours in losses_and_gradients.items():
        assert_same_bits(ours, expected[number])
    assert activations.stats().in_use_bytes == 0


def test_three_tiers_and_an_explicit_home(tmp_path: Path) -> None:
    model, step = case("attention")
    parameters = list(model.parameters())
    expected = gradients(parameters, step)
    tiers = [GpuTier(MiB, device="cpu"), RamTier(4 * MiB, pin_memory=False), NvmeTier([tmp_path], 64 * MiB)]
    with TieredStore(tiers) as store:
        for home in (None, "ram", "nvme"):
            activations = offload_activations(store, tier=home, min_bytes=1)
            for _ in range(2):
                assert_same_bits(gradients(parameters, step, activations), expected)
            assert activations.stats().no_room_bytes == 0
            with activations:
                graph = step()
            assert {spec.home for spec in store.blocks()} == {home or "nvme"}
            del graph
            activations.close()
        for name, tier in store.stats().tiers.items():
            assert max(saved_storages(step, parameters)) <= tier.high_water_bytes <= tier.capacity_bytes, name


def test_a_store_with_ram_alone(tmp_path: Path) -> None:
    model, step = case("mlp")
    parameters = list(model.parameters())
    expected = gradients(parameters, step)
    with TieredStore([RamTier(8 * MiB, pin_memory=False)]) as store:
        nothing = offload_activations(store, min_bytes=1)
        assert_same_bits(gradients(parameters, step, nothing), expected)
        assert nothing.stats().offloaded_bytes == 0
        wanted = offload_activations(store, min_bytes=1, tier="ram")
        assert_same_bits(gradients(parameters, step, wanted), expected)
        saved = sum(saved_storages(step, parameters))
        assert nothing.stats().no_room_bytes == wanted.stats().offloaded_bytes == saved
        assert wanted.stats().restored_bytes == saved - 4 * 128 * 64, "the input is still in memory"


def test_mistakes(store: TieredStore, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tier named 'disk'"):
        offload_activations(store, tier="disk")
    other = open_store(tmp_path / "other")
    with other, offload_activations(other, min_bytes=1):
        loss = case("mlp")[1]()
    with pytest.raises(TieredError, match="the store is closed"):
        loss.backward()
    with pytest.raises(TieredError, match="the store is closed"), offload_activations(other, min_bytes=1):
        case("mlp")[1]()


def test_occupied_fast_tier_fails_the_backward(tmp_path: Path) -> None:
    model, step = case("mlp")
    with open_store(tmp_path, ram_bytes=MiB) as store:
        store.register("others", (MiB // 4,), torch.float32, home="nvme")
        activations = offload_activations(store, min_bytes=1, lookahead_bytes=0)
        with activations:
            loss = step()
        with store.acquire("others", "ram", "w"), pytest.raises(CapacityError):
            loss.backward(retain_graph=True)
        loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("has_gpu_tier", [True, False])
def test_on_a_device(tmp_path: Path, has_gpu_tier: bool) -> None:
    model, x = mlp()
    model, x = model.cuda().eval(), x.cuda()
    parameters = list(model.parameters())

    def step() -> Tensor:
        return model(x).square().mean()

    expected = gradients(parameters, step)
    tiers = [RamTier(16 * MiB), NvmeTier([tmp_path], 64 * MiB)]
    with TieredStore([GpuTier(4 * MiB), *tiers] if has_gpu_tier else tiers) as store:
        for home in ("ram", "nvme"):
            activations = offload_activations(store, min_bytes=1, tier=home)
            for _ in range(3):
                assert_same_bits(gradients(parameters, step, activations), expected)
            assert activations.stats().restored_bytes > 0 == activations.stats().no_room_bytes
        for name, tier in store.stats().tiers.items():
            assert 0 < tier.high_water_bytes <= tier.capacity_bytes, name
