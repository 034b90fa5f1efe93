"""From the settings of a run to an optimizer, and to what it does with each parameter."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from megatrain.optim.adafactor import Adafactor
from megatrain.optim.average import EMA, MatrixWeightAverage, WeightAverage
from megatrain.optim.base import MatrixOptimizer, Optimizer, ParameterGroup, Segment, build_segments, decays
from megatrain.optim.elementwise import SGD, AdamW, Lion
from megatrain.optim.moments import StateDtype
from megatrain.optim.muon import AdjustLr, Muon
from megatrain.optim.plugins import OptimizerError, make_custom_optimizer
from megatrain.optim.threads import KernelThreads

if TYPE_CHECKING:
    from megatrain.base.layout import TensorEntry, UnitLayout
    from megatrain.models.graph import ModelGraph

__all__ = [
    "OptimizerSpec",
    "ParameterGroupError",
    "check_groups",
    "make_optimizer",
    "segment_builder",
]


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """The update, but for the learning rate.

    Attributes:
        name: adamw, lion, sgd, adafactor, muon; or custom, one of an installed package.
        weight_decay: Of the parameters that decay.
        decay_exclude: Globs of parameter names that do not decay.
        beta1: Of adamw, lion, and what muon leaves to adamw.
        beta2: Likewise.
        epsilon: Of adamw, and what muon leaves to it.
        momentum: Of sgd and muon.
        nesterov: Of sgd and muon.
        ns_steps: Of muon's iteration.
        adjust_lr: Of muon's learning rate, by the shape of a matrix.
        muon_exclude: Globs of matrices that muon leaves to adamw, beside embeddings and heads.
        custom: Name of the entry point of a custom one.
        arguments: Of a custom one.
        state_dtype: Format of the moments of adamw, lion and sgd.
        seed: Of the rounding of moments in bf16.
        ema_decay: Of an average of the weights; 0: there is none.
        max_grad_norm: Gradients are scaled to at most this norm; 0: no clipping.
        clip_scope: Whose norm that is, and whose update a gradient that is not finite stops or leaves out: the whole
            step's, or each layer's.
        nonfinite: What a NaN or infinite gradient does.
        layer_decay: Factor on the learning rate for each layer between a parameter and the head.
        groups: Parameters with settings of their own; of those that match a parameter the first one counts.
        learning_rates: Key of the config -> each peak learning rate that it names, of the run and of groups.
    """

    name: Literal["adamw", "lion", "sgd", "adafactor", "muon", "custom"] = "adamw"
    weight_decay: float = 0.1
    decay_exclude: tuple[str, ...] = ()
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    momentum: float = 0.9
    nesterov: bool = False
    ns_steps: int = 5
    adjust_lr: AdjustLr = "match_rms_adamw"
    muon_exclude: tuple[str, ...] = ()
    custom: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    state_dtype: StateDtype = "float32"
    seed: int = 0
    ema_decay: float = 0.0
    max_grad_norm: float = 1.0
    clip_scope: Literal["global", "layer"] = "global"
    nonfinite: Literal["stop", "skip", "ignore"] = "stop"
    layer_decay: float = 1.0
    groups: tuple[ParameterGroup, ...] = ()
    learning_rates: Mapping[str, float] = field(default_factory=dict)

    @property
    def defers_updates(self) -> bool:
        """Whether updates wait for the norm of all gradients, which are all held until then.

        Without clipping a step that is to stop the run can stop at the first layer that is not finite: nothing is used
        of a step that ends a run. To leave out a whole step, its last gradient must be known before its first update.
        """
        return self.clip_scope == "global" and (self.max_grad_norm > 0 or self.nonfinite == "skip")


class ParameterGroupError(OptimizerError):
    """A group of `[[optimizer.groups]]` has no effect: it names no trained parameter, or none that decays."""


def make_optimizer(
    spec: OptimizerSpec, threads: KernelThreads | None = None, vocabulary: Container[str] = ()
) -> Optimizer:
    """Return the optimizer of a run.

    Args:
        spec: Its settings.
        threads: Threads to compute on; None makes a set with one thread per usable CPU.
        vocabulary: Full names of the parameters of embeddings and heads, for optimizers that treat these otherwise.

    Raises:
        OptimizerError: a custom one cannot be made.
    """
    made = _updating(spec, threads, vocabulary)
    if not spec.ema_decay:
        return made
    if any(kind.name == EMA.name for kind in made.state_kinds(True)):
        raise OptimizerError(
            f'optimizer.ema_decay: "{spec.custom}" has state of the name "{EMA.name}" itself. Take the key out'
        )
    kind = MatrixWeightAverage if isinstance(made, MatrixOptimizer) else WeightAverage
    return kind(made, spec.ema_decay, threads)


def _updating(spec: OptimizerSpec, threads: KernelThreads | None, vocabulary: Container[str]) -> Optimizer:
    """Return what updates the weights; see `make_optimizer`."""
    if spec.name == "custom":
        return make_custom_optimizer(spec.custom, spec.arguments)
    if spec.name == "adafactor":
        return Adafactor(threads=threads)
    if spec.name == "muon":

        def is_matrix(name: str, shape: Sequence[int]) -> bool:
            is_left_out = name in vocabulary or any(fnmatchcase(name, glob) for glob in spec.muon_exclude)
            return len(shape) >= 2 and not is_left_out

        adamw = AdamW(spec.beta1, spec.beta2, spec.epsilon, threads=threads)
        return Muon(
            adamw,
            is_matrix,
            momentum=spec.momentum,
            nesterov=spec.nesterov,
            num_steps=spec.ns_steps,
            adjust_lr=spec.adjust_lr,
        )
    state_dtype, seed = spec.state_dtype, spec.seed
    if spec.name == "lion":
        return Lion(spec.beta1, spec.beta2, threads=threads, state_dtype=state_dtype, seed=seed)
    if spec.name == "sgd":
        return SGD(spec.momentum, spec.nesterov, threads=threads, state_dtype=state_dtype, seed=seed)
    return AdamW(spec.beta1, spec.beta2, spec.epsilon, threads=threads, state_dtype=state_dtype, seed=seed)


def layer_scales(graph: ModelGraph, layer_decay: float) -> Mapping[str, float]:
    """Return the factor on the learning rate of each block group, by the name of its layout.

    As in timm: what comes after the last layer has 1, the last layer `layer_decay`, each layer before it once more,
    and what comes before the first layer most of all. A tied weight is where it is used first.
    """
    num_layers = len({unit.layer for unit in graph.units if unit.layer})
    scales: dict[str, float] = {}
    depth, last = 0, ""
    for unit in graph.units:
        if unit.layer and unit.layer != last:
            depth, last = depth + 1, unit.layer
        is_after = depth == num_layers and not unit.layer
        for _, _, layout in unit.params:
            scales.setdefault(layout, 1.0 if is_after else layer_decay ** (num_layers + 1 - depth))
    return scales


def segment_builder(
    spec: OptimizerSpec, optimizer: Optimizer, *, split_master: bool, graph: ModelGraph | None = None
) -> Callable[[UnitLayout], tuple[Segment, ...]]:
    """Return the function that tells what of a layout is updated, and how.

    Args:
        spec: Settings of the run.
        optimizer: What `make_optimizer` made of it.
        split_master: As for `Optimizer.state_kinds`.
        graph: The model, where layers have learning rates of their own.
    """
    build = partial(
        build_segments,
        weight_decay=spec.weight_decay,
        exclude=spec.decay_exclude,
        groups=spec.groups,
        kinds=optimizer.state_kinds(split_master),
    )
    if spec.layer_decay == 1.0 or graph is None:
        return build
    scales = layer_scales(graph, spec.layer_decay)

    def scaled(layout: UnitLayout) -> tuple[Segment, ...]:
        scale = scales[layout.name]
        return tuple(replace(segment, lr_scale=segment.lr_scale * scale) for segment in build(layout))

    return scaled


def check_groups(spec: OptimizerSpec, trained: Iterable[TensorEntry]) -> None:
    """Find groups and globs without an effect.

    Args:
        spec: Settings of the run.
        trained: Every parameter that is trained, under its owner's name.

    Raises:
        ParameterGroupError: names the group, the glob, and the parameter that looks most like it.
    """
    entries = list(trained)
    names = list(dict.fromkeys(entry.parameter for entry in entries))
    left = set(names)
    for number, group in enumerate(spec.groups):
        key = f"optimizer.groups.{number}"
        for glob in group.globs:
            if not any(fnmatchcase(name, glob) for name in names):
                near = difflib.get_close_matches(glob.replace("*", ""), names, n=1, cutoff=0.0)
                shown = f' Write one that does; a name of this model is "{near[0]}"' if near else ""
                raise ParameterGroupError(f'{key}.params: "{glob}" names no trained parameter.{shown}')
        own = {name for name in left if group.matches(name)}
        left -= own
        if not own:
            raise ParameterGroupError(
                f"{key} has no effect: groups before it name all of its parameters. Put it before them, or take it out"
            )
        if group.weight_decay and not any(
            entry.parameter in own and decays(entry, spec.decay_exclude) for entry in entries
        ):
            raise ParameterGroupError(
                f"{key}.weight_decay = {group.weight_decay} has no effect: its parameters are vectors, which do "
                "not decay, or stand in optimizer.weight_decay_exclude. Take them out there ([]: vectors decay as "
                "well), or the key out here"
            )
