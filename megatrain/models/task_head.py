"""Task heads. A task head replaces a language model's head, for example in a reward model.

A reward model usually starts from a language model's folder. That folder has no reward head, so the reward head starts
with random weights. An export omits the language model's head (``lm_head``) and changes ``config.json``. A converter
records the task head on the skeleton. The loader and the export read it there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["TaskHead", "head_modules", "head_of", "other_class_advice", "set_head"]

_ATTRIBUTE = "_megatrain_task_head"
_OTHER_TASKS = ("Classification", "QuestionAnswering", "RewardModel")  # class name suffixes of unsupported tasks


@dataclass(frozen=True)
class TaskHead:
    """Differences between a language model's folder and a model with a task head.

    Attributes:
        head_pattern: Pattern for the names of the head's parameters, which are initialized if the folder lacks them.
        other_pattern: Pattern for the tensor names of all other heads, which are neither loaded nor exported.
        config: Values that an export sets in ``config.json``.
    """

    head_pattern: str
    other_pattern: str
    config: Mapping[str, Any] = field(default_factory=dict)

    def is_excluded(self, name: str) -> bool:
        """Return whether a tensor belongs to another head. ``name`` is the tensor's name in the model."""
        return re.search(self.other_pattern, name) is not None


def set_head(model: PreTrainedModel, head: TaskHead) -> None:
    """Record a task head on a skeleton. Make transformers accept folders without this head or with other heads."""
    attributes: Any = cast("Any", model).__dict__
    attributes[_ATTRIBUTE] = head
    for key, pattern in (("missing", head.head_pattern), ("unexpected", head.other_pattern)):
        name = f"_keys_to_ignore_on_load_{key}"
        attributes[name] = [*(getattr(model, name, None) or ()), pattern]


def head_of(model: PreTrainedModel) -> TaskHead | None:
    """Return a skeleton's task head, or None for a language model."""
    head: TaskHead | None = model.__dict__.get(_ATTRIBUTE)
    return head


def head_modules(model: PreTrainedModel) -> list[str]:
    """Return the paths of all top-level modules that have parameters, except transformers' base model."""
    prefix = model.base_model_prefix
    return [
        path
        for path, module in model.named_children()
        if path != prefix and next(module.parameters(), None) is not None
    ]


def other_class_advice(names: Iterable[str]) -> str:
    """Return advice for a folder whose model class is for an unsupported task, or "" if the task is supported."""
    class_name = next((name for name in names if name.endswith(_OTHER_TASKS)), None)
    if class_name is None:
        return ""
    return (
        f'config.json names {class_name}, which is not a causal language model. Set task = "reward" for rewards. Train '
        "classifiers and other models from Python with megatrain.offload, or use megatrain.hf.offloaded(...) with "
        "transformers' Trainer or TRL's RewardTrainer"
    )
