"""A head that takes the place of the language model's: a folder need not have it, and may have others.

A reward model usually starts from a folder of a language model. Its own head is not in the folder and begins with
random weights. The reward model has no place for the language model's head (``lm_head``), so an export leaves it out,
and its ``config.json`` has other values. A converter notes all this on the skeleton; the loader and the export read it.
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
_OTHER_TASKS = ("Classification", "QuestionAnswering", "RewardModel")  # ends of the names of classes


@dataclass(frozen=True)
class TaskHead:
    """What a folder may lack for a model with such a head, and what of it is left out.

    Attributes:
        own: Pattern of the names of parameters that are made anew where the folder has none.
        others: Pattern of the names of tensors that are left out, also of an export, where the model has no place.
        config: Keys that ``config.json`` of an export has.
    """

    own: str
    others: str
    config: Mapping[str, Any] = field(default_factory=dict)

    def is_left_out(self, name: str) -> bool:
        """Return whether a tensor of a folder, by its name in the model, belongs to another head."""
        return re.search(self.others, name) is not None


def give_head(model: PreTrainedModel, head: TaskHead) -> None:
    """Note a head on a skeleton. Transformers' own lists of what may be absent, or too much, are extended by it."""
    own: Any = cast("Any", model).__dict__
    own[_ATTRIBUTE] = head
    for key, pattern in (("missing", head.own), ("unexpected", head.others)):
        name = f"_keys_to_ignore_on_load_{key}"
        own[name] = [*(getattr(model, name, None) or ()), pattern]


def head_of(model: PreTrainedModel) -> TaskHead | None:
    """Return the head that was noted on a skeleton; None: it is a language model."""
    found: TaskHead | None = model.__dict__.get(_ATTRIBUTE)
    return found


def head_modules(model: PreTrainedModel) -> list[str]:
    """Return the paths of the modules with parameters beside the model that transformers calls the base."""
    prefix = model.base_model_prefix
    return [
        path
        for path, module in model.named_children()
        if path != prefix and next(module.parameters(), None) is not None
    ]


def ways_of_other_classes(names: Iterable[str]) -> str:
    """Return how a folder is trained whose classes are those of another task than words; "": it has none such."""
    other = next((name for name in names if name.endswith(_OTHER_TASKS)), None)
    if other is None:
        return ""
    return (
        f'config.json names {other}, which is no causal language model. Write task = "reward" for rewards. Train '
        "classifiers and other kinds from Python with megatrain.offload, or with transformers' Trainer or TRL's "
        "RewardTrainer by megatrain.hf.offloaded(...)"
    )
