"""``offload``: moves the parameters of a module into a store, in place, and loads each layer's weights when it runs."""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatrain.embed.absent_parameters import AbsentWeightError
from megatrain.embed.optimizer import TieredOptimizer
from megatrain.embed.partition import OffloadError, UnitPart, partition, parts_of
from megatrain.embed.room import WholeBlocks, check_room
from megatrain.embed.shared import ModuleRanks
from megatrain.embed.stores import check_store, compute_device, home_order, mapped_copy, shared_state
from megatrain.embed.use_order import UseOrder
from megatrain.embed.weights import BackwardWindow, WeightBlock, block_of, release_all, weight_hooks
from tiered import TieredStore
from tiered.units import round_up

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_ATTRIBUTE = "_megatrain_offloaded"
_SHARD_SIZE = "2GB"  # the safetensors writer holds a whole shard in memory
_log = logging.getLogger(__name__)
AnyModule = TypeVar("AnyModule", bound=nn.Module)


def offload(
    model: AnyModule,
    store: TieredStore,
    *,
    name: str = "model",
    weights: Sequence[str] | str = "auto",
    gradients: Sequence[str] | str = "auto",
    leave: Sequence[str] = (),
    group: ProcessGroup | None = None,
    gradient_lanes: int | None = None,
) -> AnyModule:
    """Move a module's parameters to a store, in place, and return the module.

    Each layer's weights are fetched when its forward or backward needs them. Weights are prefetched in the order in
    which the last run used them. Gradients move to the store as soon as they are computed. ``parameters()`` returns the
    same objects as before, for ``TieredAdamW``. Set ``requires_grad`` of frozen parameters before the call. Forward,
    backward, ``generate``, ``state_dict``, ``load_state_dict`` and ``save_pretrained`` work as before. The module
    computes on the device of the store's fastest tier: moves to another device are ignored, and dtype conversions raise
    an error.

    With ``group``, each rank stores a shard of the weights, gradients and state. Weights are gathered for each forward
    and backward of a layer. ``step`` averages the gradients of all ranks, as DistributedDataParallel does, but in a
    fixed order: each rank's gradients are a lane, and lanes are added in a fixed tree. Forward, backward, ``step``,
    ``state_dict``, ``load_state_dict`` and ``gathered`` are then collectives. All ranks must use the same layers in the
    same order. Otherwise, all ranks raise ``RanksDifferError``.

    Args:
        name: prefix of the keys of the module's blocks. Modules in the same store need different prefixes.
        weights: allowed home tiers, preferred first. "auto" uses RAM while it has space, then drives.
        gradients: allowed home tiers, as for ``weights``.
        leave: globs of parameter names. Matching parameters are not moved.
        group: process group of ranks that share the module, for example ``dist.group.WORLD``. It needs a gloo backend,
            because weights and gradients move between host memories even if modules compute on GPUs.
        gradient_lanes: number of lanes with ``group``. Default: one per rank. Results are bit-identical with a half or
            a third of that number of ranks, if each rank then computes several lanes (``megatrain.gradient_lanes``).

    Raises:
        OffloadError: A dtype has no master weights, the module has nothing to offload, or it is already offloaded.
        CapacityError: The module does not fit in the store.
        RanksDifferError: The module differs between ranks.
        ValueError: Settings contradict each other.
        TypeError: ``model`` is not a module, or ``store`` is not a store.
    """
    check_store(store, "offload")
    if not isinstance(model, nn.Module):
        raise TypeError(f"offload takes a torch.nn.Module, not {model!r:.60}")
    if group is None and gradient_lanes is not None:
        raise ValueError("gradient_lanes without group: a single process adds gradients in order of arrival")
    access = WholeBlocks(store) if group is None else ModuleRanks(group, store, gradient_lanes)
    units = partition(model, name, leave)
    parts = parts_of(units)
    homes = home_order(store, weights), home_order(store, gradients)
    access.check_module(model, units, lambda: check_room(access, name, units, *homes))
    _refuse_foreign_optimizers()
    offloaded = OffloadedModule(store, access)
    blocks: dict[int, WeightBlock] = {}
    for part in parts:
        block = WeightBlock(store, part.weight_key, part.layout, part.parameters, part.dtype, homes[0], access)
        block.take_over()
        blocks[id(part)] = block
        offloaded.blocks.append(block)
    for part in parts:
        if part.layout.trainable:
            blocks[id(part)].gradients = access.gradient_block(part, homes[1])
    for unit in units:
        _UnitHooks(unit, [blocks[id(part)] for part in unit.parts], offloaded).install()
    offloaded.install(model)
    move_buffers(model, compute_device(store))
    model.__dict__[_ATTRIBUTE] = offloaded
    install_methods(model, offloaded)
    return model


