"""Heads that judge texts in the place of a language model's: classes of texts or of tokens, and rewards.

The model is the class that Hugging Face has for the task, and its own forward decides what is pooled, and by which
head: the last token of a decoder that is no padding, the first one of BERT, their mean. What it says is small, a few
numbers for a text or a token, so nothing of it is cut into pieces as logits of words are. Only the loss is ours, as
that of transformers is a mean over a micro-batch, and a step's is a mean over all of its rows: it is put behind the
model's forward, which is run without labels.

Labels stand one place later than what they belong to, as labels of a language model do, so that the engine shifts and
counts both alike (`data/labels.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from megatrain.base.batch_keys import IGNORED_LABEL, MARGIN
from megatrain.base.errors import UnsupportedModelError
from megatrain.models.converter import ModelConverter
from megatrain.models.task_head import TaskHead, give_head

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["Head", "HeadSpec", "class_names"]

_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")  # ends of the names of classes


def class_names(config_json: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the classes that the ``config.json`` of a classifier names, in order; none of another model's."""
    names = config_json.get("architectures") or ()
    if not any(str(name).endswith(_CLASSIFIERS) for name in names):
        return ()
    by_number = {int(number): str(name) for number, name in (config_json.get("id2label") or {}).items()}
    return tuple(by_number[number] for number in sorted(by_number))


#: Returns the sum over what has a label, and how many have: of logits, labels and margins.
_Loss = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Which head a model has, and what its loss is.

    Attributes:
        kind: "reward": one number for a text; "sequence": a class of each text; "token": a class of each token.
        names: Of the classes, in the order of their numbers; none of rewards.
        center_rewards_coefficient: Weight of the square of the sum of a pair's rewards, which keeps their mean near
            zero (arXiv 2312.09244); 0: none.
        pad_token_id: What rows are filled with, by which a decoder's own forward finds the last token of a text.
    """

    kind: Literal["reward", "sequence", "token"]
    names: tuple[str, ...] = ()
    center_rewards_coefficient: float = 0.0
    pad_token_id: int = 0

    def converter(self) -> Head:
        """Return what puts the head on."""
        return Head(self)


class Head(ModelConverter):
    """Builds the class that transformers has for a task, and puts the loss behind its forward.

    Args:
        spec: Which head.
    """

    def __init__(self, spec: HeadSpec) -> None:
        self._spec = spec

    def model_class(self, config: PretrainedConfig) -> Any:
        """Return transformers' class for the task, and make its configuration one with these classes.

        Raises:
            UnsupportedModelError: there is none.
        """
        import transformers

        is_token = self._spec.kind == "token"
        auto = (
            transformers.AutoModelForTokenClassification
            if is_token
            else transformers.AutoModelForSequenceClassification
        )
        found = auto._model_mapping.get(type(config), None)
        if found is None:
            raise UnsupportedModelError(
                str(config.model_type),
                f"transformers has no class of it for {auto.__name__}. Take a model that has one; or train your own "
                "class with megatrain.offload",
            )
        config.id2label, config.label2id = self._config_values["id2label"], self._config_values["label2id"]
        if getattr(config, "problem_type", None) not in (None, "single_label_classification"):
            raise UnsupportedModelError(
                str(config.model_type),
                f"config.json says problem_type = {config.problem_type!r}, and a text has one class here. Train it "
                "with transformers' Trainer by megatrain.hf.offloaded(...)",
            )
        return found

    @property
    def _config_values(self) -> dict[str, Any]:
        names = self._spec.names or ("LABEL_0",)
        return {
            "id2label": dict(enumerate(names)),
            "label2id": {name: number for number, name in enumerate(names)},
            "pad_token_id": self._spec.pad_token_id,
        }

    def convert(self, model: PreTrainedModel) -> None:
        """Put the loss behind the model's forward."""
        prefix = re.escape(model.base_model_prefix)
        model.config.pad_token_id = self._spec.pad_token_id  # not before: an embedding would train no such row
        # A pooler is a head as well: checkpoints of masked words have none, and classes of tokens none either.
        beside = rf"^(?!{prefix}\.)|^{prefix}\.pooler\."
        values = {
            **self._config_values,
            "id2label": {str(number): name for number, name in self._config_values["id2label"].items()},
            "architectures": [type(model).__name__],
        }
        give_head(model, TaskHead(beside, beside, "TOKEN_CLS" if self._spec.kind == "token" else "SEQ_CLS", values))
        losses: dict[str, _Loss] = {
            "reward": partial(reward_loss, center=self._spec.center_rewards_coefficient),
            "sequence": text_loss,
            "token": token_loss,
        }
        model.__dict__["forward"] = partial(_judged, model.forward, losses[self._spec.kind])


def _judged(
    forward: Callable[..., Any],
    loss: _Loss,
    *,
    labels: Tensor | None = None,
    num_items_in_batch: int | None = None,
    **batch: Any,
) -> Any:
    """Run a model's own forward without labels, and add the loss of what it says.

    Args:
        forward: The model's.
        loss: Takes its logits, the labels and the margins.
        labels: One place later than what they belong to.
        num_items_in_batch: Labels of the whole step; None: of this micro-batch.
        batch: What else the micro-batch has.
    """
    margin = batch.pop(MARGIN, None)
    output = forward(**batch)
    if labels is not None:
        total, count = loss(output.logits.float(), labels, margin)
        output["loss"] = total / (count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
    return output


def text_loss(logits: Tensor, labels: Tensor, margin: None = None) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy of texts, and how many have a label.

    Args:
        logits: [B, classes].
        labels: [B, 2 or more], the second column has the class of each text.
        margin: Not for classes.
    """
    return _cross_entropy(logits, labels[:, 1])


def token_loss(logits: Tensor, labels: Tensor, margin: None = None) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy of tokens, and how many have a label.

    Args:
        logits: [B, S, classes].
        labels: [B, S + 1]; what a plan traces is [B, S].
        margin: Not for classes.
    """
    aligned = functional.pad(labels, (0, 1), value=IGNORED_LABEL)[:, 1 : logits.shape[1] + 1]
    return _cross_entropy(logits.flatten(0, 1), aligned.reshape(-1))


def _cross_entropy(logits: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    # What is measured before a run has tokens in the place of classes.
    classes = classes.clamp(max=logits.shape[-1] - 1)
    total = functional.cross_entropy(logits, classes, ignore_index=IGNORED_LABEL, reduction="sum")
    return total, (classes != IGNORED_LABEL).sum()


def reward_loss(
    logits: Tensor, labels: Tensor, margin: Tensor | None = None, *, center: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of pairs, as TRL's RewardTrainer has it, and how many there are.

    It is ``-log sigmoid(chosen - rejected - margin)``, and with a centering ``center * (chosen + rejected)**2`` more.

    Args:
        logits: Rewards [2 P, 1], those of all chosen texts first.
        labels: [2 P, 2 or more], -100 in the second column of pairs that are none.
        margin: By how much each chosen text should win [P]; None: by any.
        center: Weight of the centering.
    """
    chosen, rejected = logits.squeeze(-1).chunk(2)
    is_there = labels[: len(chosen), 1] != IGNORED_LABEL
    difference = chosen - rejected
    if margin is not None:
        difference = difference - margin
    losses = -functional.logsigmoid(difference)
    if center:
        losses = losses + center * (chosen + rejected) ** 2
    return torch.where(is_there, losses, 0.0).sum(), is_there.sum()
