"""Groups of ordinary (not offloaded) parameters, whose state is in the store. A group's parameters share blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from megatrain.base.layout import TensorEntry, UnitLayout, build_layout
from megatrain.embed.block_homes import mapped_copy, shared_state
from megatrain.embed.gradient_block import GradientBlock
from megatrain.embed.groups import GradientSource, GroupUpdate, StateGroup
from megatrain.embed.state_blocks import StateBlocks
from megatrain.embed.stores import num_ranks
from megatrain.engine.program.block_keys import gradient_key
from megatrain.optim.average import EMA, begin_average
from megatrain.optim.base import GRADIENT_DTYPES, Update
from megatrain.optim.clip import squared_norm
from megatrain.optim.threads import KernelThreads
from megatrain.ranks.dtensors import check_gradient, first_element, is_dtensor, local_shard, tensor_version
from tiered import TieredStore
from tiered.ext import HostSlab

#: Bounds of a group's size limit, in elements: 2 MiB and 64 MiB of each kind of fp32 state. Between these bounds, the
#: limit is the size of the largest parameter, which must fit in RAM anyway. It does not depend on tier sizes, so that
#: saved state can be loaded with different tiers.
_GROUP_ELEMENTS = (1 << 19, 1 << 24)


class DeviceCopies:
    """Copies between RAM and parameters on CUDA devices. Used by one thread at a time.

    Copies run on one stream per device, after the work that was queued on the caller's current stream, such as
    backwards and kernels that read parameters. Gradients pass through a pinned buffer as large as the largest gradient.
    """

    def __init__(self) -> None:
        self._slab: HostSlab | None = None
        self._streams: dict[torch.device, Any] = {}

    def copy_to_ram(self, tensor: Tensor) -> Tensor:
        """Copy a device tensor to RAM. Return its dense, flat contents, which are valid until the next call."""
        nbytes = tensor.numel() * tensor.element_size()
        if self._slab is None or self._slab.nbytes < nbytes:
            if self._slab is not None:
                self._slab.close()
            self._slab = HostSlab(nbytes, pin=True)
        contents = self._slab.tensor[:nbytes].view(tensor.dtype)
        self._copy(contents, tensor, tensor.device)
        return contents

    def copy_to_device(self, parameter: Tensor, contents: Tensor) -> None:
        """Fill a parameter from RAM. Kernels that are queued afterwards read the new values."""
        self._copy(parameter, contents.view(parameter.shape), parameter.device)

    def _copy(self, target: Tensor, source: Tensor, device: torch.device) -> None:
        """Convert the source to a dense tensor with the target's shape, copy it, and wait for the copy.

        The conversion runs on the copy stream, and its temporary tensors live until the copy has ended.
        """
        stream = self._stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            dense = source if source.layout is torch.strided else source.to_dense()
            if dense.shape != target.shape:
                dense = dense.reshape(target.shape)
            target.copy_(dense, non_blocking=True)
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        event.synchronize()

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


class OrdinaryGradients:
    """Gradients that ordinary parameters have in ``grad``, as in torch. Updates leave the gradients there.

    For a sharded parameter (``DTensor``), this process's shard of the gradient is used.
    """

    key = None
    factor = 1.0

    def __init__(self, parameters: Mapping[str, nn.Parameter], copies: DeviceCopies) -> None:
        self._parameters, self._copies = parameters, copies
        self._sharded = {name: parameter for name, parameter in parameters.items() if is_dtensor(parameter)}

    @property
    def version(self) -> object:
        gradients = (parameter.grad for parameter in self._parameters.values())
        return [None if gradient is None else (id(gradient), tensor_version(gradient)) for gradient in gradients]

    def tensors(self) -> dict[str, Tensor]:
        """Return the gradients by name. Raise ``ValueError`` if one is sharded differently from its parameter."""
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        for name in gradients.keys() & self._sharded.keys():
            check_gradient(gradients[name], self._sharded[name])
            gradients[name] = local_shard(gradients[name])
        return gradients

    def take(self) -> Collection[str]:
        return self.tensors().keys()

    def squared_norms(self, threads: KernelThreads) -> dict[str, float]:
        return {name: squared_norm(self._flatten(gradient), threads) for name, gradient in self.tensors().items()}

    def read(self, entry: TensorEntry, tensors: Mapping[str, Tensor]) -> Tensor:
        gradient = self._parameters[entry.name].grad
        assert gradient is not None, entry.name
        return self._flatten(local_shard(gradient))

    def clear(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def _flatten(self, gradient: Tensor) -> Tensor:
        """Return a gradient as a flat fp32 or bf16 tensor in RAM. A copy from a device is valid until the next call."""
        gradient = gradient.detach()
        if gradient.is_cuda:
            flat = self._copies.copy_to_ram(gradient)
        else:
            flat = (gradient if gradient.layout is torch.strided else gradient.to_dense()).reshape(-1)
        return flat if flat.dtype in GRADIENT_DTYPES else flat.float()


class OrdinaryGroup(StateGroup):
    """Ordinary parameters in RAM or on a CUDA device, whose state is in the store.

    A bf16 parameter in RAM is the high half of its master, so no value is stored twice. For a parameter on a device,
    the store contains the whole master, and the parameter is a copy. For a sharded parameter (``DTensor``), the layout
    describes this rank's shard, which is updated without communication.

    Attributes:
        first_elements: Number that identifies the first element of each sharded parameter's shard, by name.
        is_in_ram: Whether parameters and state are in RAM, so that an update fetches none of them.
        dtype: Dtype that the parameters had when their state was created.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        state: StateBlocks,
        gradients: GradientSource,
        copies: DeviceCopies,
    ) -> None:
        super().__init__(parameters, state, gradients)
        self.first_elements = {name: first_element(p) for name, p in parameters.items() if is_dtensor(p)}
        values = {name: local_shard(parameter) for name, parameter in parameters.items()}
        self._on_device = any(value.is_cuda for value in values.values())
        self.is_in_ram = not self._on_device and not state.keys_outside_ram
        self.dtype = next(iter(values.values())).dtype
        self._copies = copies
        self._dtypes_and_devices = {name: (value.dtype, value.device) for name, value in values.items()}
        self._versions: dict[str, object] = {}  # device parameters' versions when they last equaled their masters
        if self._on_device:
            self.copy_to_masters()

    def close(self) -> None:
        if isinstance(self.gradients, GradientBlock):
            self.gradients.close()
        super().close()

    def local_values(self, name: str) -> Tensor:
        """Return this process's shard of a parameter, or the whole parameter if it is not sharded."""
        parameter = self.parameters[name]
        return local_shard(parameter) if name in self.first_elements else parameter

    def copy_to_masters(self) -> None:
        """Copy parameters on a device to their masters."""
        with torch.no_grad(), self.state.lease("weight", "w") as lease:
            lease.tensor.zero_()
            for entry in self.layout.entries:
                self.state.view("weight", lease.tensor, entry).copy_(self.local_values(entry.name).reshape(-1))
                self._record_synced(entry.name)

    def _record_synced(self, name: str) -> None:
        """Record that a parameter on a device equals its master."""
        self._versions[name] = tensor_version(self.parameters[name])

    def read_master(self, entry: TensorEntry) -> Tensor:
        if "low" not in self.state.keys:
            return local_shard(self.parameters[entry.name].detach())
        with self.state.lease("low") as lease:
            high_half = self.local_values(entry.name).detach().reshape(-1).cpu().view(torch.int16).to(torch.int32)
            bits = (high_half << 16) + self.state.view("low", lease.tensor, entry)  # low is signed, as in the kernels
            return mapped_copy(bits.view(torch.float32), self.store)

    def handle_loaded_state(self, *, with_weights: bool) -> None:
        self._versions.clear()  # the next update compares masters with parameters, which may be loaded separately

    def check_free(self) -> None:
        """Do nothing, because ordinary parameters are always in memory."""

    def submit(self, update: GroupUpdate, updates: dict[OrdinaryGroup, GroupUpdate]) -> None:
        updates[self] = update

    def _apply(self, update: GroupUpdate, tensors: Mapping[str, Tensor]) -> None:
        for entry in self.entries(update.settings):
            gradient = self.gradients.read(entry, tensors)
            settings = update.settings[entry.name]
            scalars = Update(settings.step, settings.lr, update.grad_scale)
            segment = self.state.segment(entry, settings.weight_decay, 0, first=self.first_elements.get(entry.name, 0))
            with self._master(entry, tensors) as blocks:
                if self.has_averages and settings.step == 1:
                    begin_average(blocks["weight"], blocks.get("low"), blocks[EMA.name])
                settings.rule.update(blocks, gradient, [segment], scalars)

    def check_dtype_and_device(self, name: str) -> None:
        """Raise ``RuntimeError`` if a parameter was moved or converted after its state was created."""
        values, expected = self.local_values(name), self._dtypes_and_devices[name]
        if (values.dtype, values.device) != expected:
            raise RuntimeError(
                f"a parameter of shape {tuple(values.shape)} was {expected[0]} on {expected[1]} when its optimizer was "
                f"created, but is now {values.dtype} on {values.device}. Move or convert the module before that"
            )

    def begin_averages(self, names: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
        """Initialize the averages of parameters in RAM, if the group has any. ``tensors``: all blocks by key."""
        for entry in self.entries(names) if self.has_averages else ():
            with self._master(entry, tensors) as blocks:
                begin_average(blocks["weight"], blocks.get("low"), blocks[EMA.name])

    @contextmanager
    def _master(self, entry: TensorEntry, tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        parameter, values = self.parameters[entry.name], self.local_values(entry.name)
        own_length = {name for name, kind in self.state.kinds.items() if kind.elements_of is not None}
        blocks = {
            kind: tensors[key] if kind in own_length else self.state.view(kind, tensors[key], entry)
            for kind, key in self.state.keys.items()
            if key in tensors
        }
        self.check_dtype_and_device(entry.name)
        if not self._on_device:
            blocks["weight"] = values.detach().reshape(-1)
        elif self._versions.get(entry.name) != tensor_version(parameter):
            _update_master(blocks, values.detach().reshape(-1).cpu())
        yield blocks
        if values.is_cuda:
            self._copies.copy_to_device(values, blocks["weight"])
            self._record_synced(entry.name)
        elif blocks["weight"].data_ptr() != values.data_ptr():
            values.copy_(blocks["weight"].view(entry.shape))
            self._record_synced(entry.name)
        else:
            increment_version(values)  # autograd did not see the kernel's writes; this marks older graphs as stale
        if values is not parameter:
            increment_version(parameter)  # a DTensor has a separate version counter
            self._record_synced(entry.name)


def _update_master(blocks: Mapping[str, Tensor], values: Tensor) -> None:
    """Copy a changed parameter's values to its master. Unchanged elements keep their low half."""
    if "low" in blocks:
        blocks["low"].masked_fill_(blocks["weight"] != values, 0)
    blocks["weight"].copy_(values)


def local_layout(name: str, parameters: Mapping[str, nn.Parameter]) -> UnitLayout:
    """Return the layout of this process's shards of parameters."""
    return build_layout(name, ((key, local_shard(p).shape) for key, p in parameters.items()), True)


def make_gradient_block(
    store: TieredStore, layout: UnitLayout, parameters: dict[str, nn.Parameter], homes: Sequence[str]
) -> GradientBlock:
    """Register a block for the gradients of ordinary parameters. Raise ``ValueError`` if there are several ranks."""
    if num_ranks() > 1:
        raise ValueError(
            "offload_gradients=True needs a single rank, because gradients would move before they are averaged"
        )
    key = gradient_key(layout.name, 0)
    shared_state(store).register(key, layout.num_elements, torch.float32, homes, durable=False)
    return GradientBlock(store, key, layout, parameters)


def group_parameters(parameters: Sequence[nn.Parameter]) -> Iterator[tuple[int, list[nn.Parameter]]]:
    """Yield (elements in this process, parameters) of groups of consecutive parameters of one dtype and device."""
    members: list[nn.Parameter] = []
    min_elements, max_elements = _GROUP_ELEMENTS
    values = [local_shard(parameter) for parameter in parameters]
    limit = max(min_elements, min(max_elements, max((value.numel() for value in values), default=0)))
    kind, num_elements = None, 0
    for parameter, value in zip(parameters, values, strict=True):
        value_kind = (value.dtype, value.device)
        if members and (value_kind != kind or num_elements + value.numel() > limit):
            yield num_elements, members
            members, num_elements = [], 0
        kind, num_elements = value_kind, num_elements + value.numel()
        members.append(parameter)
    if members:
        yield num_elements, members
