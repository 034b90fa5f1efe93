"""Construction of a run's optimizer and of each parameter's settings from the config."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING

from megatrain.optim.adafactor import Adafactor
from megatrain.optim.average import EMA, MatrixWeightAverage, WeightAverage
from megatrain.optim.base import MatrixOptimizer, Optimizer, Segment, build_segments, bytes_per_parameter, is_decayed
from megatrain.optim.elementwise import SGD, AdamW, ElementwiseOptimizer, Lion
from megatrain.optim.muon import Muon
from megatrain.optim.plugins import OptimizerError, make_custom_optimizer
from megatrain.optim.threads import KernelThreads

if TYPE_CHECKING:
    from megatrain.base.layout import TensorEntry, UnitLayout
    from megatrain.models.graph import ModelGraph
    from megatrain.optim.fused import FusedMatrix
    from megatrain.optim.table import OptimizerConfig

__all__ = [
    "ParameterGroupError",
    "check_groups",
    "make_optimizer",
    "segment_builder",
]


class ParameterGroupError(OptimizerError):
    """Error for a group in `[[optimizer.groups]]` that matches no trained parameter, or has a decay without effect."""


def make_optimizer(
    table: OptimizerConfig,
    threads: KernelThreads | None = None,
    vocabulary: Container[str] = (),
    seed: int = 0,
    fused: Mapping[str, FusedMatrix] | None = None,
) -> Optimizer:
    """Return the optimizer that a config table describes.

    Args:
        threads: Compute threads. None creates one thread per usable CPU.
        vocabulary: Full names of the parameters of embeddings and heads. Some optimizers treat these differently.
        seed: Seed for rounding bf16 moments.
        fused: Parameters that hold several logical matrices, by full name.

    Raises:
        OptimizerError: A custom optimizer cannot be constructed, or cannot be combined with an average.
    """
    optimizer = _base_optimizer(table, threads, vocabulary, seed, fused)
    if not table.ema_decay:
        return optimizer
    if any(kind.name == EMA.name for kind in optimizer.state_kinds(True)):
        name = table.custom_optimizer
        raise OptimizerError(f'optimizer.ema_decay: "{name}" already has state named "{EMA.name}". Remove the key')
    wrapper = MatrixWeightAverage if isinstance(optimizer, MatrixOptimizer) else WeightAverage
    return wrapper(optimizer, table.ema_decay, threads)


def _base_optimizer(
    table: OptimizerConfig,
    threads: KernelThreads | None,
    vocabulary: Container[str],
    seed: int,
    fused: Mapping[str, FusedMatrix] | None,
) -> Optimizer:
    """Return the optimizer without averaging; see `make_optimizer`."""
    if table.optim == "custom":
        return make_custom_optimizer(table.custom_optimizer, table.optim_args)
    if table.optim == "adafactor":
        return Adafactor(threads=threads)
    betas = (table.adam_beta1, table.adam_beta2)
    if table.optim == "muon":

        def is_matrix(name: str, shape: Sequence[int]) -> bool:
            is_left_out = name in vocabulary or any(fnmatchcase(name, glob) for glob in table.muon_exclude)
            return len(shape) >= 2 and not is_left_out

        return Muon(
            AdamW(*betas, table.adam_epsilon, threads=threads),
            is_matrix,
            momentum=table.muon_momentum,
            nesterov=table.muon_nesterov,
            num_steps=table.muon_ns_steps,
            adjust_lr=table.muon_adjust_lr,
            fused=None if table.muon_fused == "whole" else fused,
        )
    state_dtype = table.state_dtype
    if table.optim == "lion":
        return Lion(*betas, threads=threads, state_dtype=state_dtype, seed=seed)
    if table.optim == "sgd":
        return SGD(table.sgd_momentum, table.sgd_nesterov, threads=threads, state_dtype=state_dtype, seed=seed)
    return AdamW(*betas, table.adam_epsilon, threads=threads, state_dtype=state_dtype, seed=seed)


def layer_scales(graph: ModelGraph, layer_decay: float) -> Mapping[str, float]:
    """Return each block group's learning rate factor, by layout name.

    As in timm, units after the last layer have the factor 1. The last layer has `layer_decay`, and each earlier layer
    has the next power of `layer_decay`. Units before the first layer have the highest power. A tied weight has the
    factor of its first use.
    """
    num_layers = len({unit.layer for unit in graph.units if unit.layer})
    scales: dict[str, float] = {}
    depth, last_layer = 0, ""
    for unit in graph.units:
        if unit.layer and unit.layer != last_layer:
            depth, last_layer = depth + 1, unit.layer
        is_after = depth == num_layers and not unit.layer
        for _, _, layout in unit.params:
            scales.setdefault(layout, 1.0 if is_after else layer_decay ** (num_layers + 1 - depth))
    return scales


def segment_builder(
    table: OptimizerConfig, optimizer: Optimizer, *, split_master: bool, graph: ModelGraph | None = None
) -> Callable[[UnitLayout], tuple[Segment, ...]]:
    """Return the function that builds the segments of a layout.

    Args:
        optimizer: Result of `make_optimizer`.
        split_master: As in `Optimizer.state_kinds`.
        graph: The model. Required if layers have different learning rates.
    """
    build = partial(
        build_segments,
        weight_decay=table.weight_decay,
        exclude=table.weight_decay_exclude,
        groups=table.groups,
        learning_rate=table.learning_rate,
        kinds=optimizer.state_kinds(split_master),
    )
    if table.layer_decay == 1.0 or graph is None:
        return build
    scales = layer_scales(graph, table.layer_decay)

    def build_scaled(layout: UnitLayout) -> tuple[Segment, ...]:
        scale = scales[layout.name]
        return tuple(replace(segment, lr_scale=segment.lr_scale * scale) for segment in build(layout))

    return build_scaled


def check_groups(table: OptimizerConfig, trained_entries: Iterable[TensorEntry]) -> None:
    """Raise an error if a group or glob has no effect.

    Args:
        trained_entries: Layout entries of all trained parameters.

    Raises:
        ParameterGroupError: A group or glob has no effect. The message suggests the most similar parameter name.
    """
    entries = list(trained_entries)
    names = list(dict.fromkeys(entry.parameter for entry in entries))
    unmatched = set(names)
    for index, group in enumerate(table.groups):
        key = f"optimizer.groups.{index}"
        for glob in group.params:
            if not any(fnmatchcase(name, glob) for name in names):
                close_matches = difflib.get_close_matches(glob.replace("*", ""), names, n=1, cutoff=0.0)
                hint = f'; the most similar one is "{close_matches[0]}"' if close_matches else ""
                text = f'{key}.params: "{glob}" matches no trained parameter. Write a pattern that matches one{hint}'
                raise ParameterGroupError(text)
        group_names = {name for name in unmatched if group.matches(name)}
        unmatched -= group_names
        if not group_names:
            raise ParameterGroupError(
                f"{key} has no effect, because earlier groups match all of its parameters. Move it up or remove it"
            )
        if group.weight_decay and not any(
            entry.parameter in group_names and is_decayed(entry, table.weight_decay_exclude) for entry in entries
        ):
            raise ParameterGroupError(
                f"{key}.weight_decay = {group.weight_decay} has no effect: its parameters are vectors, which do "
                "not decay, or match optimizer.weight_decay_exclude. Change optimizer.weight_decay_exclude (with "
                "[], vectors also decay), or remove this weight_decay"
            )


def has_measured_kernel(optimizer: Optimizer, *, split_master: bool) -> bool:
    """Return whether the `doctor` command measures this optimizer: only AdamW with 12 bytes per parameter."""
    return type(optimizer) is AdamW and bytes_per_parameter(optimizer.state_kinds(split_master)) == 12


def is_memory_bound(optimizer: Optimizer) -> bool:
    """Return whether memory bandwidth limits updates. False for bf16 or int8 moments, Adafactor and custom optimizers.

    On two cores, Lion, SGD and averages reach AdamW's bytes per second within 12 %. Updates take longer than their
    bytes predict for bf16 moments (1.4 to 2.5 times) and for int8 moments in blocks of 256 (nine times).
    """
    inner = optimizer.inner if isinstance(optimizer, WeightAverage) else optimizer
    is_fp32 = isinstance(inner, ElementwiseOptimizer) and inner.state_dtype == "float32"
    return is_fp32 or isinstance(inner, Muon)
