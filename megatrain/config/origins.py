"""A resolved config with where each of its values comes from, and two configs side by side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.config.changes import Change, compare
from megatrain.config.describe import alters
from megatrain.config.files import find_lines
from megatrain.config.keys import known_keys, plain
from megatrain.config.load import LoadedConfig, load_config
from megatrain.config.problems import ConfigError, Problem
from megatrain.config.resolved import FILE_NAME, config_from_toml, to_toml

if TYPE_CHECKING:
    from megatrain.config.schema import RunConfig

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a resolved config.

    Attributes:
        text: as TOML has it.
        key: what it sets; "" for a header or an empty line.
        origin: ``file:line``, ``--set`` or "default"; "" where there is no key.
    """

    text: str
    key: str = ""
    origin: str = ""


def resolved_lines(loaded: LoadedConfig) -> list[Line]:
    """Return the lines of the resolved config; those that set a key know who set it."""
    text = to_toml(loaded.config)
    keys = {line: key for key, line in find_lines(text).items()}
    default_text = set(to_toml(_with_defaults(loaded.config)).splitlines())
    lines = []
    for number, line in enumerate(text.splitlines(), start=1):
        key = keys.get(number, "")
        is_header = line.startswith("[")
        if not key or is_header:
            lines.append(Line(line))
        else:
            lines.append(Line(line, key, _origin(loaded, key, is_default=line in default_text)))
    return lines


def _with_defaults(config: RunConfig) -> RunConfig:
    """Return a config with the same required values and the default of everything else."""
    values = config.model_dump(mode="python")
    kept = {
        "task": values["task"],
        "output_dir": values["output_dir"],
        "model": {"model_name_or_path": values["model"]["model_name_or_path"]},
        "data": {"train": [{"path": source["path"]} for source in values["data"]["train"]]},
    }
    return type(config).model_validate(kept)


def _origin(loaded: LoadedConfig, key: str, *, is_default: bool) -> str:
    if key in loaded.origins:
        return loaded.origins[key]
    inside = [origin for known, origin in loaded.origins.items() if known.startswith(f"{key}.")]
    if inside:  # an inline table here, a table of its own where it was written
        return inside[0]
    above = key
    while not is_default and (above := above.rpartition(".")[0]):
        if above in loaded.origins:  # an inline table there, or a whole array
            return loaded.origins[above]
    return DEFAULT


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs between two configs, by what it means for the results.

    Attributes:
        altering: they compute something else.
        by_contents: only if what these name holds something else.
        free: the results are the same.
    """

    altering: tuple[Change, ...]
    by_contents: tuple[Change, ...]
    free: tuple[Change, ...]

    @property
    def is_empty(self) -> bool:
        return not (self.altering or self.by_contents or self.free)


def difference(before: RunConfig, now: RunConfig) -> Difference:
    """Return the difference of two runs. Unlike for a continued run, the model and the data are not known to agree."""
    changes = compare(before, now)
    altering = list(changes.altering)
    by_contents: list[Change] = []
    free: list[Change] = []
    for change in changes.free:
        key = plain(tuple(int(part) if part.isdecimal() else part for part in change.key.split(".")))
        if _changes_length(key, before, now):
            altering.append(change)
        else:
            (by_contents if alters(_known(key)) == "by contents" else free).append(change)
    return Difference(tuple(altering), tuple(by_contents), tuple(free))


def _changes_length(key: str, before: RunConfig, now: RunConfig) -> bool:
    """Return whether a key makes one run longer than the other, which is nothing to a run that is continued."""
    if key == "training.max_steps":
        return True
    return key == "training.num_train_epochs" and min(before.training.max_steps, now.training.max_steps) <= 0


def _known(key: str) -> str:
    """Return the key of the schema that a path leads to: inside a table of the user's own names it is the table."""
    while key not in known_keys():
        key = key.rpartition(".")[0]
        assert key, "a change without a key"
    return key


def load_run(path: Path) -> RunConfig:
    """Return the config in a file, or the resolved one of the run in an ``output_dir``.

    Raises:
        ConfigError: there is none, or it is not valid.
    """
    if not path.is_dir():
        if path.name == FILE_NAME and path.is_file():
            return config_from_toml(path.read_text(encoding="utf-8"), str(path))
        return load_config(path).config
    file = path / FILE_NAME
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        problem = Problem(
            "", f"there is no {FILE_NAME} in this folder", "Give a config file, or the output_dir of a run"
        )
        raise ConfigError(str(path), [problem]) from None
    return config_from_toml(text, str(file))
