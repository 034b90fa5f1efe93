"""From the `[optimizer]` table of a config to an optimizer, and to what it does with each parameter."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING

from megatrain.optim.adafactor import Adafactor, AdafactorConfig
from megatrain.optim.base import Optimizer, ParameterGroup, Segment, build_segments, decays
from megatrain.optim.elementwise import SGD, AdamW, AdamWConfig, Lion, LionConfig, SGDConfig
from megatrain.optim.threads import KernelThreads

if TYPE_CHECKING:
    from megatrain.config.schema import OptimizerConfig
    from megatrain.models.layout import TensorEntry, UnitLayout

__all__ = ["ParameterGroupError", "check_groups", "make_optimizer", "parameter_groups", "segment_builder"]


class ParameterGroupError(ValueError):
    """A group of `[[optimizer.groups]]` has no effect: it names no trained parameter, or none that decays."""


def make_optimizer(table: OptimizerConfig, threads: KernelThreads | None = None) -> Optimizer:
    """Return the optimizer that a config asks for.

    Args:
        table: `[optimizer]` of the config.
        threads: Threads to compute on; None makes a set with one thread per usable CPU.
    """
    lr, decay = table.learning_rate, table.weight_decay
    if table.optim == "lion":
        return Lion(LionConfig(lr, table.adam_beta1, table.adam_beta2, decay), threads)
    if table.optim == "sgd":
        return SGD(SGDConfig(lr, table.sgd_momentum, table.sgd_nesterov, decay), threads)
    if table.optim == "adafactor":
        return Adafactor(AdafactorConfig(lr, weight_decay=decay), threads)
    return AdamW(AdamWConfig(lr, table.adam_beta1, table.adam_beta2, table.adam_epsilon, decay), threads)


def parameter_groups(table: OptimizerConfig) -> tuple[ParameterGroup, ...]:
    """Return the groups of a config, in order: of those that match a parameter the first one counts."""
    return tuple(
        ParameterGroup(
            group.params,
            1.0 if group.learning_rate is None else group.learning_rate / table.learning_rate,
            group.weight_decay,
        )
        for group in table.groups
    )


def segment_builder(
    table: OptimizerConfig, optimizer: Optimizer, *, split_master: bool
) -> Callable[[UnitLayout], tuple[Segment, ...]]:
    """Return the function that tells what of a layout is updated, and how.

    Args:
        table: `[optimizer]` of the config.
        optimizer: What `make_optimizer` made of it.
        split_master: As for `Optimizer.state_kinds`.
    """
    return partial(
        build_segments,
        weight_decay=table.weight_decay,
        exclude=table.weight_decay_exclude,
        groups=parameter_groups(table),
        kinds=optimizer.state_kinds(split_master),
    )


def check_groups(table: OptimizerConfig, trained: Iterable[TensorEntry]) -> None:
    """Find groups and globs without an effect.

    Args:
        table: `[optimizer]` of the config.
        trained: Every parameter that is trained, under its owner's name.

    Raises:
        ParameterGroupError: names the group, the glob, and the parameter that looks most like it.
    """
    entries = list(trained)
    names = [entry.name for entry in entries]
    left = set(names)
    for number, group in enumerate(table.groups):
        key = f"optimizer.groups.{number}"
        for glob in group.params:
            if not any(fnmatchcase(name, glob) for name in names):
                near = difflib.get_close_matches(glob.replace("*", ""), names, n=1, cutoff=0.0)
                shown = f' Write one that does; a name of this model is "{near[0]}"' if near else ""
                raise ParameterGroupError(f'{key}.params: "{glob}" names no trained parameter.{shown}')
        own = {name for name in left if any(fnmatchcase(name, glob) for glob in group.params)}
        left -= own
        if not own:
            raise ParameterGroupError(
                f"{key} has no effect: groups before it name all of its parameters. Put it before them, or take it out"
            )
        if group.weight_decay and not any(
            entry.name in own and decays(entry, table.weight_decay_exclude) for entry in entries
        ):
            raise ParameterGroupError(
                f"{key}.weight_decay = {group.weight_decay} has no effect: its parameters are vectors, which never "
                "decay, or stand in optimizer.weight_decay_exclude. Take them out there, or the key out here"
            )
