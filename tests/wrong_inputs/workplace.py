"""A folder with a valid config, model and data, in which each case makes one mistake."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatrain.config.keys import ARRAY_TABLES, TABLES
from oracles.tiered_run import write_tiny_model

CONFIG_NAME = "run.toml"
CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
#: Dotted key -> TOML literal. Every array table occurs once, so that each key of the schema has a place.
BASE_VALUES = {
    "task": '"sft"',
    "output_dir": '"out"',
    "device": '"cpu"',
    "model.model_name_or_path": '"model"',
    "precision.compute_dtype": '"float32"',
    "data.max_length": "64",
    "data.cache_dir": '"none"',
    "data.train.path": '"rows.jsonl"',
    "data.eval.path": '"held_out.jsonl"',
    "training.per_device_train_batch_size": "2",
    "training.max_steps": "1",
    "optimizer.learning_rate": "1e-3",
    "optimizer.lr_scheduler_type": '"constant"',
    "optimizer.groups.params": '["*norm*"]',
    "optimizer.groups.learning_rate": "1e-4",
    "checkpoint.save_total_limit": "1",
    "checkpoint.min_free_disk": '"1MiB"',
    "tiers.ram.size": '"64MiB"',
    "tiers.nvme.path": '"drive"',
    "tiers.nvme.size": '"64MiB"',
}


def chat(question: str, answer: str) -> dict[str, Any]:
    """Return a row in the format "messages"."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


ROWS = (
    chat("Who speaks?", "Call me Ishmael."),
    chat("Where is the ship?", "In the harbour of Nantucket."),
    chat("What is the whale?", "White, and very old."),
)


@dataclass
class ConfigText:
    """Config as TOML values by table and key. It can return the line number of each key.

    Attributes:
        tables: Table name -> last part of a key -> value as TOML. The name "" is the top of the file.
    """

    tables: dict[str, dict[str, str]] = field(default_factory=lambda: {"": {}})

    @classmethod
    def base(cls) -> ConfigText:
        config = cls()
        for key, value in BASE_VALUES.items():
            config.put(key, value)
        return config

    def put(self, key: str, value: str, table: str | None = None) -> None:
        """Set a key to a TOML value. A missing table is added at the end of the file."""
        name, _, leaf = key.rpartition(".")
        self.tables.setdefault(name if table is None else table, {})[leaf] = value

    def drop(self, key: str) -> None:
        name, _, leaf = key.rpartition(".")
        del self.tables[name][leaf]

    def lines(self) -> list[tuple[str, str]]:
        """Return (dotted key or table name, text of the line) for each line of the file."""
        found = []
        for name, values in self.tables.items():
            if name:
                found.append((name, f"[[{name}]]" if name in ARRAY_TABLES else f"[{name}]"))
            found += [(f"{name}.{leaf}" if name else leaf, f"{leaf} = {value}") for leaf, value in values.items()]
        return found

    def text(self) -> str:
        return "".join(f"{line}\n" for _, line in self.lines())

    def line(self, key: str) -> str:
        """Return the line of a key in the form of messages, such as ``"line 7"``."""
        return f"line {[name for name, _ in self.lines()].index(key) + 1}"


def numbered(key: str) -> str:
    """Return a key as messages show it: with index 0 if it is in an array table."""
    table = next((name for name in sorted(ARRAY_TABLES) if key.startswith(f"{name}.")), "")
    return f"{table}.0{key[len(table) :]}" if table else key


@dataclass
class Workplace:
    """Folder with the files of one case, some of which the case damages.

    Attributes:
        folder: Folder of the case.
        base_model: Folder of the valid model. All cases share it, so it must never change.
        config: Config of the case.
        raw_config: Bytes of the config file, if they differ from ``config``.
        words: Additional words of the command line.
    """

    folder: Path
    base_model: Path
    config: ConfigText = field(default_factory=ConfigText.base)
    raw_config: bytes | None = None
    words: list[str] = field(default_factory=list)

    @property
    def config_path(self) -> Path:
        return self.folder / CONFIG_NAME

    @property
    def model(self) -> Path:
        """Model folder of this case, with links to the files of the shared model until the case replaces them."""
        folder = self.folder / "model"
        if folder.is_symlink():
            folder.unlink()
            folder.mkdir()
            for file in self.base_model.iterdir():
                (folder / file.name).symlink_to(file)
        return folder

    def write(self) -> None:
        """Write valid data, and a link to the valid model."""
        (self.folder / "model").symlink_to(self.base_model)
        self.rows("rows.jsonl", ROWS)
        self.rows("held_out.jsonl", ROWS[:1])

    def write_config(self) -> None:
        if os.path.lexists(self.config_path):
            return  # the case has put something else there
        self.config_path.write_bytes(self.config.text().encode() if self.raw_config is None else self.raw_config)

    def file(self, name: str, content: bytes | str) -> str:
        """Write a file, replacing an existing one, and return its name."""
        path = (self.model if name.startswith("model/") else self.folder) / name.removeprefix("model/")
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return name

    def rows(self, name: str, rows: Sequence[object]) -> str:
        """Write rows as JSON lines, and return the name of the file. Strings are written unchanged."""
        return self.file(name, "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))

    def train_on(self, name: str, **keys: str) -> None:
        """Set the source of the training rows, and set other keys of ``[[data.train]]`` to TOML values."""
        self.config.put("data.train.path", json.dumps(name))
        for key, value in keys.items():
            self.config.put(f"data.train.{key}", value)

    def model_config(self, **values: object) -> None:
        """Change keys of the model's config.json."""
        known = json.loads((self.base_model / "config.json").read_text())
        self.file("model/config.json", json.dumps({**known, **values}))


#: Function that makes a mistake in a workplace. It returns the strings that the message must contain, such as a line.
Spoil = Callable[[Workplace], Sequence[str]]


@dataclass(frozen=True)
class WrongInput:
    """One possible user mistake.

    Attributes:
        name: Name of the mistake, unique within its kind.
        kind: Kind of mistake, such as "config: missing key".
        code: Documented exit code.
        spoil: Function that makes the mistake.
        commands: Commands that must refuse the input.
    """

    name: str
    kind: str
    code: int
    spoil: Spoil
    commands: tuple[str, ...] = ("check", "run")


def make_base_model(folder: Path) -> Path:
    """Write the valid model with a chat template. It has only one layer, because planning takes most of the time."""
    write_tiny_model(folder, num_hidden_layers=1)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def make_workplace(folder: Path, base_model: Path) -> Workplace:
    """Create a valid workplace. An existing folder is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    work = Workplace(folder, base_model)
    work.write()
    return work


def all_tables() -> list[str]:
    return sorted(TABLES)
