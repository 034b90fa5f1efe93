"""A head that replaces the language model's head: a folder need not have it, and may have others.

A reward model usually starts from the folder of a language model, which lacks the reward head. So the head starts with
random weights. The reward model has no place for the language model's head (``lm_head``), so an export leaves it out
and changes ``config.json``. A converter records all this on the skeleton; the loader and the export read it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["TaskHead", "give_head", "head_modules", "head_of", "ways_of_other_classes"]

_ATTRIBUTE = "_megatrain_task_head"
_OTHER_TASKS = ("Classification", "QuestionAnswering", "RewardModel")  # suffixes of class names


@dataclass(frozen=True)
class TaskHead:
    """Differences between a folder and a model with such a head.

    Attributes:
        own: Pattern of parameter names that are initialised if the folder lacks them.
        others: Pattern of tensor names that are dropped, also from an export, if the model has no place for them.
        config: Keys that an export sets in ``config.json``.
    """

    own: str
    others: str
    config: Mapping[str, Any] = field(default_factory=dict)

    def is_left_out(self, name: str) -> bool:
        """Return whether a tensor, by its name in the model, belongs to another head."""
        return re.search(self.others, name) is not None


def give_head(model: PreTrainedModel, head: TaskHead) -> None:
    """Record a head on a skeleton. Adds its names to transformers' lists of missing and unexpected keys."""
    own: Any = cast("Any", model).__dict__
    own[_ATTRIBUTE] = head
    for key, pattern in (("missing", head.own), ("unexpected", head.others)):
        name = f"_keys_to_ignore_on_load_{key}"
        own[name] = [*(getattr(model, name, None) or ()), pattern]


def head_of(model: PreTrainedModel) -> TaskHead | None:
    """Return the head recorded on a skeleton, or None for a language model."""
    found: TaskHead | None = model.__dict__.get(_ATTRIBUTE)
    return found


def head_modules(model: PreTrainedModel) -> list[str]:
    """Return the paths of the modules with parameters outside of transformers' base model."""
    prefix = model.base_model_prefix
    return [
        path
        for path, module in model.named_children()
        if path != prefix and next(module.parameters(), None) is not None
    ]


def ways_of_other_classes(names: Iterable[str]) -> str:
    """Return how to train a folder whose class is for a task other than text, or "" if no class is."""
    other = next((name for name in names if name.endswith(_OTHER_TASKS)), None)
    if other is None:
        return ""
    return (
        f'config.json names {other}, which is no causal language model. Write task = "reward" for rewards. Train '
        "classifiers and other kinds from Python with megatrain.offload, or with transformers' Trainer or TRL's "
        "RewardTrainer by megatrain.hf.offloaded(...)"
    )
