"""Reward heads, which replace the language model's head and return one number per text.

The model is transformers' class for sequence classification with one label. Its forward determines the pooling: a
decoder uses the last token before padding, and BERT uses the first token. The outputs are small, so unlike a language
model's head, this head does not run in pieces. Only the loss differs: transformers returns the mean over a micro-batch,
but a step needs the mean over all its pairs. The model's forward therefore runs without labels, and the loss is
computed from its outputs.

Labels are stored one position after the text, so that the engine shifts and counts them as in a language model.
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
from megatrain.models.task_head import TaskHead, set_head

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["Head", "HeadSpec"]

#: Entries of `config.json` for a model with one label.
_ID_TO_LABEL, _LABEL_TO_ID = {0: "LABEL_0"}, {"LABEL_0": 0}


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Loss and padding of a reward head.

    Attributes:
        center_rewards_coefficient: Weight of a loss term that keeps the mean reward near zero: the squared sum of a
            pair's rewards (arXiv 2312.09244). 0 to disable.
        pad_token_id: Padding token. A decoder's forward needs it to find the last token of a text.
    """

    center_rewards_coefficient: float = 0.0
    pad_token_id: int = 0

    def converter(self) -> Head:
        """Return the converter that adds the head."""
        return Head(self)


class Head(ModelConverter):
    """Converter that builds transformers' class for sequence classification, and adds the loss to its forward.

    Args:
        spec: Loss and padding.
    """

    def __init__(self, spec: HeadSpec) -> None:
        self._spec = spec

    def model_class(self, config: PretrainedConfig) -> Any:
        """Return transformers' class for sequence classification. Change the configuration to one label.

        Raises:
            UnsupportedModelError: If transformers has no such class for the model type.
        """
        from transformers import AutoModelForSequenceClassification as Auto

        model_class = Auto._model_mapping.get(type(config), None)
        if model_class is None:
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
        return model_class

    def convert(self, model: PreTrainedModel) -> None:
        """Wrap the model's forward so that it also computes the loss."""
        prefix = re.escape(model.base_model_prefix)
        # Set this after building the model, because the embedding would otherwise not train the padding token's row.
        model.config.pad_token_id = self._spec.pad_token_id
        # The pooler belongs to the head, because checkpoints of masked language models have no pooler.
        head_names = rf"^(?!{prefix}\.)|^{prefix}\.pooler\."
        values = {
            "id2label": {str(index): name for index, name in _ID_TO_LABEL.items()},
            "label2id": _LABEL_TO_ID,
            "pad_token_id": self._spec.pad_token_id,
            "architectures": [type(model).__name__],
        }
        set_head(model, TaskHead(head_names, head_names, values))
        loss = partial(reward_loss, center=self._spec.center_rewards_coefficient)
        model.__dict__["forward"] = partial(_run_with_loss, model.forward, loss)


def _run_with_loss(
    forward: Callable[..., Any],
    loss: Callable[..., tuple[Tensor, Tensor]],
    *,
    labels: Tensor | None = None,
    num_items_in_batch: int | None = None,
    **batch: Any,
) -> Any:
    """Run a model's forward without labels, and add the loss to its output.

    Args:
        loss: Function that returns the summed loss and the number of pairs, given rewards, labels and margins.
        labels: Labels of the texts, one position after each text.
        num_items_in_batch: Number of pairs in the whole step; None for the number of pairs in this micro-batch.
        batch: All other tensors of the micro-batch.
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
    """Return the sum of all pairs' losses, as in TRL's RewardTrainer, and the number of pairs.

    The loss of a pair is ``-log sigmoid(chosen - rejected - margin) + center * (chosen + rejected)**2``.

    Args:
        logits: Rewards [2 P, 1], first of the chosen texts, then of the rejected texts.
        labels: Labels [2 P, 2 or more], with -100 in the second column of padding pairs.
        margin: Margin of each pair [P]; None for no margin.
    """
    chosen, rejected = logits.squeeze(-1).chunk(2)
    is_present = labels[: len(chosen), 1] != IGNORED_LABEL
    difference = chosen - rejected
    if margin is not None:
        difference = difference - margin
    losses = -functional.logsigmoid(difference)
    if center:
        losses = losses + center * (chosen + rejected) ** 2
    return torch.where(is_present, losses, 0.0).sum(), is_present.sum()
