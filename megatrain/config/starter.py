"""Commented starter config for a machine, as text. This module reads and writes no files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatrain.base.facts import Drive, MachineFacts, ModelFacts
from megatrain.base.toml import format_value
from megatrain.config.keys import SCHEMA_FILE_NAME
from megatrain.data.formats import READERS
from megatrain.data.preference_format import PREFERENCE
from megatrain.tasks.table import TASK_FACTS
from tiered.units import GiB, format_size

_EXAMPLE_MODEL = "path/to/model"
_EXAMPLE_SCORES = "path/to/scores"
_LORA = [("r", 16, "rank: 8 to 64 are usual"), ("lora_alpha", 32, "adapters are scaled by lora_alpha / r")]
_MAX_LENGTHS = {True: 4096, False: 512}  # data.max_length with and without a GPU
_ROWS_PER_STEP = {True: 16, False: 8}
_COLUMN = 40


@dataclass(frozen=True, slots=True)
class DataFacts:
    """Location of the training data, and facts about its first rows.

    Attributes:
        path: Path as the user wrote it, or a name on the hub.
        format: Format of the rows, or "" if unknown.
        columns: Column name for each field whose name differs from its column.
        problem: Reason why the rows cannot be used without changes, or "".
        has_label: Whether each row has one answer and a label.
    """

    path: str
    format: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)
    fields: Sequence[str] = ()
    problem: str = ""
    has_label: bool = False

    def without_template(self) -> DataFacts:
        """Return facts that use renamed alpaca columns as prompts and completions, which need no template."""
        if self.format != "alpaca" or not self.columns or "input" in self.fields:
            return self
        question, answer = (self.columns.get(name, name) for name in ("instruction", "output"))
        return replace(self, format="prompt_completion", columns={"prompt": question, "completion": answer})


def starter_toml(
    machine: MachineFacts,
    task: str,
    model: ModelFacts | None,
    data: DataFacts | None,
    *,
    has_lora: bool = False,
    output_dir: str = "outputs/first",
) -> str:
    """Return the text of a config that loads without errors.

    Args:
        task: Value of the key ``task``.
        model: Facts about the model, or None to write an example that the user replaces.
        data: Facts about the training data, or None to write an example that the user replaces.
        has_lora: Whether to train adapters instead of the whole model.
    """
    parts = [
        f"#:schema ./{SCHEMA_FILE_NAME}",
        "# Made by `megatrain-tier init` for this machine. Meaning of a key: `megatrain-tier config explain KEY`.",
        "#   megatrain-tier check FILE    find every mistake",
        "#   megatrain-tier plan FILE     see where every byte goes, and how long a step takes",
        "#   megatrain-tier run FILE      train; the same command continues after a stop",
        "config_version = 1",
        _line("task", task, TASK_FACTS[task].description),
        _line("output_dir", output_dir, "paths are relative to this file"),
        _line("seed", 42),
        "",
        *_model(model),
        "",
        *_lora(task, has_lora=has_lora),
        "",
        *_data(machine, task, model, data),
        "",
        *_training(machine, task, model),
        "",
        *_preference(task, data),
        *_distill(task),
        *_optimizer(task, has_lora=has_lora),
        "",
        "[checkpoint]",
        _line("save_steps", 200, "and at the end, on SIGTERM and on Ctrl-C"),
        _line("save_total_limit", 2, "the newest ones are kept"),
        _line("save_copy", False, "true: whole copies in output_dir; or to s3://bucket/run"),
        "",
        *_tiers(machine, model, has_lora=has_lora),
    ]
    return "\n".join(parts) + "\n"


def _model(model: ModelFacts | None) -> list[str]:
    if model is None:
        return [
            "[model]",
            _line("model_name_or_path", _EXAMPLE_MODEL, "FILL IN: a Hugging Face folder with safetensors"),
        ]
    size = _parameters(model.num_parameters)
    return ["[model]", _line("model_name_or_path", model.path, size)]


def _lora(task: str, *, has_lora: bool) -> list[str]:
    lines = [_line(name, value, comment) for name, value, comment in _LORA]
    if has_lora:
        return [
            "[lora]",
            *lines,
            _line("target_modules", "all-linear", 'or ["q_proj", "v_proj"]; auto: peft\'s choice'),
        ]
    advice = f"remove the #, and write learning_rate = {TASK_FACTS[task].lora_learning_rate}"
    hint = f"# To train small adapters instead of the whole model: {advice}."
    return [hint, "# [lora]", *(f"# {line}" for line in lines)]


def _parameters(count: int) -> str:
    if not count:
        return ""
    return f"{count / 1e9:.2f} B parameters" if count >= 1e9 else f"{count / 1e6:.1f} M parameters"


def _max_length(machine: MachineFacts, model: ModelFacts | None) -> int:
    max_length = _MAX_LENGTHS[machine.gpu_bytes is not None]
    return min(max_length, model.max_positions) if model is not None and model.max_positions else max_length


def _data(machine: MachineFacts, task: str, model: ModelFacts | None, data: DataFacts | None) -> list[str]:
    length = _max_length(machine, model)
    lines = ["[data]", _line("max_length", length, "tokens in a row")]
    if TASK_FACTS[task].is_packed:
        comment = "default, if the model supports it: documents share a row; false: one per row"
        lines.append(f"{'# packing = true':<{_COLUMN}}  # {comment}")
    if TASK_FACTS[task].train_on is None:
        lines.append(_line("train_on", "assistant", "assistant, last_assistant, completion or all"))
    lines += ["", "[[data.train]]"]
    if data is None:
        return [*lines, _line("path", TASK_FACTS[task].example_data, "FILL IN: file, glob or folder")]
    return [*lines, _line("path", data.path), *_rows(data)]


def _rows(data: DataFacts) -> Iterator[str]:
    """Yield the lines about the rows: column names if needed, else a comment about the format or the problem."""
    if data.problem:
        yield f"# FILL IN: {_ascii(data.problem)}"
        yield '# columns = { prompt = "..." }            # our field = their column'
        return
    if data.columns:
        fields = ", ".join(map(_ascii, data.fields))
        yield _line("format", data.format, f"the rows have {fields}")
        yield _line("columns", dict(data.columns), "our field = their column")
    elif data.format:
        yield f"# {(READERS | {PREFERENCE.name: PREFERENCE})[data.format].title}"


def _ascii(text: str) -> str:
    return " ".join(text.encode("ascii", "replace").decode().split())


def _training(machine: MachineFacts, task: str, model: ModelFacts | None) -> list[str]:
    length = _max_length(machine, model)
    rows = _ROWS_PER_STEP[machine.gpu_bytes is not None]
    return [
        "[training]",
        _line("train_batch_tokens", rows * length, f"{rows} rows of max_length per step; micro-batches follow from it"),
        _line("num_train_epochs", 1.0, "or a number of steps instead: max_steps = 100"),
    ]


def _preference(task: str, data: DataFacts | None) -> list[str]:
    if task != "dpo":
        return []
    loss = "kto" if data is not None and data.has_label else "sigmoid"
    comment = "judges single answers" if loss == "kto" else "DPO; or hinge, ipo, robust, kto, cpo, orpo, simpo"
    return ["[preference]", _line("loss_type", loss, comment), _line("beta", 0.1), ""]


def _distill(task: str) -> list[str]:
    if task != "distill":
        return []
    comment = "FILL IN: folder that `megatrain-tier score` wrote for these rows"
    return ["[distill]", _line("scores", _EXAMPLE_SCORES, comment), ""]


def _optimizer(task: str, *, has_lora: bool) -> list[str]:
    state, facts = "16 bytes of state per parameter; lion 12, adafactor 8", TASK_FACTS[task]
    return [
        "[optimizer]",
        _line("optim", "adamw", "only adapters have optimizer state" if has_lora else state),
        _line("learning_rate", facts.lora_learning_rate if has_lora else facts.learning_rate),
        _line("lr_scheduler_type", "cosine"),
        _line("warmup_steps", 0.03, "below 1: a share of all steps"),
    ]


def _tiers(machine: MachineFacts, model: ModelFacts | None, *, has_lora: bool) -> list[str]:
    lines = []
    if has_lora:
        lines.append(
            "# The model stays in its folder: weights that do not fit into RAM are read when a layer needs them."
        )
    elif model is not None and model.num_parameters:
        need = 16 * model.num_parameters
        lines.append(
            f"# Weights, gradients and optimizer state of this model: about {format_size(need)} with adamw in fp32."
        )
    lines.append('# Resources of this run. "auto": everything that is free at its start. Or write "22GiB" or "90%".')
    if machine.gpu_bytes is not None:
        lines += ["[tiers.gpu]", _line("size", "auto", f"now {format_size(machine.gpu_bytes)}"), ""]
    free, total = format_size(machine.free_ram_bytes), format_size(machine.ram_bytes)
    comment = f"now {free} of {total}" + ("" if has_lora else "; blocks that do not fit are stored on the drive")
    lines += ["[tiers.ram]", _line("size", "auto", comment)]
    is_used = has_lora
    for drive in machine.drives:
        comment = f"{drive.kind}, {format_size(drive.free_bytes)} free"
        lines.append("")
        if drive.objection or is_used:
            reason = drive.objection or (
                "for blocks that do not fit into RAM, such as activations of long rows"
                if has_lora
                else "another drive: blocks are striped over both"
            )
            lines += [
                f"# {reason}",
                "# [[tiers.nvme]]",
                f"# path = {format_value(drive.path)}  # {comment}",
                '# size = "auto"',
            ]
        else:
            is_used = True
            lines += ["# Training state, and parts of checkpoints: deleting this folder destroys them."]
            lines += ["[[tiers.nvme]]", _line("path", drive.path, comment), _line("size", "auto", _size_note(drive))]
    return lines


def _size_note(drive: Drive) -> str:
    return f"or a part of it, such as {format_value(f'{max(1, drive.free_bytes // 2 // GiB)}GiB')}"


def _line(name: str, value: object, comment: str = "") -> str:
    text = f"{name} = {format_value(value)}"
    return f"{text:<{_COLUMN}}  # {comment}" if comment else text
