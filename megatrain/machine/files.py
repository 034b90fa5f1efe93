"""Format of machine files: TOML with a machine's figures and their origins, for plans made on other machines.

The package contains files for common machines (``megatrain/machine/machines``). ``doctor --save-profile`` writes a
file. A figure is a table. Its key ``is`` has the value with its unit. Exactly one other key states the origin:
``source`` (a publication), ``estimate`` (the basis) or ``measured`` (the day of doctor's measurement).
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from megatrain.base.sizes import parse_rate
from megatrain.machine.profiles import MachineProfile
from megatrain.machine.this_machine import THIS_MACHINE
from tiered.units import GB, GiB, parse_size

__all__ = ["Figure", "MachineFile", "MachineFileError", "machine_names", "machine_toml", "read_machine"]

FORMAT = "megatrain-tier machine 1"
_FOLDER = Path(__file__).with_name("machines")
_PREFIXES = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_RATE = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?)\s*([kMGTP]?)([A-Za-z]+)/s")


class MachineFileError(Exception):
    """Error for a machine that does not exist or whose file cannot be used. The message states the remedy."""


def _require_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f'{value!r} has no unit. Write a text such as "24GB"')
    return value


def _size(value: object) -> float:
    return float(parse_size(_require_text(value)))


def _per_second(unit: str, example: str) -> BeforeValidator:
    """Return a parser for units per second, e.g. ``"794TFLOP/s"``."""

    def parse(value: object) -> float:
        match = _RATE.fullmatch(_require_text(value).strip())
        if match is None or match[3] != unit or not float(match[1]):
            raise ValueError(f'"{value}" is not a rate above 0. Write for example "{example}"')
        return float(match[1].replace("_", "")) * _PREFIXES[match[2]]

    return BeforeValidator(parse)


class _MachineTable(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class Figure(_MachineTable):
    """Value in bytes, units or units per second, and its origin."""

    value: Any = Field(alias="is")
    source: str | None = Field(None, min_length=1)
    estimate: str | None = Field(None, min_length=1)
    measured: str | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _has_one_origin(self) -> Figure:
        if sum(origin is not None for origin in (self.source, self.estimate, self.measured)) != 1:
            raise ValueError("a figure needs exactly one origin: source, estimate or measured")
        return self


class ByteFigure(Figure):
    """A number of bytes, written with a unit."""

    value: Annotated[float, BeforeValidator(_size), Field(alias="is", gt=0)]

    @property
    def nbytes(self) -> int:
        """The value as a whole number of bytes."""
        return int(self.value)


class Bandwidth(Figure):
    """A number of bytes per second."""

    value: Annotated[float, BeforeValidator(parse_rate), Field(alias="is", gt=0)]


class Flops(Figure):
    """Achieved floating-point operations per second, in large matmuls or in attention."""

    value: Annotated[float, _per_second("FLOP", "794TFLOP/s"), Field(alias="is", gt=0)]


class UpdateRate(Figure):
    """Parameters that AdamW updates per second."""

    value: Annotated[float, _per_second("param", "6.5Gparam/s"), Field(alias="is", gt=0)]


class LaunchRate(Figure):
    """Number of operators that one thread calls per second, including a step's Python code."""

    value: Annotated[float, _per_second("launch", "28klaunch/s"), Field(alias="is", gt=0)]


class Count(Figure):
    """A count, such as the number of cores."""

    value: Annotated[int, Field(alias="is", gt=0)]


class GpuTable(_MachineTable):
    """``[gpu]``: one GPU, and its links to RAM, to other GPUs of its host, and to other hosts."""

    name: str
    count: int = Field(1, ge=1)
    memory: ByteFigure
    from_ram: Bandwidth
    to_ram: Bandwidth
    update: Bandwidth | None = None
    peer: Bandwidth | None = None
    network: Bandwidth | None = None
    bfloat16: Flops
    float32: Flops | None = None
    attention_bfloat16: Flops | None = None
    attention_float32: Flops | None = None
    elementwise_bfloat16: Bandwidth | None = None
    elementwise_float32: Bandwidth | None = None


