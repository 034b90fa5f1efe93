"""Task names, facts about each task, and config tables [preference], [reward], [distill] and [evaluation]."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import model_validator

from megatrain.base.errors import Problem
from megatrain.base.table import HF, HF_AXOLOTL, ConfigPath, Table, all_alter, key
from megatrain.base.toml import format_value

#: Names of all tasks. ``registry.py`` returns the class of a task.
TaskName = Literal["sft", "pretrain", "distill", "dpo", "reward"]


class TaskTable(Table):
    """Base class of config tables that belong to one task."""

    def problems(self) -> Iterator[Problem]:
        """Yield the problems of this table in a config that selects the table's task."""
        yield from ()


LossType = Literal["sigmoid", "hinge", "ipo", "robust", "kto", "cpo", "orpo", "simpo"]


class PreferenceConfig(TaskTable, json_schema_extra=all_alter("yes")):
    """``[preference]``: the loss for ``task = "dpo"``."""

    loss_type: LossType = key(
        "sigmoid (DPO), hinge, ipo and robust compare two answers relative to the initial model; kto judges "
        "single answers relative to the initial model; cpo, orpo and simpo compare two answers without it.",
        "sigmoid",
        same_name="TRL",
    )
    beta: float = key(
        "Strength of the pull toward the initial model; for orpo, the weight of the odds ratio.",
        0.1,
        gt=0,
        same_name="TRL",
    )
    label_smoothing: float = key(
        "Assumed probability that the chosen and the rejected answer are swapped.",
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
        "Weight of the chosen answers' negative log-likelihood in the loss. orpo adds 1 to this weight. Default: 1 "
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
        """Whether each example has a chosen and a rejected answer."""
        return self.loss_type != "kto"

    def problems(self) -> Iterator[Problem]:
        if self.loss_type == "robust" and not self.label_smoothing:
            yield Problem(
                "preference.label_smoothing",
                'preference.loss_type = "robust" assumes wrong labels, but preference.label_smoothing = 0',
                "Write the share of labels that may be wrong, e.g. label_smoothing = 0.1",
            )


class RewardConfig(TaskTable, json_schema_extra=all_alter("yes")):
    """``[reward]``: the loss for ``task = "reward"``."""

    center_rewards_coefficient: float = key(
        "Weight of the squared sum of a pair's rewards, e.g. 0.01. It keeps the mean reward near zero.",
        0.0,
        ge=0,
        same_name="TRL",
    )


class DistillConfig(TaskTable, json_schema_extra=all_alter("yes")):
    """``[distill]``: the teacher's scores and the loss for ``task = "distill"``."""

    scores: ConfigPath | None = key(
        "Folder of scores that `megatrain-tier score` wrote for the rows of [[data.train]].", None, alters="by contents"
    )
    top_k: int | None = key("Number of most likely tokens to use, at most score.top_k. Default: all.", None, ge=1)
    temperature: float = key("Temperature of the scores, which also divides the student's logits.", 1.0, gt=0)
    alpha: float = key(
        "Weight of the cross entropy: the loss is alpha * cross entropy + (1 - alpha) * temperature**2 * divergence.",
        0.0,
        ge=0,
        lt=1,
    )
    rest: Literal["bucket", "ignore", "renormalize"] = key(
        "Treatment of all other tokens. bucket: treat them as one outcome; ignore: add no term for them to the loss; "
        "renormalize: scale the probabilities of the most likely tokens to a sum of 1.",
        "bucket",
    )

    def problems(self) -> Iterator[Problem]:
        if self.scores is None:
            yield Problem(
                "distill.scores",
                'task = "distill" trains on the scores of a teacher, but distill.scores is not set',
                'Make them with megatrain-tier score TEACHER.toml, and write scores = "OUTPUT_DIR/scores" in [distill]',
            )


@dataclass(frozen=True, slots=True)
class Refusal:
    """A key that a task supports only with certain values.

    Attributes:
        key: Dotted name of a key or table.
        allowed: Values that the task supports.
        message: Error for any other value. ``{key}``, ``{value}`` and ``{task}`` (``task = ...``) are replaced.
        remedy: Advice on what to write instead.
    """

    key: str
    allowed: tuple[object, ...]
    message: str
    remedy: str = "Leave the key out"

    def problem(self, task: str, value: object) -> Problem | None:
        """Return the problem that a value of this key has in a config with this task, or None if it is allowed."""
        if value in self.allowed:
            return None
        value_text = "" if isinstance(value, Table) else format_value(value)
        message = self.message.format(key=self.key, value=value_text, task=f'task = "{task}"')
        return Problem(self.key, message, self.remedy)


#: Default refusals of a task. By default, a task reads only text, and its loss is not plain cross entropy.
REFUSED_BY_DEFAULT = (
    *(
        Refusal(key, (0.0,), "{key} changes the cross entropy, which {task} does not train on", "Leave it out")
        for key in ("training.label_smoothing_factor", "training.z_loss")
    ),
    Refusal("model.images", ("off",), "{key} = {value}, but {task} reads only text"),
)


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """Facts about a task, for generating and checking configs, and for selecting the task's class and row kind.

    Attributes:
        description: Description of the task's rows and loss.
        example_data: Example of a data path.
        learning_rate: Default learning rate for training all parameters of a pretrained model.
        lora_learning_rate: Default learning rate for training only adapters.
        class_path: Module and class of the task in this package, such as ``text.TextTask``.
        rows: Function that returns the task's row kind as "module.NAME" within `megatrain/data`, given the task's
            config table, or None for the default table.
        table: Name of the task's config table, or "" if it has none.
        is_packed: Whether a row of a micro-batch can contain several documents.
        is_streamed: Whether the task supports `data.streaming`.
        has_lm_head: Whether the model has a language model head.
        train_on: Default of `data.train_on`, or None for the default of its table.
        example: Noun for one example, in messages.
        refusals: Keys that the task does not support.
        refusal_elsewhere: Refusal of the task's table or key by all other tasks, or None.
    """

    description: str
    example_data: str
    learning_rate: float
    lora_learning_rate: float
    class_path: str = "text.TextTask"
    rows: Callable[[Any], str] = lambda table: "row_kind.CHATS"
    table: str = ""
    is_packed: bool = True
    is_streamed: bool = False
    has_lm_head: bool = True
    train_on: str | None = None
    example: str = "an example"
    refusals: tuple[Refusal, ...] = REFUSED_BY_DEFAULT
    refusal_elsewhere: Refusal | None = None


TASK_FACTS: Mapping[str, TaskFacts] = {
    "sft": TaskFacts(
        "chats and prompts, loss on the answers", "data/chat.jsonl", 1e-5, 1e-4, is_streamed=True, refusals=()
    ),
    "pretrain": TaskFacts(
        "plain text, loss on every token",
        "data/*.txt",
        1e-4,
        1e-4,
        rows=lambda table: "text_rows.TEXTS",
        is_streamed=True,
        train_on="all",
        refusals=tuple(
            Refusal(
                key,
                allowed,
                "{key} = {value} needs conversations, but {task} trains plain text",
                'Leave the key out, or write task = "sft"',
            )
            for key, allowed in (("data.train_on", ("all",)), ("model.images", ("off",)))
        ),
    ),
    "distill": TaskFacts(
        "chats and prompts, loss against the scores of a teacher",
        "data/chat.jsonl",
        1e-5,
        1e-4,
        "distillation.DistillTask",
        table="distill",
        refusals=(
            Refusal("training.label_smoothing_factor", (0.0,), "{task} ignores {key}: the teacher's scores replace it"),
            Refusal("training.z_loss", (0.0,), "{task} has no z-loss in this release", "Leave training.z_loss out"),
            *(
                Refusal(key, allowed, "this release does not support {task} with {key}", "Leave it out")
                for key, allowed in (("model.use_liger_kernel", (False, "auto")), ("model.images", ("off",)))
            ),
        ),
        refusal_elsewhere=Refusal(
            "distill.scores",
            (None,),
            "{key} has no effect with {task}",
            'Write task = "distill", or leave [distill] out',
        ),
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
        train_on="completion",
        example="an example of preferences",
        refusals=(
            Refusal(
                "data.train_on",
                ("completion", "assistant"),
                "{key} = {value}, but {task} compares the text after the prompt",
            ),
            Refusal(
                "training.label_smoothing_factor",
                (0.0,),
                "{key} smooths cross entropy, which {task} does not train on",
                "Write label_smoothing in [preference] for labels that may be wrong, or leave it out",
            ),
            Refusal(
                "training.z_loss",
                (0.0,),
                "{key} is a term of cross entropy, which {task} does not train on",
                "Leave it out",
            ),
            Refusal(
                "lora.lora_dropout",
                (0.0,),
                "{key} = {value}, but {task} allows no dropout: the model is compared with its reference",
            ),
            Refusal("model.images", ("off",), "{key} = {value}, but {task} reads only text in this release"),
        ),
        refusal_elsewhere=Refusal(
            "preference",
            (PreferenceConfig(),),
            "[{key}] is for training on preferences, but {task}",
            'Write task = "dpo", or leave the table out',
        ),
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
        train_on="completion",
        example="a pair",
        refusal_elsewhere=Refusal(
            "reward",
            (RewardConfig(),),
            "[{key}] is for training reward models, but {task}",
            'Write task = "reward", or leave the table out',
        ),
    ),
}


class EvaluationConfig(Table, json_schema_extra=all_alter("no")):
    """``[evaluation]``: when and how a run evaluates ``[[data.eval]]`` or the rows that ``data.val_size`` holds out."""

    eval_strategy: Literal["no", "steps", "epoch"] = key(
        "When to evaluate. steps and epoch also evaluate at the end of the run. Default with [[data.eval]] or "
        "data.val_size: steps.",
        "no",
        same_name=HF,
    )
    eval_steps: int = key(
        "Number of optimizer steps between two evaluations, for eval_strategy = steps.",
        100,
        ge=1,
        same_name=HF,
        used_if={"eval_strategy": ["steps"]},
    )
    eval_on_start: bool = key("Also evaluate before the first step.", False, same_name=HF)
    eval_max_samples: int | None = key("Maximum number of rows of each set to use, from the start.", None, ge=1)
    per_device_eval_batch_size: int | None = key(
        "Rows per micro-batch. Default and maximum: the number in training, for which the memory is planned.",
        None,
        ge=1,
        same_name=HF,
    )
    weights: Literal["trained", "average", "both"] = key(
        "Weights for evaluations and samples: the trained weights, their average (optimizer.ema_decay), or both. With "
        "both, the names of the average's evaluations end with _average. load_best_model_at_end exports the average if "
        "metric_for_best_model is a metric of the average.",
        "trained",
    )
    predict_with_generate: bool = key(
        "At every evaluation, also generate samples: continue the first rows of each set with the most likely tokens, "
        "from the start of their trained part, or from the middle of rows that are trained as a whole. The log, "
        "metrics.jsonl and the report show the samples.",
        False,
        same_name="transformers, LLaMA-Factory",
    )
    max_predict_samples: int = key(
        "Number of rows of each set to continue.",
        4,
        ge=1,
        used_if={"predict_with_generate": [True]},
    )
    max_new_tokens: int = key(
        "Maximum number of new tokens per row.",
        64,
        ge=1,
        same_name="LLaMA-Factory",
        used_if={"predict_with_generate": [True]},
    )
    metric_for_best_model: str = key(
        'Metric for the comparison of evaluations: "loss", or "NAME_loss" with several sets. Other metrics: for '
        'task = "dpo", for example "rewards/accuracies"; for task = "reward", for example "accuracy".',
        "loss",
        same_name=HF,
    )
    greater_is_better: bool | None = key(
        "Whether a larger metric is better. Default: false for a loss or a perplexity, else true.", None, same_name=HF
    )
    early_stopping_patience: int = key(
        "Number of consecutive evaluations without an improvement after which the run ends. 0: never.",
        0,
        ge=0,
        same_name=HF_AXOLOTL,
    )
    early_stopping_threshold: float = key(
        "Minimum difference to the best evaluation that counts as an improvement.", 0.0, ge=0, same_name=HF
    )
