"""``megatrain-tier doctor``: measure this machine, say what to fix, and keep the rates for plans."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .main import EXIT_FAILED, RunFailedError, write_file
from .options import json_option, load

if TYPE_CHECKING:
    from megatrain.extras.doctor.drives import DriveResult
    from megatrain.extras.doctor.examine import Examination
    from megatrain.extras.doctor.layers import LayerRates
    from megatrain.extras.doctor.processors import GpuResult

_STYLES = {"ok": "green", "note": "yellow", "warn": "bold red"}


@click.command("doctor")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option("--quick", is_flag=True, help="About half a minute for one path; no long writes.")
@click.option(
    "--config", "config_file", type=click.Path(path_type=Path), metavar="FILE", help="Measure its [[tiers.nvme]] paths."
)
@click.option(
    "--save-profile",
    "profile_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also write the figures of this machine, for `plan --machine FILE` elsewhere.",
)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Then let N processes measure at once, one for each GPU: memory, drives, GPUs, and what moves between them.",
)
@json_option
def command(
    paths: tuple[Path, ...],
    quick: bool,
    config_file: Path | None,
    profile_file: Path | None,
    processes: int,
    as_json: bool,
) -> int:
    """Measure RAM, processors and GPU, and the drives of PATHS; say what to fix.

    Keeps the rates in the user's cache folder, where `plan` finds them. Without PATHS: those of --config, else the
    current folder. Takes up to 1 GiB of each drive while it runs, and leaves nothing there. Writes over those bytes
    for half a minute, 32 GiB at most, to see whether the drive slows; --quick does not.
    """
    from megatrain.extras.doctor.drives import terminated_as_interrupted
    from megatrain.extras.doctor.examine import examine
    from megatrain.extras.doctor.processes import ProcessesFailedError

    if profile_file is not None and not os.access(profile_file.absolute().parent, os.W_OK):
        raise click.UsageError(f"--save-profile {profile_file}: its folder does not exist, or cannot be written")
    folders = [_absolute(path) for path in paths] or _paths_of(config_file)
    try:
        with terminated_as_interrupted():
            examination = examine(
                list(dict.fromkeys(folders)),
                quick=quick,
                num_processes=processes,
                on_progress=lambda what: click.echo(f"measuring {what} ...", err=True),
            )
    except ProcessesFailedError as error:
        raise RunFailedError(f"--processes {processes}: {error}", EXIT_FAILED) from None
    stored, problem = _store(examination)
    if profile_file is not None:
        write_file(profile_file, examination.machine_toml())
    if as_json:
        values = {**examination.to_json(), "stored": str(stored) if stored else None, "not_stored_because": problem}
        click.echo(json.dumps(values))
        return 0
    _print(examination)
    click.echo(f"stored in {stored}; `megatrain-tier plan` uses it" if stored else f"not stored: {problem}")
    if profile_file is not None:
        click.echo(f"written {profile_file}; plan for this machine with `plan CONFIG --machine {profile_file}`")
    return 0


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path.expanduser()))


def _paths_of(config_file: Path | None) -> list[Path]:
    """Return the folders of a config's drives, or their nearest parents that exist; else a folder that can be used."""
    if config_file is not None:
        from megatrain.machine.machine import existing_parent

        found = [existing_parent(table.path) for table in load(config_file, (), ()).config.tiers.nvme]
        if found:
            return found
    here = Path.cwd()
    return [here if os.access(here, os.W_OK) else Path(tempfile.gettempdir())]


def _store(examination: Examination) -> tuple[Path | None, str | None]:
    from megatrain.machine.machine import profile_path, store_profile

    try:
        return store_profile(examination.profile), None
    except OSError as error:
        return None, f"{profile_path()}: {error.strerror}"


def _print(examination: Examination) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from tiered.units import format_size

    from .render import PLAIN_WIDTH

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, PLAIN_WIDTH)
    system = examination.system
    limit = "" if system.ram_limit_bytes >= system.ram_bytes else f" (limit {format_size(system.ram_limit_bytes)})"
    head = f"{system.host}  {system.cpu}, {system.num_cpus} CPUs, {format_size(system.ram_bytes)} RAM{limit}"
    console.print(Text(head, style="bold"), soft_wrap=True)
    for line in _machine_lines(examination):
        console.print(Text(line), soft_wrap=True)
    for drive in examination.drives:
        console.print(Text(f"{drive.path}  {drive.file_system.kind} on {drive.file_system.source}"), soft_wrap=True)
        console.print(_drive_table(drive))
    for line in _processes_lines(examination):
        console.print(Text(line), soft_wrap=True)
    findings = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    findings.add_column(no_wrap=True)
    findings.add_column(overflow="fold")
    for finding in examination.findings:
        text = Text(f"{finding.subject}: {finding.seen}")
        if finding.advice:
            text.append(f"\nto do: {finding.advice}", style="italic")
        findings.add_row(Text(finding.severity, style=_STYLES[finding.severity]), text)
    console.print(findings)


