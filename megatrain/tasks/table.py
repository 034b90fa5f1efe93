"""The names of tasks and what they are; [preference], [reward], [distill] and [evaluation]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import model_validator

from megatrain.base.table import HF, HF_AXOLOTL, ConfigPath, Table, all_alter, key

#: What a run may train for; ``known.py`` makes it.
TaskName = Literal["sft", "pretrain", "distill", "dpo", "reward"]


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """What a first config says of a task, and what its rows are.

    Attributes:
        what: Its rows and its loss, in words.
        example_data: A path of such rows.
        learning_rate: Of all parameters of a trained model.
        lora_learning_rate: Where adapters alone are trained.
        formats: Of rows that this task alone takes, and no others; none: those that are trained word by word.
        rows_per_example: Rows of a micro-batch that belong together.
        made_by: The file of this package that has it, and its class there.
        says_no_words: Why its model is no language model at the end; "": it is one.
    """

    what: str
    example_data: str
    learning_rate: float
    lora_learning_rate: float
    formats: tuple[str, ...] = ()
    rows_per_example: int = 1
    made_by: str = "text.TextTask"
    says_no_words: str = ""

    @property
    def is_packed(self) -> bool:
        """Whether rows may hold several documents."""
        return not self.formats


TASK_FACTS: Mapping[str, TaskFacts] = {
    "sft": TaskFacts("chats and prompts, loss on the answers", "data/chat.jsonl", 1e-5, 1e-4),
    "pretrain": TaskFacts("plain text, loss on every token", "data/*.txt", 1e-4, 2e-4),
    "distill": TaskFacts("chats and prompts, loss against the scores of a teacher", "data/chat.jsonl", 1e-5, 1e-4),
    "dpo": TaskFacts(
        "preferences, which of two answers is better",
        "data/preferences.jsonl",
        1e-6,
        1e-5,
        ("preference",),
        2,
        made_by="dpo.PreferenceTask",
    ),
    "reward": TaskFacts(
        "preferences, a reward that is larger for the better of two answers",
        "data/preferences.jsonl",
        1e-5,
        1e-4,
        ("preference",),
        2,
        made_by="reward.RewardTask",
        says_no_words="judges texts",
    ),
}

LossType = Literal["sigmoid", "hinge", "ipo", "robust", "kto", "cpo", "orpo", "simpo"]


class PreferenceConfig(Table, json_schema_extra=all_alter("yes")):
    """``[preference]``: the loss of task = "dpo"."""

    loss_type: LossType = key(
        "sigmoid (DPO), hinge, ipo and robust compare a chosen and a rejected answer, and the model with the one that "
        "the run starts from; kto judges single answers against it; cpo, orpo and simpo compare two answers without "
        "it.",
        "sigmoid",
        same_name="TRL",
    )
    beta: float = key(
        "How closely the model is kept to the one that the run starts from; of orpo the weight of the odds ratio.",
        0.1,
        gt=0,
        same_name="TRL",
    )
    label_smoothing: float = key(
        "Probability that chosen and rejected were mistaken for each other.",
        0.0,
        ge=0,
        lt=0.5,
        same_name="TRL",
        used_if={"loss_type": ["sigmoid", "robust", "cpo", "simpo"]},
    )
    simpo_gamma: float = key(
        "simpo: by how much the chosen answer should win.",
        0.5,
        ge=0,
        same_name="TRL, LLaMA-Factory",
        used_if={"loss_type": ["simpo"]},
    )
    rpo_alpha: float = key(
        "Weight of the chosen answers' negative log-likelihood, which is added to the loss. orpo adds it once anyway. "
        "Default: 1 with cpo, else 0.",
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
        "Weight of the square of the sum of a pair's rewards, which keeps their mean near zero; e.g. 0.01.",
        0.0,
        ge=0,
        same_name="TRL",
    )


class DistillConfig(Table, json_schema_extra=all_alter("yes")):
    """``[distill]``: with ``task = "distill"``, the scores of a teacher and the loss against them."""

    scores: ConfigPath | None = key(
        "Folder of scores that `megatrain-tier score` wrote for the rows of [[data.train]].", None, alters="by contents"
    )
    top_k: int | None = key(
        "Use so many of the likeliest words, at most those that the scores have. Default: all of them.", None, ge=1
    )
    temperature: float = key("As in the [score] that made them; the student's logits are divided by it.", 1.0, gt=0)
    alpha: float = key(
        "Share of the cross entropy with the labels: alpha * it + (1 - alpha) * temperature**2 * the divergence.",
        0.0,
        ge=0,
        lt=1,
    )
    rest: Literal["bucket", "ignore", "renormalize"] = key(
        "What becomes of the probability of all other words. bucket: they are one outcome, with teacher and student; "
        "ignore: they have no term; renormalize: the likeliest words are scaled to a sum of 1.",
        "bucket",
    )


class EvaluationConfig(Table, json_schema_extra=all_alter("no")):
    """``[evaluation]``: when ``[[data.eval]]``, or what ``data.val_size`` kept, is evaluated, and how much of it."""

    eval_strategy: Literal["no", "steps", "epoch"] = key(
        "When to evaluate. Unless no, also at the end. With a [[data.eval]] or a data.val_size the default is steps.",
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
    eval_on_start: bool = key("Also before the first step.", False, same_name=HF)
    eval_max_samples: int | None = key("Use at most this many rows of each set, from the start.", None, ge=1)
    per_device_eval_batch_size: int | None = key(
        "Rows per micro-batch, at most those of a training micro-batch, whose memory is planned. Default: the same.",
        None,
        ge=1,
        same_name=HF,
    )
    weights: Literal["trained", "average", "both"] = key(
        "Which weights are evaluated, and write samples: as they are trained, or their average (optimizer.ema_decay). "
        "both: an evaluation of the average has _average behind the name of its set. The best checkpoint and early "
        "stopping follow what metric_for_best_model names; load_best_model_at_end exports the average where that is "
        "of it.",
        "trained",
    )
    predict_with_generate: bool = key(
        "At every evaluation also continue the first rows of each set, by the likeliest tokens, from where their "
        "trained part begins; of rows that are trained as a whole, from their middle. Shown in the log, in "
        "metrics.jsonl and in the report.",
        False,
        same_name="transformers, LLaMA-Factory",
    )
    max_predict_samples: int = key(
        "How many rows of each set.",
        4,
        ge=1,
        used_if={"predict_with_generate": [True]},
    )
    max_new_tokens: int = key(
        "New tokens of each, at most.",
        64,
        ge=1,
        same_name="LLaMA-Factory",
        used_if={"predict_with_generate": [True]},
    )
    metric_for_best_model: str = key(
        'Which figure of an evaluation says how good the model is: "loss", or "NAME_loss" where there are several '
        'sets; of preferences "rewards/accuracies" and the others too, of rewards "accuracy".',
        "loss",
        same_name=HF,
    )
    greater_is_better: bool | None = key(
        "Whether more of it is better. Default: not of a loss or a perplexity.", None, same_name=HF
    )
    early_stopping_patience: int = key(
        "End the run after so many evaluations in a row that were not better than the best one by more than "
        "early_stopping_threshold. 0: never.",
        0,
        ge=0,
        same_name=HF_AXOLOTL,
    )
    early_stopping_threshold: float = key("What an improvement has to exceed.", 0.0, ge=0, same_name=HF)
