"""What changed between two configs of one run, and whether it changes the results from there on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatrain.config.keys import ARRAY_TABLES, plain
from megatrain.config.resolved import format_value, resolved_values
from megatrain.translate.names import OPTIMIZERS_WITH_KEY

if TYPE_CHECKING:
    from megatrain.config.schema import RunConfig

#: Key, or table of keys, without the numbers of array tables -> whether another value changes what a continued run
#: computes. The longest prefix of a key counts. Free are where bytes live, what is shown and kept, and what a
#: checkpoint brings along: the weights, and the data, whose fingerprint is compared in place of the keys that make it.
ALTERS_RESULTS: Mapping[str, bool] = {
    "config_version": False,
    "task": True,
    "output_dir": False,
    "run_name": False,
    "seed": True,
    "data_seed": True,
    "device": True,
    "full_determinism": True,
    "model.model_name_or_path": False,
    "model.tokenizer_name_or_path": False,
    "model.chat_template": False,
    "model.attn_implementation": True,
    "model.compile": True,
    "model.compile_backend": True,
    "model.use_liger_kernel": True,
    "model.mlp_rows": True,
    "model.trust_remote_code": False,
    "model.train_from_scratch": False,
    "model.freeze": True,
    "precision": True,
    "data.max_length": True,
    "data.packing": True,
    "data.train_on": False,
    "data.overlong": False,
    "data.bad_rows": False,
    "data.max_dropped": False,
    "data.cache_dir": False,
    "data.max_cache_size": False,
    "data.train": False,
    "data.eval": False,
    "data.val_size": False,
    "training.train_batch_tokens": True,
    "training.per_device_train_batch_size": True,
    "training.gradient_accumulation_steps": True,
    "training.num_train_epochs": True,
    "training.max_steps": True,
    "training.label_smoothing_factor": True,
    "training.neftune_noise_alpha": True,
    "evaluation": False,
    "optimizer": True,
    "checkpoint": False,
    "export": False,
    "logging": False,
    "tiers": False,
    "placement": False,
    "profile": False,
    "advanced": False,
}

#: Schedules whose learning rate after so many steps does not depend on how many there are in all.
_ENDLESS_SCHEDULES = frozenset({"constant", "constant_with_warmup", "inverse_sqrt"})


@dataclass(frozen=True, slots=True)
class Change:
    """One key with two values.

    Attributes:
        key: as users write it, ``optimizer.groups.0.learning_rate``.
        before: its values as TOML has them; None: not set.
        now: its values as TOML has them; None: not set.
    """

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        before, now = ("not set" if value is None else format_value(value) for value in (self.before, self.now))
        return f"{self.key}: {before} -> {now}"


@dataclass(frozen=True, slots=True)
class ConfigChanges:
    """All keys that differ, in the order of the config.

    Attributes:
        altering: the run goes on with other numbers.
        free: it goes on with the same ones.
    """

    altering: tuple[Change, ...]
    free: tuple[Change, ...]


def compare(before: RunConfig, now: RunConfig) -> ConfigChanges:
    """Return what changed from the config of a checkpoint to the one that is to continue it.

    Only the configs are compared. That the data is the same its fingerprint tells, that the model has the same
    parameters the blocks of the checkpoint do.
    """
    old, new = dict(_leaves(resolved_values(before), ())), dict(_leaves(resolved_values(now), ()))
    altering: list[Change] = []
    free: list[Change] = []
    for path in dict.fromkeys([*old, *new]):
        if old.get(path) != new.get(path):
            key = plain(path)
            alters = alters_results(key) and any(_has_effect(key, config) for config in (before, now))
            change = Change(".".join(map(str, path)), old.get(path), new.get(path))
            (altering if alters else free).append(change)
    return ConfigChanges(tuple(altering), tuple(free))


def alters_results(key: str) -> bool:
    """Return whether another value of a key can change the results; the longest prefix that is classified counts.

    Args:
        key: dotted, without the numbers of array tables.
    """
    prefix = key
    while prefix not in ALTERS_RESULTS:
        prefix = prefix.rpartition(".")[0]
        assert prefix, f"{key} is not classified"
    return ALTERS_RESULTS[prefix]


def _has_effect(key: str, config: RunConfig) -> bool:
    """Return whether a key means anything beside the other values of a config."""
    table, _, leaf = key.rpartition(".")
    if table == "optimizer" and leaf in OPTIMIZERS_WITH_KEY:
        return config.optimizer.optim in OPTIMIZERS_WITH_KEY[leaf]
    if key == "model.compile_backend":
        return config.model.compile
    if key == "training.num_train_epochs":
        return config.training.max_steps <= 0 and _depends_on_length(config)
    if key == "training.max_steps":
        return _depends_on_length(config)
    return True


def _depends_on_length(config: RunConfig) -> bool:
    """Return whether the learning rate of a step depends on the number of all steps."""
    name, warmup = config.optimizer.lr_scheduler_type, config.optimizer.warmup_steps
    return name not in _ENDLESS_SCHEDULES or (name != "constant" and 0 < warmup < 1)


def _leaves(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield every value that is no table and no list of tables, with its path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    elif plain(path) in ARRAY_TABLES:
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*path, index))
    elif value is not None:
        yield path, value