class CpuTable(_MachineTable):
    """``[cpu]``: all processors together."""

    name: str
    cores: Count
    bfloat16: Flops | None = None
    float32: Flops | None = None
    attention_bfloat16: Flops | None = None
    attention_float32: Flops | None = None
    elementwise_bfloat16: Bandwidth | None = None
    elementwise_float32: Bandwidth | None = None
    launches: LaunchRate | None = None
    adamw_bfloat16: UpdateRate
    adamw_float32: UpdateRate


class RamTable(_MachineTable):
    """``[ram]``. Plans do not use the rates of reads and copies."""

    size: ByteFigure
    in_use: ByteFigure
    read: Bandwidth | None = None
    copied: Bandwidth | None = Field(None, alias="copy")
    update: Bandwidth


class DriveTable(_MachineTable):
    """``[[drives]]``: ``count`` equal drives."""

    name: str
    count: int = Field(1, ge=1)
    size: ByteFigure
    read: Bandwidth
    write: Bandwidth
    mixed: Bandwidth
    sustained_write: Bandwidth | None = None
    endurance: ByteFigure | None = None


class MachineFile(_MachineTable):
    """All contents of a machine file.

    Attributes:
        note: Note for the user, or "".
        unified_memory: Size of the memory that the CPU and the GPU share, or None if each has its own memory.
    """

    format: Literal["megatrain-tier machine 1"]
    title: str = Field(min_length=1)
    note: str = ""
    unified_memory: ByteFigure | None = None
    gpu: GpuTable | None = None
    cpu: CpuTable
    ram: RamTable
    drives: tuple[DriveTable, ...] = ()

    def figures(self) -> Iterator[tuple[str, Figure]]:
        """Yield (dotted key, figure) for every figure in the file, e.g. ``("gpu.memory", ...)``."""
        if self.unified_memory is not None:
            yield "unified_memory", self.unified_memory
        tables: list[tuple[str, _MachineTable | None]] = [("gpu", self.gpu), ("cpu", self.cpu), ("ram", self.ram)]
        tables += [(f"drives.{index}", drive) for index, drive in enumerate(self.drives)]
        for prefix, table in tables:
            for name, field in type(table).model_fields.items() if table is not None else ():
                figure = getattr(table, name)
                if isinstance(figure, Figure):
                    yield f"{prefix}.{field.alias or name}", figure


