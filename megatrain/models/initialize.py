"""Random weights by the model's own rules, tensor by tensor, without the model in memory."""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from megatrain.models.checkpoint_names import tied_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from transformers import PreTrainedModel

    from megatrain.models.layout import UnitLayout


class InitializationError(Exception):
    """The model's class has no rule for one of its parameters, so it cannot be trained from scratch here."""


def init_weights(model: PreTrainedModel, layout: UnitLayout, views: Mapping[str, Tensor], seed: int) -> None:
    """Fill the views of one layout with random weights, as ``model`` itself would draw them.

    The numbers depend on the seed and the names of the modules alone: not on the order of the calls, nor on where
    anything is placed. The global random state is left as it was.

    Args:
        model: the skeleton; its parameters may be on the meta device.
        layout: a layout of the graph that the model belongs to.
        views: full parameter name -> fp32 CPU tensor of the parameter's shape; written completely.
        seed: the run's seed.

    Raises:
        InitializationError: neither transformers nor torch has a rule for a parameter.
    """
    initialize_tensors(model, {entry.name: views[entry.name] for entry in layout.entries}, seed)


def initialize_tensors(model: PreTrainedModel, tensors: Mapping[str, Tensor], seed: int) -> None:
    """Fill ``tensors`` (full parameter name -> CPU tensor) as `init_weights` does for a whole layout."""
    from transformers import initialization

    for tensor in tensors.values():
        tensor.fill_(float("nan"))  # what is still NaN afterwards has no rule
    owners = _owner_names(model, tensors)
    bound = {owners[name]: tensor for name, tensor in tensors.items()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _bound(model, bound):
        with initialization.guard_torch_init_functions():
            for name, module, owner in _modules_of(model, bound):
                torch.manual_seed(_seed(seed, name))
                cast("Any", owner)._init_weights(module)
        for name in sorted(name for name, tensor in bound.items() if _has_nan(tensor)):
            module_name, _, leaf = name.rpartition(".")
            torch.manual_seed(_seed(seed, module_name))
            _reset(model.get_submodule(module_name), leaf)
    without_rule = sorted(name for name, tensor in tensors.items() if _has_nan(tensor))
    if without_rule:
        raise InitializationError(
            f"{type(model).__name__} has no rule to initialise {', '.join(without_rule[:4])}; "
            "start from a folder with weights instead of train_from_scratch"
        )


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1


def _has_nan(tensor: Tensor) -> bool:
    return bool(tensor.sum().isnan())  # a sum needs no memory of the tensor's size


def _reset(module: nn.Module, leaf: str) -> None:
    """Run torch's own rule of ``module``, but keep what the model's rules gave its other parameters."""
    reset: Callable[[], None] | None = getattr(module, "reset_parameters", None)
    if reset is None:
        return
    kept = {name: value for name, value in module._parameters.items() if name != leaf and value is not None}
    for name, value in kept.items():
        module._parameters[name] = nn.Parameter(torch.empty_like(value), requires_grad=False)
    try:
        reset()
    finally:
        module._parameters.update(kept)


def _owner_names(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Return name -> the name whose module's rule counts: transformers ties after it has initialised both."""
    source_of = {name: group[0] for group in tied_groups(model) for name in group}
    return {name: source_of.get(name, name) for name in names}


@contextmanager
def _bound(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Let the parameters of ``model`` be ``tensors`` for a while; other names of a tied one stay on meta."""
    changed: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for name, tensor in tensors.items():
            module_name, _, leaf = name.rpartition(".")
            module = model.get_submodule(module_name)
            changed.append((module, leaf, model.get_parameter(name)))
            module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        yield
    finally:
        for module, leaf, parameter in changed:
            module._parameters[leaf] = parameter


def _modules_of(
    model: PreTrainedModel, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """Yield (name, module, model whose rules apply) of the owners of ``tensors`` and all modules above.

    The order is that of transformers, children first: a module above may set what lies further down (GPT-2 scales
    the last projection of each block).
    """
    from transformers import PreTrainedModel

    wanted = {""}
    for name in tensors:
        parts = name.split(".")
        wanted.update(".".join(parts[:length]) for length in range(1, len(parts)))

    def visit(name: str, module: nn.Module, owner: PreTrainedModel) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
        if name not in wanted:
            return
        if isinstance(module, PreTrainedModel):
            owner = module
        for child_name, child in module.named_children():
            yield from visit(f"{name}.{child_name}" if name else child_name, child, owner)
        yield name, module, owner

    return visit("", model, model)
