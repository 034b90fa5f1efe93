"""Settings of each parameter's update: the update rule of its group, its number of steps and its learning rate."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from megatrain.embed.groups import Settings, StateGroup
from megatrain.embed.optimizer_checks import check_state
from megatrain.optim.base import Optimizer as Arithmetic

#: Maximum number of cached update rules.
_MAX_RULES = 64


class StepCounter:
    """Counter of each parameter's updates, and source of their settings. Groups with equal settings share a rule.

    Args:
        names: Names of the group settings on which an update rule depends.
        make_rule: Function that returns the update rule for a group's settings.

    Attributes:
        steps: Number of updates of each parameter. Parameters that were never updated are missing.
    """

    def __init__(self, names: Sequence[str], make_rule: Callable[[Mapping[str, Any]], Arithmetic]) -> None:
        self.steps: dict[nn.Parameter, int] = {}
        self._names, self._make_rule = names, make_rule
        self._rules: dict[tuple[Any, ...], Arithmetic] = {}

    def count_steps(
        self, param_groups: Iterable[Mapping[str, Any]], taken: Sequence[tuple[StateGroup, Collection[str]]]
    ) -> dict[int, Settings]:
        """Count a step for each parameter with a gradient, and return these parameters' settings by ``id()``.

        Parameters of a group with the same step count share one ``Settings`` object.

        Args:
            taken: State groups, each with the names of its parameters that have a gradient.

        Raises:
            ValueError: A changed setting needs state that does not exist. No step is counted.
        """
        with_gradient = {id(group.parameters[name]) for group, names in taken for name in names}
        settings: dict[int, Settings] = {}
        new_counts: dict[nn.Parameter, int] = {}
        for param_group in param_groups:
            own = [parameter for parameter in param_group["params"] if id(parameter) in with_gradient]
            rule, lr = self._rule(param_group), float(param_group["lr"])
            decay = float(param_group.get("weight_decay", 0.0))
            check_state(
                {kind.name for kind in rule.state_kinds(False)} - {"weight"}, own, [group for group, _ in taken]
            )
            counts = [self.steps.get(parameter, 0) + 1 for parameter in own]
            step_settings = {step: Settings(rule, step, lr, decay) for step in set(counts)}
            new_counts.update(zip(own, counts, strict=True))
            settings.update(zip(map(id, own), map(step_settings.__getitem__, counts), strict=True))
        self.steps.update(new_counts)
        return settings

    def _rule(self, settings: Mapping[str, Any]) -> Arithmetic:
        key = tuple(_make_comparable(settings[name]) for name in self._names)
        if key not in self._rules:
            if len(self._rules) >= _MAX_RULES:  # for example, if a scheduler changes betas in every step
                self._rules.clear()
            self._rules[key] = self._make_rule(settings)
        return self._rules[key]


def _make_comparable(value: Any) -> Any:
    """Convert a number or sequence to floats, so that it compares by value. Return text and None unchanged."""
    if value is None or isinstance(value, str):
        return value
    return tuple(float(item) for item in value) if isinstance(value, list | tuple) else float(value)