def _machine_lines(examination: Examination) -> list[str]:
    from tiered.units import format_rate

    processor, gpu = examination.processor, examination.gpu
    lines = [
        f"RAM      read {format_rate(processor.ram_read)}  copy {format_rate(processor.ram_copy)}  "
        f"update {format_rate(processor.ram_update)}   ({processor.num_threads} threads)",
        "AdamW    "
        + "  ".join(
            f"{dtype} {rate / 1e9:.2f} G params/s, {processor.adamw_share(dtype):.0%} of RAM"
            for dtype, rate in processor.adamw_params.items()
        ),
    ]
    by_device: dict[str, LayerRates | GpuResult] = {"cpu": examination.layers}
    if gpu is not None:
        by_device["gpu"] = gpu
    for device, result in by_device.items():
        for dtype, rate in result.matmul_flops.items():
            parts = [f"products {_flops(rate)}"]
            if dtype in result.attention_flops:
                parts.append(f"attention {_flops(result.attention_flops[dtype])}")
            if dtype in result.elementwise:
                parts.append(f"other operators {format_rate(result.elementwise[dtype])}")
            lines.append(f"layers   {device} {dtype} {'  '.join(parts)}")
    if examination.layers.launches_per_s:
        lines.append(f"host     {1e6 / examination.layers.launches_per_s:,.0f} us for each operator of a step")
    if gpu is not None:
        pinned = "pinned" if gpu.is_pinned else "not pinned"
        lines.append(f"GPU      {gpu.name}  from RAM {format_rate(gpu.h2d)}  to RAM {format_rate(gpu.d2h)}  ({pinned})")
    return lines


def _processes_lines(examination: Examination) -> list[str]:
    """Return what several processes did at once, beside what one did."""
    from tiered.units import format_rate

    found, alone = examination.processes, examination.processor
    if found is None:
        return []
    lines = [
        f"{found.num_processes} processes at once, together and beside one process",
        f"RAM      copy {format_rate(found.ram_copy)}, {found.ram_copy / alone.ram_copy:.0%}",
        "AdamW    "
        + "  ".join(
            f"{dtype} {rate / 1e9:.2f} G params/s, {rate / alone.adamw_params[dtype]:.0%}"
            for dtype, rate in found.adamw_params.items()
        ),
    ]
    for drive in examination.drives:
        rates = found.drives[str(drive.path)]
        parts = (
            f"{name} {format_rate(getattr(rates, name))}, {getattr(rates, name) / getattr(drive.tier, name):.0%}"
            for name in ("read", "write", "mixed")
        )
        lines.append(f"{drive.path}  {'  '.join(parts)}")
    lines.append(f"each     gather {format_rate(found.gather)}  exchange {format_rate(found.exchange)}, each direction")
    gpu = examination.gpu
    if gpu is not None and found.h2d is not None and found.d2h is not None:
        lines.append(
            f"GPUs     from RAM {format_rate(found.h2d)}, {found.h2d / gpu.h2d:.0%}  to RAM {format_rate(found.d2h)}, "
            f"{found.d2h / gpu.d2h:.0%} of one GPU alone, the slowest of them"
        )
    return lines


def _flops(rate: float) -> str:
    return f"{rate / 1e12:,.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.0f} GFLOP/s"


def _drive_table(drive: DriveResult) -> object:
    from rich.table import Table

    from tiered.units import format_rate

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2))
    table.add_column("")
    columns = ("read", "write", "mixed")
    for name in (*columns, "sustained"):
        table.add_column(name, justify="right", no_wrap=True)
    end = format_rate(drive.sustained.last) if drive.sustained else "-"
    tier, bare = ([getattr(rates, name) for name in columns] for rates in (drive.tier, drive.bare))
    table.add_row("the tier gets", *map(format_rate, tier), end)
    table.add_row("the drive gives", *map(format_rate, bare), "")
    table.add_row("", *(f"{ours / theirs:.0%}" for ours, theirs in zip(tier, bare, strict=True)), "")
    return table
