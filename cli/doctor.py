"""``megatrain-tier doctor``: measure this machine and store the rates for plans."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .main import write_file
from .options import ConfigSource, json_option, writable_folder
from .terminal import echo_wrapped

if TYPE_CHECKING:
    from megatrain.extras.doctor.drives import DriveResult
    from megatrain.extras.doctor.examine import DoctorResults
    from megatrain.extras.doctor.layers import LayerRates
    from megatrain.extras.doctor.processors import GpuResult

_STYLES = {"ok": "green", "note": "yellow", "warn": "bold red"}


@click.command("doctor")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option("--quick", is_flag=True, help="Measure for about half a minute per path, without long writes.")
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Config whose [[tiers.nvme]] drives are measured.",
)
@click.option(
    "--save-profile",
    "profile_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also write the rates of this machine to FILE, for `plan --machine FILE`.",
)
@json_option
def command(
    paths: tuple[Path, ...],
    quick: bool,
    config_file: Path | None,
    profile_file: Path | None,
    as_json: bool,
) -> int:
    """Measure processors, GPU and drives for plans, and propose fixes.

    Stores the rates in the user's cache folder, where `plan` finds them. PATHS defaults to the drives of --config, or
    else to the current folder. Uses up to 512 MiB on each drive, and leaves no files there. Without --quick, rewrites
    this data for half a minute (at most 32 GiB in total) to find out whether the drive slows down.
    """
    from megatrain.extras.doctor.drives import interrupt_on_termination
    from megatrain.extras.doctor.examine import examine

    if profile_file is not None and not os.access(profile_file.absolute().parent, os.W_OK):
        raise click.UsageError(f"--save-profile {profile_file}: its folder does not exist or is not writable")
    folders = [_absolute(path) for path in paths] or _drive_folders(config_file)
    with interrupt_on_termination():
        results = examine(
            list(dict.fromkeys(folders)),
            quick=quick,
            on_progress=lambda what: echo_wrapped(f"measuring {what} ...", err=True),
        )
    stored, problem = _store_rates(results)
    if profile_file is not None:
        write_file(profile_file, results.machine_toml())
    if as_json:
        values = {**results.to_json(), "stored": str(stored) if stored else None, "not_stored_because": problem}
        click.echo(json.dumps(values))
        return 0
    _print(results)
    echo_wrapped(f"stored in {stored}; `megatrain-tier plan` uses it" if stored else f"not stored: {problem}")
    if profile_file is not None:
        echo_wrapped(f"wrote {profile_file}; plan for this machine with `plan CONFIG --machine {profile_file}`")
    return 0


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path.expanduser()))


def _drive_folders(config_file: Path | None) -> list[Path]:
    """Return the folders of a config's drives or their nearest existing parents; without drives, a writable folder."""
    if config_file is not None:
        from megatrain.machine.file_systems import existing_parent

        folders = [existing_parent(table.path) for table in ConfigSource(config_file).load().config.tiers.nvme]
        if folders:
            return folders
    return [writable_folder()]


def _store_rates(results: DoctorResults) -> tuple[Path | None, str | None]:
    from megatrain.machine.profiles import profile_path, store_profile

    try:
        return store_profile(results.profile), None
    except OSError as error:
        return None, f"{profile_path()}: {error.strerror}"


def _print(results: DoctorResults) -> None:
    from rich.console import Console
    from rich.text import Text

    from tiered.units import format_size

    from .console import plain_table, print_line, set_text_width

    console = set_text_width(Console())
    system = results.system
    limit = "" if system.ram_limit_bytes >= system.ram_bytes else f" (limit {format_size(system.ram_limit_bytes)})"
    header = f"{system.host}  {system.cpu}, {system.num_cpus} CPUs, {format_size(system.ram_bytes)} RAM{limit}"
    print_line(console, header, indent=2, style="bold")
    for line in _machine_lines(results):
        print_line(console, line, indent=9)
    for drive in results.drives:
        print_line(console, f"{drive.path}  {drive.file_system.kind} on {drive.file_system.source}", indent=2)
        console.print(_drive_table(drive))
    findings = plain_table(show_header=False)
    findings.add_column(no_wrap=True)
    findings.add_column(overflow="fold")
    for finding in results.findings:
        text = Text(f"{finding.subject}: {finding.seen}")
        if finding.advice:
            text.append(f"\nfix: {finding.advice}", style="italic")
        findings.add_row(Text(finding.severity, style=_STYLES[finding.severity]), text)
    console.print(findings)


def _machine_lines(results: DoctorResults) -> list[str]:
    from tiered.units import format_rate

    processor, gpu = results.processor, results.gpu
    lines = [
        f"RAM      update {format_rate(processor.ram_update)}   ({processor.num_threads} threads)",
        "AdamW    "
        + "  ".join(f"{dtype} {rate / 1e9:.2f} G params/s" for dtype, rate in processor.adamw_params.items()),
    ]
    by_device: dict[str, LayerRates | GpuResult] = {"cpu": results.layers}
    if gpu is not None:
        by_device["gpu"] = gpu
    for device, result in by_device.items():
        for dtype, rate in result.matmul_flops.items():
            parts = [f"products {_format_flops(rate)}"]
            if dtype in result.attention_flops:
                parts.append(f"attention {_format_flops(result.attention_flops[dtype])}")
            if dtype in result.elementwise:
                parts.append(f"other operators {format_rate(result.elementwise[dtype])}")
            lines.append(f"layers   {device} {dtype} {'  '.join(parts)}")
    if results.layers.launches_per_s:
        lines.append(f"host     {1e6 / results.layers.launches_per_s:,.0f} us for each operator of a step")
    if gpu is not None:
        pin = "pinned" if gpu.is_pinned else "not pinned"
        lines.append(f"GPU      {gpu.name}  from RAM {format_rate(gpu.h2d)}  to RAM {format_rate(gpu.d2h)}  ({pin})")
    return lines


def _format_flops(rate: float) -> str:
    return f"{rate / 1e12:,.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.0f} GFLOP/s"


def _drive_table(drive: DriveResult) -> object:
    from tiered.units import format_rate

    from .console import plain_table

    table = plain_table(padding=(0, 2, 0, 2))
    table.add_column("")
    columns = ("read", "write", "mixed")
    for name in (*columns, "sustained"):
        table.add_column(name, justify="right", no_wrap=True)
    end = format_rate(drive.sustained.last) if drive.sustained else "-"
    table.add_row("the tier gets", *(format_rate(getattr(drive.tier, name)) for name in columns), end)
    return table
