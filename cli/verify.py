"""``megatrain-tier verify``: compare tiered training with plain AdamW on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .main import EXIT_CONFIG, EXIT_VERIFY, RunFailedError
from .options import ConfigSource, json_option, writable_folder
from .terminal import echo_wrapped

if TYPE_CHECKING:
    from megatrain.extras.verify import VerifyResult

_TIERS = ("ram", "nvme")


@click.command("verify")
@click.argument("config", required=False, type=click.Path(path_type=Path), metavar="[CONFIG]")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one key of CONFIG. May be repeated."
)
@click.option(
    "--tiers",
    default="ram,nvme",
    show_default=True,
    metavar="TIERS",
    help="Tiers of the training state: ram, or ram,nvme.",
)
@json_option
def command(config: Path | None, overrides: tuple[str, ...], tiers: str, as_json: bool) -> int:
    """Compare tiered training with plain AdamW on this machine.

    Trains a scaled-down copy of CONFIG's model (without CONFIG: a small Llama) for 4 steps, first with transformers and
    torch alone, then tiered. Compares losses, gradient norms, all gradients and all weights. A second tiered run keeps
    all blocks on the drives of CONFIG, stops midway and resumes; its results must be bit-identical. Removes all files
    at the end. Exit code 5 means that a value differs.
    """
    tier_names = _parse_tiers(tiers)
    loaded = None if config is None else ConfigSource(config, (), overrides).load()

    from megatrain.extras.doctor.drives import interrupt_on_termination
    from megatrain.extras.verify import verify

    with interrupt_on_termination():
        result = verify(
            None if loaded is None else loaded.config,
            tiers=tier_names,
            scratch=writable_folder(),
            on_progress=lambda what: echo_wrapped(f"{what} ...", err=True),
        )
    if as_json:
        click.echo(json.dumps(result.to_json()))
    else:
        _print(result)
    return 0 if result.holds else EXIT_VERIFY


def _parse_tiers(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in _TIERS]
    if unknown or not names:
        raise RunFailedError(f"--tiers {text}: use ram, nvme or ram,nvme", EXIT_CONFIG)
    return names


def _print(result: VerifyResult) -> None:
    from rich.console import Console
    from rich.text import Text

    from .console import plain_table, print_line, set_text_width

    console = set_text_width(Console())
    print_line(console, result.headline, indent=2, style="bold")
    table = plain_table()
    for name in ("", "allowed", "found"):
        table.add_column(name, overflow="fold")
    for check in result.checks:
        table.add_row(check.what, check.allowed, Text(check.found, style="green" if check.holds else "bold red"))
    console.print(table)
    for check in result.checks:
        for problem in check.problems:
            print_line(console, f"differs: {check.what}: {problem}", indent=2, style="red")
    for note in result.notes:
        print_line(console, note, indent=2, style="dim")
    verdict = "equal: tiered training equals plain training on this machine." if result.holds else "not equal."
    print_line(console, f"{verdict}  {result.seconds:.0f} s", indent=2, style="green" if result.holds else "bold red")
