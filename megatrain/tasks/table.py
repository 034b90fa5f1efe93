"""Names and facts of tasks; [preference], [reward], [distill] and [evaluation]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import model_validator

from megatrain.base.table import HF, HF_AXOLOTL, ConfigPath, Table, all_alter, key

#: Tasks that a run may train for; ``registry.py`` returns their classes.
TaskName = Literal["sft", "pretrain", "distill", "dpo", "reward"]


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """Facts of a task for a first config, and the kind of its rows.

    Attributes:
        what: Description of its rows and its loss.
        example_data: Example path of such rows.
        learning_rate: Default for training all parameters of a trained model.
        lora_learning_rate: Default for training adapters alone.
        made_by: File of this package that defines the task, and its class there.
        rows: Returns the kind of its rows from its table, or from None for the default table: the file of
            `megatrain/data`, and the object there.
        table: Name of its table in a config, or "".
        is_packed: Whether rows of a micro-batch may hold several documents.
        is_streamed: Whether `data.streaming` is possible.
        has_lm_head: Whether its model has a language model head.
    """

    what: str
    example_data: str
    learning_rate: float
    lora_learning_rate: float
    made_by: str = "text.TextTask"
    rows: Callable[[Any], str] = lambda table: "chat_rows.CHATS"
    table: str = ""
    is_packed: bool = True
    is_streamed: bool = False
    has_lm_head: bool = True


TASK_FACTS: Mapping[str, TaskFacts] = {
    "sft": TaskFacts("chats and prompts, loss on the answers", "data/chat.jsonl", 1e-5, 1e-4, is_streamed=True),
    "pretrain": TaskFacts(
        "plain text, loss on every token",
        "data/*.txt",
        1e-4,
        2e-4,
        rows=lambda table: "text_rows.TEXTS",
        is_streamed=True,
    ),
    "distill": TaskFacts(
        "chats and prompts, loss against the scores of a teacher",
        "data/chat.jsonl",
        1e-5,
        1e-4,
        "distillation.DistillTask",
        table="distill",
    ),
    "dpo": TaskFacts(
        "preferences, which of two answers is better",
        "data/preferences.jsonl",
        1e-6,
        1e-5,
        "dpo.PreferenceTask",
        lambda table: "pair_rows.PAIRS" if table is None or table.is_paired else "tagged_rows.ANSWERS",
        "preference",
        is_packed=False,
    ),
    "reward": TaskFacts(
        "preferences, a reward that is larger for the better of two answers",
        "data/preferences.jsonl",
        1e-5,
        1e-4,
        "reward.RewardTask",
        lambda table: "pair_rows.TEXT_PAIRS",
        "reward",
        is_packed=False,
        has_lm_head=False,
    ),
}

LossType = Literal["sigmoid", "hinge", "ipo", "robust", "kto", "cpo", "orpo", "simpo"]


class PreferenceConfig(Table, json_schema_extra=all_alter("yes")):
    """``[preference]``: the loss of task = "dpo"."""

    loss_type: LossType = key(
        "sigmoid (DPO), hinge, ipo and robust compare two answers relative to the initial model; kto judges "
        "single answers relative to it; cpo, orpo and simpo compare two answers without it.",
        "sigmoid",
        same_name="TRL",
    )
    beta: float = key(
        "Strength of the pull toward the initial model; for orpo the weight of the odds ratio.",
        0.1,
        gt=0,
        same_name="TRL",
    )
    label_smoothing: float = key(
        "Probability that chosen and rejected are swapped.",
        0.0,
        ge=0,
        lt=0.5,
        same_name="TRL",
        used_if={"loss_type": ["sigmoid", "robust", "cpo", "simpo"]},
    )
    simpo_gamma: float = key(
        "simpo: target margin of the chosen answer.",
        0.5,
        ge=0,
        same_name="TRL, LLaMA-Factory",
        used_if={"loss_type": ["simpo"]},
    )
    rpo_alpha: float = key(
        "Weight of the chosen answers' negative log-likelihood in the loss. orpo always adds it once. Default: 1 "
        "with cpo, else 0.",
        0.0,
        ge=0,
        same_name="TRL, Axolotl",
        used_if={"loss_type": ["sigmoid", "hinge", "ipo", "robust", "cpo", "orpo", "simpo"]},
    )
    desirable_weight: float = key(
        "kto: weight of good answers.", 1.0, ge=0, same_name="TRL", used_if={"loss_type": ["kto"]}
    )
    undesirable_weight: float = key(
        "kto: weight of bad answers.", 1.0, ge=0, same_name="TRL", used_if={"loss_type": ["kto"]}
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_likelihood(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("loss_type") == "cpo":
            return {"rpo_alpha": 1.0, **values}
        return values

    @property
    def is_paired(self) -> bool:
        """Whether an example has a chosen and a rejected answer."""
        return self.loss_type != "kto"


class RewardConfig(Table, json_schema_extra=all_alter("yes")):
    """``[reward]``: with ``task = "reward"``, the loss of a pair."""

    center_rewards_coefficient: float = key(
        "Weight of the squared sum of a pair's rewards, which keeps their mean near zero, e.g. 0.01.",
        0.0,
        ge=0,
        same_name="TRL",
    )


class DistillConfig(Table, json_schema_extra=all_alter("yes")):
    """``[distill]``: with ``task = "distill"``, the scores of a teacher and the loss against them."""

    scores: ConfigPath | None = key(
        "Folder of scores that `megatrain-tier score` wrote for the rows of [[data.train]].", None, alters="by contents"
    )
    top_k: int | None = key("Number of likeliest tokens to use, at most those in the scores. Default: all.", None, ge=1)
    temperature: float = key("Temperature of the [score] run; it also divides the student's logits.", 1.0, gt=0)
    alpha: float = key(
        "Share of the cross entropy with the labels: alpha * it + (1 - alpha) * temperature**2 * the divergence.",
        0.0,
        ge=0,
        lt=1,
    )
    rest: Literal["bucket", "ignore", "renormalize"] = key(
        "Treatment of the probability of all other tokens. bucket: one common outcome for teacher and student; "
        "ignore: no term in the loss; renormalize: scale the likeliest tokens to a sum of 1.",
        "bucket",
    )


class EvaluationConfig(Table, json_schema_extra=all_alter("no")):
    """``[evaluation]``: when ``[[data.eval]]``, or what ``data.val_size`` kept, is evaluated, and how much of it."""

    eval_strategy: Literal["no", "steps", "epoch"] = key(
        "When to evaluate; except with no, also at the end. With a [[data.eval]] or data.val_size, the default is"
        " steps.",
        "no",
        same_name=HF,
    )
    eval_steps: int = key(
        "steps: optimizer steps between two evaluations.",
        100,
        ge=1,
        same_name=HF,
        used_if={"eval_strategy": ["steps"]},
    )
    eval_on_start: bool = key("Also evaluate before the first step.", False, same_name=HF)
    eval_max_samples: int | None = key("Use at most this many rows of each set, from the start.", None, ge=1)
    per_device_eval_batch_size: int | None = key(
        "Rows per micro-batch, at most the number in training, for which memory is planned. Default: the same number.",
        None,
        ge=1,
        same_name=HF,
    )
    weights: Literal["trained", "average", "both"] = key(
        "Weights for evaluations and samples: the trained weights, or their average (optimizer.ema_decay). both: "
        "the names of the average's evaluations end with _average. The best checkpoint and early stopping follow "
        "metric_for_best_model; load_best_model_at_end exports the average if that is a metric of the average.",
        "trained",
    )
    predict_with_generate: bool = key(
        "At every evaluation, also continue the first rows of each set with the likeliest tokens, from the start "
        "of their trained part; rows that are trained as a whole are continued from the middle. The log, "
        "metrics.jsonl and the report show the samples.",
        False,
        same_name="transformers, LLaMA-Factory",
    )
    max_predict_samples: int = key(
        "Rows per set to continue.",
        4,
        ge=1,
        used_if={"predict_with_generate": [True]},
    )
    max_new_tokens: int = key(
        "Largest number of new tokens per row.",
        64,
        ge=1,
        same_name="LLaMA-Factory",
        used_if={"predict_with_generate": [True]},
    )
    metric_for_best_model: str = key(
        'Metric that compares evaluations: "loss", or "NAME_loss" with several sets; for preferences also '
        '"rewards/accuracies" and the others, for rewards "accuracy".',
        "loss",
        same_name=HF,
    )
    greater_is_better: bool | None = key(
        "Whether a larger metric is better. Default: false for a loss or a perplexity, else true.", None, same_name=HF
    )
    early_stopping_patience: int = key(
        "End the run after this number of consecutive evaluations that do not improve on the best one by more "
        "than early_stopping_threshold. 0: never.",
        0,
        ge=0,
        same_name=HF_AXOLOTL,
    )
    early_stopping_threshold: float = key("An improvement counts if it exceeds this value.", 0.0, ge=0, same_name=HF)
