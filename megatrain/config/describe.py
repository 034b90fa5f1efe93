"""What one key means: its values, its default, whether it alters results, and what other tools call it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megatrain.config.allowed import allowed_values
from megatrain.config.changes import alters_results
from megatrain.config.json_schema import is_required, leaf_schema
from megatrain.config.keys import ARRAY_TABLES, advice_for_unknown, full_keys_of_leaf, known_keys, known_tables
from megatrain.config.problems import ConfigError, Problem
from megatrain.config.resolved import format_value
from megatrain.translate.names import ACCEPTED, TRANSFORMERS_4, TRANSLATIONS

#: Free in a continued run only because the checkpoint brings the weights along, and the data is compared by its
#: contents: with another value here a run from the start is another run.
BROUGHT_ALONG = ("model.", "data.")
#: Keys that have the same name and meaning in other tools -> which ones.
_SAME_NAME = {
    **{f"training.{name}": "transformers, TRL, LLaMA-Factory" for name in (
        "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps",
        "label_smoothing_factor", "neftune_noise_alpha",
    )},
    **{f"optimizer.{name}": "transformers, TRL, LLaMA-Factory, Axolotl" for name in (
        "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "warmup_steps",
    )},
    **{f"optimizer.{name}": "transformers, TRL, LLaMA-Factory" for name in (
        "optim", "lr_scheduler_type", "lr_scheduler_kwargs",
    )},
    **{f"checkpoint.{name}": "transformers, TRL, LLaMA-Factory, Axolotl" for name in (
        "save_strategy", "save_steps", "save_total_limit", "resume_from_checkpoint",
    )},
    **{f"evaluation.{name}": "transformers, TRL, LLaMA-Factory" for name in (
        "eval_strategy", "eval_steps", "per_device_eval_batch_size", "eval_on_start",
    )},
    **{f"logging.{name}": "transformers, TRL, LLaMA-Factory" for name in ("logging_steps", "report_to")},
    **{name: "transformers, TRL, LLaMA-Factory" for name in ("output_dir", "run_name", "seed", "data_seed")},
    "full_determinism": "transformers",
    "model.model_name_or_path": "TRL, LLaMA-Factory",
    "model.use_liger_kernel": "transformers, TRL",
    "model.attn_implementation": "transformers, TRL, Axolotl, MegaTrain",
    "data.max_length": "TRL",
    "data.packing": "TRL, LLaMA-Factory",
    "data.val_size": "LLaMA-Factory",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class KeyDescription:
    """One key.

    Attributes:
        key: dotted, without the numbers of array tables.
        meaning: its description.
        values: what may be written, as a sentence.
        default: as TOML, or why there is none.
        alters: "yes", "no", or "by contents": the model or the data may be another one.
        other_names: (tool, its name, note).
        example: lines of TOML.
    """

    key: str
    meaning: str
    values: str
    default: str
    alters: str
    other_names: tuple[tuple[str, str, str], ...]
    example: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        names = [{"tool": tool, "name": name, "note": note} for tool, name, note in self.other_names]
        return {
            "key": self.key,
            "meaning": self.meaning,
            "values": self.values,
            "default": self.default,
            "alters_results": self.alters,
            "other_names": names,
            "schema": leaf_schema(self.key),
        }


def find_keys(name: str) -> tuple[list[str], str]:
    """Return the keys that a name means, and what to say first: that it is another tool's name, or "".

    Args:
        name: a dotted key, with or without the numbers of array tables; a last name; a table; another tool's name.

    Raises:
        ConfigError: nothing is called that.
    """
    plain = ".".join(part for part in name.strip().strip("[]").split(".") if not part.isdecimal())
    inner = next((known for known in known_keys() if plain.startswith(f"{known}.")), None)
    if plain in known_keys() or inner is not None:
        return [inner or plain], ""
    if plain in known_tables():
        return sorted(key for key in known_keys() if key.startswith(f"{plain}.")), ""
    leaf = plain.rpartition(".")[2]
    homes = sorted(key for key in known_keys() if key.rpartition(".")[2] == leaf)
    if homes and leaf == plain:
        preferred = full_keys_of_leaf(leaf)
        return preferred if len(preferred) == 1 else homes, ""
    if leaf in TRANSLATIONS and (ours := TRANSLATIONS[leaf].ours):
        return find_keys(ours)[0], TRANSLATIONS[leaf].advice()
    if leaf in ACCEPTED:
        return [ACCEPTED[leaf]], f"`{leaf}` is the name in {TRANSFORMERS_4}; here: {ACCEPTED[leaf]}"
    advice = advice_for_unknown(tuple(name.split(".")))
    raise ConfigError("the config", [Problem(name, f"there is no key `{name}`", advice or "All keys: config schema")])


def describe_key(key: str) -> KeyDescription:
    """Return what there is to say about one of :func:`megatrain.config.keys.known_keys`."""
    schema = leaf_schema(key)
    return KeyDescription(
        key=key,
        meaning=schema.get("description", ""),
        values=allowed_values(schema),
        default=_default(key, schema),
        alters=alters(key),
        other_names=tuple(_other_names(key)),
        example=_example(key, schema),
    )


def alters(key: str) -> str:
    """Return whether another value of a key alters the results of a run: "yes", "no", or "by contents"."""
    if alters_results(key):
        return "yes"
    is_inside = key not in ("model.trust_remote_code", "data.cache_dir", "data.max_cache_size")
    return "by contents" if is_inside and key.startswith(BROUGHT_ALONG) else "no"


def _default(key: str, schema: dict[str, Any]) -> str:
    if "default" in schema:
        return _toml(schema["default"])
    if "Default:" in schema.get("description", ""):
        return "see above"
    return "required" if is_required(key) else "not set"


def _other_names(key: str) -> Iterable[tuple[str, str, str]]:
    leaf = key.rpartition(".")[2]
    if key in _SAME_NAME:
        yield _SAME_NAME[key], leaf, "the same name"
    for old, ours in ACCEPTED.items():
        if ours == key:
            yield TRANSFORMERS_4, old, "accepted"
    for name, translation in TRANSLATIONS.items():
        ours = ".".join(part for part in translation.ours.split(".") if not part.isdecimal())
        if ours == key:
            yield translation.tool, name, translation.note


def _example(key: str, schema: dict[str, Any]) -> tuple[str, ...]:
    table, _, leaf = key.rpartition(".")
    value = schema.get("default")
    if value in (None, "auto", [], {}):
        kinds = [schema, *schema.get("anyOf", [])]
        examples = [example for kind in kinds for example in kind.get("examples", ()) if example != value]
        value = examples[0] if examples else value
    if value is None or value == {} or value == []:
        return ()
    header = f"[[{table}]]" if table in ARRAY_TABLES else f"[{table}]"
    return (*((header,) if table else ()), f"{leaf} = {_toml(value)}")


def _toml(value: Any) -> str:
    return format_value(value) if not isinstance(value, dict) or value else json.dumps(value)
