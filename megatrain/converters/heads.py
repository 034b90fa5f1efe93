"""Reward heads: a model returns one number per text, in place of the language model's head.

The model is transformers' class for sequence classification with one label. Its forward decides the pooling: the last
non-padding token of a decoder, or the first token of BERT. The outputs are small, so they are not cut into pieces as
the logits of a vocabulary are. Only the loss differs: transformers has a mean over a micro-batch, and a step needs a
mean over all its pairs. The loss runs after the model's forward, which runs without labels.

Labels are stored one place later than their text, like labels of a language model, so the engine shifts and counts both
in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from megatrain.base.batch_keys import IGNORED_LABEL, MARGIN
from megatrain.base.errors import UnsupportedModelError
from megatrain.models.converter import ModelConverter
from megatrain.models.task_head import TaskHead, give_head

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["Head", "HeadSpec"]

#: `config.json` of a model with one label.
_ID_TO_LABEL, _LABEL_TO_ID = {0: "LABEL_0"}, {"LABEL_0": 0}


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Loss and padding of a reward head.

    Attributes:
        center_rewards_coefficient: Weight of the squared sum of a pair's rewards, which keeps their mean near zero
            (arXiv 2312.09244); 0 turns it off.
        pad_token_id: Padding token, by which a decoder's forward finds the last token of a text.
    """

    center_rewards_coefficient: float = 0.0
    pad_token_id: int = 0

    def converter(self) -> Head:
        """Return the converter that adds the head."""
        return Head(self)


class Head(ModelConverter):
    """Builds transformers' class for sequence classification, and runs the loss after its forward.

    Args:
        spec: loss and padding.
    """

    def __init__(self, spec: HeadSpec) -> None:
        self._spec = spec

    def model_class(self, config: PretrainedConfig) -> Any:
        """Return transformers' class, and give its configuration one label.

        Raises:
            UnsupportedModelError: transformers has no such class.
        """
        from transformers import AutoModelForSequenceClassification as Auto

        found = Auto._model_mapping.get(type(config), None)
        if found is None:
            raise UnsupportedModelError(
                str(config.model_type),
                f"transformers has no class of it for {Auto.__name__}. Take a model that has one; or train your own "
                "class with megatrain.offload",
            )
        config.id2label, config.label2id = dict(_ID_TO_LABEL), dict(_LABEL_TO_ID)
        if getattr(config, "problem_type", None) not in (None, "single_label_classification"):
            raise UnsupportedModelError(
                str(config.model_type),
                f"config.json says problem_type = {config.problem_type!r}, and a text has one reward here. Train it "
                "with transformers' Trainer by megatrain.hf.offloaded(...)",
            )
        return found

    def convert(self, model: PreTrainedModel) -> None:
        """Run the loss after the model's forward."""
        prefix = re.escape(model.base_model_prefix)
        model.config.pad_token_id = self._spec.pad_token_id  # not earlier: the embedding would not train this row
        # A pooler also belongs to the head: checkpoints of masked language models have none.
        head_names = rf"^(?!{prefix}\.)|^{prefix}\.pooler\."
        values = {
            "id2label": {str(number): name for number, name in _ID_TO_LABEL.items()},
            "label2id": _LABEL_TO_ID,
            "pad_token_id": self._spec.pad_token_id,
            "architectures": [type(model).__name__],
        }
        give_head(model, TaskHead(head_names, head_names, values))
        loss = partial(reward_loss, center=self._spec.center_rewards_coefficient)
        model.__dict__["forward"] = partial(_with_loss, model.forward, loss)


def _with_loss(
    forward: Callable[..., Any],
    loss: Callable[..., tuple[Tensor, Tensor]],
    *,
    labels: Tensor | None = None,
    num_items_in_batch: int | None = None,
    **batch: Any,
) -> Any:
    """Run a model's forward without labels, and add the loss of its rewards.

    Args:
        loss: returns the summed loss and the number of pairs, from rewards, labels and margins.
        labels: labels of the texts, one place later than the texts.
        num_items_in_batch: pairs of the whole step; None for the pairs of this micro-batch.
        batch: other tensors of the micro-batch.
    """
    margin = batch.pop(MARGIN, None)
    output = forward(**batch)
    if labels is not None:
        total, count = loss(output.logits.float(), labels, margin)
        output["loss"] = total / (count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
    return output


def reward_loss(
    logits: Tensor, labels: Tensor, margin: Tensor | None = None, *, center: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of pairs, as in TRL's RewardTrainer, and the number of pairs.

    It is ``-log sigmoid(chosen - rejected - margin)``, plus ``center * (chosen + rejected)**2`` with centering.

    Args:
        logits: Rewards [2 P, 1], all chosen texts first.
        labels: [2 P, 2 or more], -100 in the second column of padding pairs.
        margin: Margin of each chosen text [P]; default: no margin.
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