def machine_names() -> list[str]:
    """Return the names of the packaged machines."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def read_machine(name: str) -> tuple[str, MachineFile]:
    """Return a machine's name and figures.

    Args:
        name: Name of a packaged machine, or path of a file.

    Raises:
        MachineFileError: The machine does not exist, or its file cannot be used.
    """
    path = _FOLDER / f"{name}.toml"
    if name not in machine_names():
        path = Path(name).expanduser()
        if not path.is_file():
            matches = [machine for machine in machine_names() if machine.startswith(name)]
            matches = matches or difflib.get_close_matches(name, machine_names(), n=1)
            suggestion = f'. Did you mean "{matches[0]}"?' if matches else "."
            raise MachineFileError(
                f'--machine: there is no machine and no file "{name}"{suggestion} Machines: '
                f"{', '.join(machine_names())}; `megatrain-tier doctor --save-profile FILE` writes a file for the "
                "machine that runs it"
            )
    try:
        return path.stem, MachineFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise MachineFileError(f"--machine: {path}: {error.strerror}") from None
    except ValidationError as error:
        raise MachineFileError(f"--machine: {path}: {_first_problem_text(error)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MachineFileError(f"--machine: {path} is not a TOML file: {error}") from None


def _first_problem_text(error: ValidationError) -> str:
    problems = error.errors(include_url=False, include_input=False)
    problem = problems[0]
    location = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        message = "is missing"
    elif problem["type"] == "extra_forbidden":
        message = "is not a key of a machine file"
    suffix = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{location}: {message}{suffix}" if location else f"{message}{suffix}"


def machine_toml(profile: MachineProfile, in_use_bytes: int, drive_sizes: Mapping[str, int]) -> str:
    """Return the TOML text of a machine that doctor measured.

    Args:
        in_use_bytes: RAM used by other programs and the system.
        drive_sizes: Size of each drive's file system, by the drive's key in the profile.
    """
    day = f"{profile.measured_at:%Y-%m-%d}{', quick' if profile.is_quick else ''}"

    def line(key: str, text: str) -> str:
        return f'{key} = {{ is = {text}, measured = "{day}" }}'

    def size(key: str, nbytes: float) -> str:
        return line(key, f'"{nbytes / GiB:.3f}GiB"')

    def rate(key: str, value: float | None) -> list[str]:
        return [] if value is None else [line(key, f'"{value / GB:.4f}GB/s"')]

    def flops(device: str) -> list[str]:
        kinds: tuple[tuple[str, Mapping[str, float], float, str], ...] = (
            ("", profile.matmul_flops_per_s, 1e12, "TFLOP/s"),
            ("attention_", profile.attention_flops_per_s, 1e12, "TFLOP/s"),
            ("elementwise_", profile.elementwise_bytes_per_s, GB, "GB/s"),
        )
        return [
            line(prefix + dtype, f'"{rates[f"{device}/{dtype}"] / unit:.4f}{name}"')
            for prefix, rates, unit, name in kinds
            for dtype in ("bfloat16", "float32")
            if f"{device}/{dtype}" in rates
        ]

    lines = [
        "# Made by `megatrain-tier doctor --save-profile`; `megatrain-tier plan CONFIG --machine FILE` plans for it.",
        f'format = "{FORMAT}"',
        f"title = {_quoted(f'{profile.host}: {profile.cpu}')}",
    ]
    gpu = profile.gpu
    if gpu is not None and THIS_MACHINE.has_unified_memory:
        lines.append(size("unified_memory", profile.ram_bytes))
    if gpu is not None:
        lines += ["", "[gpu]", f"name = {_quoted(gpu.name)}", size("memory", gpu.memory_bytes)]
        lines += [*rate("from_ram", gpu.h2d_bytes_per_s), *rate("to_ram", gpu.d2h_bytes_per_s)]
        lines += [*rate("update", gpu.update_bytes_per_s), *flops("cuda")]
    lines += ["", "[cpu]", f"name = {_quoted(profile.cpu)}", line("cores", str(profile.num_threads)), *flops("cpu")]
    if profile.launches_per_s is not None:
        lines.append(line("launches", f'"{profile.launches_per_s / 1e3:.4f}klaunch/s"'))
    for dtype in ("bfloat16", "float32"):
        lines.append(line(f"adamw_{dtype}", f'"{profile.adamw_params_per_s[dtype] / 1e9:.5f}Gparam/s"'))
    lines += ["", "[ram]", size("size", profile.ram_bytes), size("in_use", max(GiB // 256, in_use_bytes))]
    lines += rate("update", profile.ram_update_bytes_per_s)
    for key, nbytes in drive_sizes.items():
        drive = profile.drives[key]
        lines += ["", "[[drives]]", f"name = {_quoted(f'{drive.filesystem} at {drive.path}')}", size("size", nbytes)]
        lines += [*rate("read", drive.read_bytes_per_s), *rate("write", drive.write_bytes_per_s)]
        lines += [*rate("mixed", drive.mixed_bytes_per_s), *rate("sustained_write", drive.sustained_write_bytes_per_s)]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Return a quoted TOML string, with question marks in place of unprintable characters."""
    printable = "".join(character if character.isprintable() else "?" for character in text)
    return '"' + printable.replace("\\", "\\\\").replace('"', '\\"') + '"'