def gradient_lanes(model: nn.Module) -> Iterator[int]:
    """Yield the numbers of this rank's lanes, for a module with ``group``. Gradients go to the lane yielded last.

    Each lane does the work of one rank in a run with one rank per lane. Choose each lane's part of the batch by the
    lane's number. With several micro-batches per lane, iterate over the lanes once per micro-batch.
    """
    offloaded = offloaded_module(model)
    ranks = None if offloaded is None else offloaded.access
    if not isinstance(ranks, ModuleRanks):
        raise OffloadError("gradient lanes need a module that was offloaded with group=...")
    for lane in ranks.own_lanes:
        ranks.lane = lane
        yield lane


@contextmanager
def gathered(of: nn.Module | Tensor | Iterable[Tensor], *, writable: bool = False) -> Iterator[None]:
    """Hold the weights of a module, or some parameters, in the compute tier. ``writable`` permits changes.

    All weights are held together, so gather layer by layer if they do not fit together. Parameters outside of stores
    are skipped. Computations with the weights are differentiable inside and after the context.

    Raises:
        CapacityError: The weights do not fit together.
        WeightInUseError: Weights were changed without ``writable``, or a view of a weight outlives the context.
    """
    parameters = [of] if isinstance(of, Tensor) else of.parameters() if isinstance(of, nn.Module) else of
    blocks = dict.fromkeys(block for parameter in parameters if (block := block_of(parameter)) is not None)
    call = Call()
    try:
        for block in blocks:
            block.hold("rw" if writable else "r", is_watched=writable)
            call.held.append(block)
        window = next((block.owner.window for block in blocks if block.owner is not None), None)
        if window is not None and torch.is_grad_enabled():
            call.install_hooks(window)
        yield
    finally:
        call.end()


def offloaded_module(model: nn.Module) -> OffloadedModule | None:
    """Return the ``OffloadedModule`` of a module, or None if the module was not offloaded."""
    found: OffloadedModule | None = model.__dict__.get(_ATTRIBUTE)
    return found


class OffloadedModule:
    """Blocks and running forwards of an offloaded module. ``offloaded_module(model)`` returns it.

    Attributes:
        blocks: blocks that contain the module's parameters, in definition order.
        window: leases of the backward.
        order: order in which units were used.
        calls: running forwards.
        access: leases the blocks, alone or together with other ranks.
    """

    def __init__(self, store: TieredStore, access: WholeBlocks) -> None:
        self.store, self.access = store, access
        self.blocks: list[WeightBlock] = []
        self.order = UseOrder(store)
        self.window = BackwardWindow(self.order)
        self.calls = Calls()
        self._for_backward: list[WeightBlock] = []

    def install(self, model: nn.Module) -> None:
        """Also provide weights to code that uses them outside of their module's forward.

        Examples: a fused loss, a head that multiplies by the embedding, attention that reads its projections' weights.
        Such a use fetches the weights and holds them until the current forward or backward ends.
        """
        _register(model, self._before, self._after)
        shared_state(self.store).modules.add(self)
        for block in self.blocks:
            block.owner = self

    def _before(self, module: nn.Module, inputs: Any) -> None:
        self.recover()
        call = self.calls.begin(self)
        if torch.is_grad_enabled():
            call.install_hooks(self.window)

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.calls.end(self)

    def recover(self) -> None:
        """Release the leases of forwards and backwards that ended with an error and did not run their hooks."""
        self.calls.drop_dead()
        if not self.calls and torch._C._current_graph_task_id() == -1:
            self.end_backward(is_failing=True)

    def provide(self, block: WeightBlock) -> bool:
        """Hold a block until the running forward or backward ends. Return False if neither is running.

        If the forward of another module uses the block, the block is held until the end of that forward. For example, a
        student can use the head of its teacher.
        """
        call = self.calls.innermost_of(self) or self._forward_around()
        if call is not None:
            self.order.note(("use", block.key), [(block.key, block.tier)])
            call.hold(block)
            return True
        if torch._C._current_graph_task_id() == -1:
            return False
        if not self._for_backward:
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        block.hold()
        self._for_backward.append(block)
        return True

    def _forward_around(self) -> Call | None:
        """Return the running forward of another module in the same store, or None."""
        others = (other for other in shared_state(self.store).modules if other is not self)
        return next((call for other in others if (call := other.calls.innermost_of(other)) is not None), None)

    def end_backward(self, *, is_failing: bool = False) -> None:
        """Release the blocks that the backward held for code outside of their modules."""
        blocks, self._for_backward = self._for_backward, []
        release_all(blocks, is_failing=is_failing)

    def finish_updates(self) -> None:
        """Apply the deferred updates of all units."""
        for block in self.blocks:
            if block.updater is not None:
                block.updater.finish_update()


class _UnitHooks:
    """Forward hooks that hold a unit's weights while it runs. The graph saves block references."""

    def __init__(self, unit: UnitPart, blocks: Sequence[WeightBlock], offloaded: OffloadedModule) -> None:
        self._unit, self._blocks, self._offloaded = unit, tuple(blocks), offloaded
        self._requests = [(block.key, block.tier) for block in blocks]

    def install(self) -> None:
        """Install the hooks of the module's forward."""
        _register(self._unit.module, self._before, self._after)

    def _before(self, module: nn.Module, inputs: Any) -> None:
        call = self._offloaded.calls.begin(self)
        for block in self._blocks:
            block.check_frozen()
        self._offloaded.window.close_unused()
        for block in self._blocks:
            call.hold(block)
        self._offloaded.order.note(("forward", self._unit.name), self._requests)
        if torch.is_grad_enabled():
            call.install_hooks(self._offloaded.window)

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._offloaded.calls.end(self)


def _register(module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> None:
    """Install a first and a last hook of a module's forward, and hide them from compilers."""
    disable: Callable[[Any], Any] = torch.compiler.disable
    module.register_forward_pre_hook(disable(before), prepend=True)
    module.register_forward_hook(disable(after), always_call=True)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move a module's buffers to the compute device, except meta buffers."""
    for module in model.modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and buffer.device.type != "meta":
                module._buffers[leaf] = buffer.to(device)


@functools.cache
def _refuse_foreign_optimizers() -> None:
    """Make ordinary optimizers raise for offloaded parameters, because they cannot see these gradients."""

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if isinstance(optimizer, TieredOptimizer):
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if (block := block_of(parameter)) is not None:
                    raise OffloadError(
                        f"{type(optimizer).__name__} cannot update {block.name_of(parameter)}, whose gradient is in "
                        "the store. Use megatrain.TieredAdamW(model.parameters(), ...)"
                    )

    register_optimizer_step_pre_hook(check)


#: Name of torch's function that runs a forward and its hooks.
_CALLER = "_call_impl"


@dataclass(slots=True)
class Call:
    """A running forward of a unit or module, or a running ``gathered``. Its blocks and hooks end when it ends.

    Attributes:
        owner: hooks of the unit, or the module.
        frame: frame in which torch's function runs the hooks.
        outer_error: exception that was being handled when the call began. Any other exception was raised by the call.
    """

    owner: object = None
    frame: FrameType | None = None
    held: list[WeightBlock] = field(default_factory=list)
    hooks: torch.autograd.graph.saved_tensors_hooks | None = None
    outer_error: BaseException | None = field(default_factory=lambda: sys.exc_info()[1])
    thread_id: int = field(default_factory=threading.get_ident)

    def hold(self, block: WeightBlock) -> None:
        """Hold a block until the call ends."""
        block.hold()
        self.held.append(block)

    def install_hooks(self, window: BackwardWindow) -> None:
        """Save block references instead of weights in later operations."""
        self.hooks = weight_hooks(window)
        self.hooks.__enter__()

    def end(self, *, is_failing: bool = False) -> None:
        """Uninstall the hooks and release all blocks."""
        if self.hooks is not None:
            self.hooks.__exit__()
        error = sys.exc_info()[1]
        release_all(self.held, is_failing=is_failing or (error is not None and error is not self.outer_error))


class Calls:
    """Running forwards of an offloaded module and its units, innermost last. Used by one thread at a time."""

    def __init__(self) -> None:
        self._running: list[Call] = []

    def __bool__(self) -> bool:
        return bool(self._running)

    def begin(self, owner: object) -> Call:
        """Record a forward. This happens before anything in it can fail, because torch always runs the hooks after it.

        Raises:
            OffloadError: torch.jit is tracing the forward. A trace would record the addresses of slots that are reused
                later.
        """
        if torch._C._get_tracing_state() is not None:
            raise OffloadError(
                "torch.jit.trace does not support modules whose weights are in a tiered store. Save the weights with "
                "save_pretrained(folder) or state_dict(), and trace an ordinary module that loads them"
            )
        call = Call(owner, _caller())
        self._running.append(call)
        return call

    def end(self, owner: object) -> None:
        """End the innermost forward if it belongs to ``owner``. A failed hook may not have recorded its forward."""
        if self._running and self._running[-1].owner is owner:
            self._running.pop().end()

    def innermost_of(self, owner: object) -> Call | None:
        """Return the innermost running forward of an owner."""
        return next((call for call in reversed(self._running) if call.owner is owner), None)

    def drop_dead(self) -> None:
        """End forwards that an interrupt has aborted, because torch runs no hooks after an interrupt.

        This covers only the calling thread, because interrupts reach only the main thread. Other threads' frames cannot
        be read safely: before Python 3.12, ``sys._current_frames`` deadlocks if a garbage collection inside it frees
        tensors.
        """
        if self._running:
            alive = set(_frames())
            while self._running and _has_ended(self._running[-1], alive):
                self._running.pop().end(is_failing=True)


def _has_ended(call: Call, alive: set[FrameType | None]) -> bool:
    return call.thread_id == threading.get_ident() and call.frame not in alive


def _caller() -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != _CALLER:
        frame = frame.f_back
    return frame


def _frames() -> Iterator[FrameType | None]:
    """Yield the stack frames of the calling thread."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def install_methods(model: nn.Module, offloaded: OffloadedModule) -> None:
    """Replace methods of the module and its submodules that would read or move absent weights."""
    mapped = _MappedWeights(offloaded)
    for module in model.modules():
        if any(p is not None and block_of(p) is not None for p in module._parameters.values()):
            # partial() allows torch to set an attribute on the hook, which a bound method does not allow.
            module.register_state_dict_post_hook(partial(mapped.fill))  # type: ignore[no-untyped-call]
            module.__dict__["_load_from_state_dict"] = _loading(module)
            module.__dict__["_apply"] = _applying(module)
        if any(block_of(parameter) is not None for parameter in module.parameters()):
            module.__dict__["__deepcopy__"] = _refuse("copy.deepcopy", "create a second one from its config or folder")
            module.__dict__["__reduce_ex__"] = _refuse("pickling", "save it: save_pretrained(folder) or state_dict()")
        if hasattr(type(module), "resize_token_embeddings"):
            module.__dict__["resize_token_embeddings"] = _resizing(module)
        if hasattr(type(module), "get_base_layer"):
            _install_merging(module)
        for name in ("merge_and_unload", "unload"):  # only on the class: peft forwards unknown attributes
            if hasattr(type(module), name):
                module.__dict__[name] = _unloading(getattr(module, name), module, offloaded)
    _install_on_whole(model, offloaded)


def _install_on_whole(model: nn.Module, offloaded: OffloadedModule) -> None:
    """Replace methods that users call only on the outermost module."""
    model.__dict__["_apply"] = _applying_whole(model, offloaded)
    model.__dict__["_ddp_params_and_buffers_to_ignore"] = _NoParallel()
    save_pretrained = getattr(model, "save_pretrained", None)
    if save_pretrained is not None:
        model.__dict__["save_pretrained"] = _with_shard_limit(save_pretrained)


class _MappedWeights:
    """``state_dict`` hooks that return weights in the store as tensors in unlinked memory-mapped files.

    The hooks copy values to the files unit by unit, so copies use disk space and page cache but no other memory. All
    names of a tied parameter map to the same tensor.
    """

    def __init__(self, offloaded: OffloadedModule) -> None:
        self._store, self._blocks = offloaded.store, frozenset(offloaded.blocks)
        self._last: dict[int, Tensor] = {}
        self._destination: ref[Any] | None = None

    def fill(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        """Replace the module's absent parameters with their values. torch calls this hook after ``state_dict``."""
        if self._destination is None or self._destination() is not state_dict:
            self._last.clear()  # share tied copies only within one call: callers may change them
            self._destination = ref(state_dict, lambda _: self._last.clear())
        for leaf, parameter in module._parameters.items():
            key = prefix + leaf
            if parameter is None or key not in state_dict or state_dict[key] is parameter:
                continue  # the caller asked for the parameters themselves (keep_vars=True)
            block = block_of(parameter)
            if block is None or block not in self._blocks:
                continue
            values = self._last.get(id(parameter))
            if values is None:
                block.hold()
                try:
                    values = mapped_copy(parameter.detach(), self._store)
                finally:
                    block.release()
                self._last[id(parameter)] = values
            state_dict[key] = values


def _loading(module: nn.Module) -> Callable[..., None]:
    """Return ``_load_from_state_dict``, wrapped to hold the module's weights for writing."""
    load = module._load_from_state_dict

    def load_into_store(state_dict: Any, prefix: str, local_metadata: dict[str, Any], *rest: Any) -> None:
        if local_metadata.get("assign_to_params_buffers"):
            raise OffloadError("load_state_dict(assign=True) would replace parameters with new ones outside the store")
        own = {leaf: (p, block) for leaf, p in module._parameters.items() if p is not None and (block := block_of(p))}
        held: list[WeightBlock] = []
        is_failing = True
        try:
            for block in dict.fromkeys(block for _, block in own.values()):
                block.hold("rw")
                held.append(block)
            same = [pair for leaf, pair in own.items() if _is_same(*pair, state_dict.get(prefix + leaf))]
            load(state_dict, prefix, local_metadata, *rest)
            for parameter, block in same:  # so that the store keeps the low halves of their masters
                block.is_unchanged(parameter)
            is_failing = False
        finally:
            release_all(held, is_failing=is_failing)

    return load_into_store


def _is_same(parameter: nn.Parameter, block: WeightBlock, values: object) -> bool:
    if not isinstance(values, Tensor) or values.shape != parameter.shape or block.name_of(parameter) in block.missing:
        return False
    return torch.equal(parameter.detach(), values.detach().to(parameter.device, parameter.dtype))


def _resizing(module: nn.Module) -> Callable[..., Any]:
    """Return a ``resize_token_embeddings`` that raises if the size changes, because the size of a block is fixed."""

    def resize(new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *_: Any, **__: Any) -> Any:
        embedding: Any = module.get_input_embeddings()  # type: ignore[operator]
        have = int(embedding.weight.shape[0])
        wanted = round_up(new_num_tokens or have, pad_to_multiple_of or 1)
        if wanted == have:
            return embedding
        raise OffloadError(
            f"resize_token_embeddings({wanted}): the embedding of {have} tokens is in the store, where sizes are "
            f"fixed. Call model.resize_token_embeddings({wanted}) before megatrain.offload(model, store). Before "
            "megatrain.load_pretrained, resize an ordinary model, save it with save_pretrained, and load its folder"
        )

    return resize


def _install_merging(layer: nn.Module) -> None:
    """Make a peft layer merge its adapters into weights in the store, and unmerge them."""
    for name in ("merge", "unmerge"):
        if hasattr(type(layer), name):
            layer.__dict__[name] = _merging(getattr(layer, name), layer)


def _merging(merge: Callable[..., Any], layer: nn.Module) -> Callable[..., Any]:
    def merge_in_store(*args: Any, **options: Any) -> Any:
        if isinstance(getattr(layer, "base_layer", None), nn.MultiheadAttention):
            raise OffloadError(
                "adapters on torch's MultiheadAttention cannot be merged in the store, because peft creates new "
                "parameters. Save the adapters (save_pretrained) and merge them into an ordinary model"
            )
        with torch.no_grad(), gathered(layer, writable=True):
            return merge(*args, **options)

    return merge_in_store


def _unloading(unload: Callable[..., nn.Module], tuner: nn.Module, offloaded: OffloadedModule) -> Callable[..., Any]:
    """Return peft's ``merge_and_unload`` or ``unload``, wrapped so that its result is an offloaded module."""

    def unload_in_store(*args: Any, **options: Any) -> Any:
        model: Any = tuner.model
        config: Any = getattr(model, "config", None)
        is_tied = bool(getattr(config, "tie_word_embeddings", False))
        if is_tied:  # peft would compare absent weights' addresses; the code below compares identity
            config.tie_word_embeddings = False
        try:
            found = unload(*args, **options)
        finally:
            if is_tied:
                head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
                config.tie_word_embeddings = getattr(head, "weight", None) is getattr(embedding, "weight", None)
        if found.__dict__.get(_ATTRIBUTE) is None:
            offloaded.install(found)
            found.__dict__[_ATTRIBUTE] = offloaded
            _install_on_whole(found, offloaded)
        return found

    return unload_in_store


def _applying(module: nn.Module) -> Callable[..., nn.Module]:
    """Return an ``_apply`` that skips offloaded parameters. ``to``, ``cuda``, ``half`` etc. call ``_apply``."""
    apply: Callable[..., nn.Module] = module._apply

    def apply_to_others(fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        own = module._parameters
        absent = {leaf: p for leaf, p in own.items() if p is not None and block_of(p) is not None}
        for parameter in absent.values():
            _refuse_conversion(fn, parameter.dtype)
        if (block := next(map(block_of, absent.values()), None)) is not None:
            _log_if_moved(fn, compute_device(block.store))
        module._parameters = {leaf: None if leaf in absent else p for leaf, p in own.items()}
        try:
            apply(fn, recurse)
            own.update((leaf, p) for leaf, p in module._parameters.items() if leaf not in absent)
        finally:
            module._parameters = own
        return module

    return apply_to_others


def _applying_whole(model: nn.Module, offloaded: OffloadedModule) -> Callable[..., nn.Module]:
    """Return ``_apply`` for the outermost module. It refuses conversions and keeps buffers on the compute device."""
    apply: Callable[..., nn.Module] = model._apply

    def apply_to_others(fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for dtype in dict.fromkeys(block.dtype for block in offloaded.blocks):
            _refuse_conversion(fn, dtype)
        before = [(module, leaf, buffer) for module in model.modules() for leaf, buffer in module._buffers.items()]
        apply(fn, recurse)
        for module, leaf, buffer in before:
            now = module._buffers[leaf]
            if buffer is not None and now is not None and now.device != buffer.device:
                module._buffers[leaf] = buffer.to(now.dtype)
        return model

    return apply_to_others


def _refuse_conversion(fn: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    try:
        other = fn(torch.empty(0, dtype=dtype)).dtype
    except (AssertionError, RuntimeError) as error:  # torch raises these errors if a device does not exist
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise OffloadError(
            f"an offloaded module cannot be moved there: {reason}. It computes on the device of its store"
        ) from error
    if other != dtype:
        raise OffloadError(
            f"an offloaded module cannot be converted from {dtype} to {other}. Convert it before megatrain.offload"
        )


class _NoParallel:
    """List of parameters that ``DistributedDataParallel`` should ignore. Iterating over it raises an error."""

    def __iter__(self) -> Iterator[str]:
        raise OffloadError(
            "DistributedDataParallel around an offloaded module cannot average gradients, because they move to the "
            "store. Instead, offload the module with group=torch.distributed.group.WORLD; or do not offload it, and "
            "use TieredAdamW(model.parameters(), store=...), which keeps the state of each rank in the store"
        )


def _with_shard_limit(save_pretrained: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``save_pretrained``, wrapped to write files small enough to fit in memory."""

    def save(*args: Any, **options: Any) -> Any:
        options.setdefault("max_shard_size", _SHARD_SIZE)
        return save_pretrained(*args, **options)

    return save


def _refuse(what: str, instead: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AbsentWeightError("this module", f"{what} is not supported ({instead})")

    return refuse


def _log_if_moved(fn: Callable[[Tensor], Tensor], computes_on: torch.device) -> None:
    """Log, once per device, that a move is ignored and that inputs must be on the store's compute device."""
    wanted = fn(torch.empty(0, device=computes_on)).device
    if wanted.type != computes_on.type:
        # Trainers move models to the CPU and back routinely, but a move to another device is probably intentional.
        log_ignored_move(str(wanted), str(computes_on), logging.INFO if wanted.type == "cpu" else logging.WARNING)


@functools.cache
def log_ignored_move(wanted: str, computes_on: str, level: int) -> None:
    """Log that a move is ignored, and what to do instead."""
    remedy = 'open the store with gpu="auto" to compute on a CUDA device' if computes_on == "cpu" else "leave it there"
    _log.log(
        level,
        'moving an offloaded module to "%s" is ignored, because its store computes on "%s". Its inputs must be on the '
        "same device. Move the inputs, or %s",
        wanted,
        computes_on,
        remedy,
    )
