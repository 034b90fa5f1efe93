"""``megatrain-tier check``: find all mistakes before a run starts."""

from __future__ import annotations

import dataclasses
import gc
import json
import shutil
from typing import TYPE_CHECKING

import click

from .main import EXIT_CONFIG, EXIT_DATA, EXIT_DOES_NOT_FIT, EXIT_DONE, EXIT_FAILED
from .options import ConfigSource, config_options, json_option
from .terminal import Spinner, without_garbage_collection, wrap_words

if TYPE_CHECKING:
    from megatrain.training.check_result import CheckResult

_EXIT_CODES = {"config": EXIT_CONFIG, "fit": EXIT_DOES_NOT_FIT, "data": EXIT_DATA, "failed": EXIT_FAILED}
_ORDER = (EXIT_CONFIG, EXIT_DOES_NOT_FIT, EXIT_DATA, EXIT_FAILED)
_COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "red"}
_PLAIN_WIDTH = 140


@click.command("check")
@config_options
@json_option
@click.option(
    "--skip-weights",
    is_flag=True,
    help="Skip the weights. By default, all weights are read last to find NaN and infinite values, which takes minutes "
    "for a large model.",
)
def command(source: ConfigSource, as_json: bool, skip_weights: bool) -> int:
    """Find all mistakes before a run starts.

    Checks config, model, tokenizer, every row of the data, memory, checkpoints and every weight. Trains and writes
    nothing. Lists all problems.

    The exit code is the first that applies: 2 config or model, 3 does not fit, 4 data, 1 storage failed.
    """
    findings = []
    with Spinner("importing torch", is_shown=not as_json) as spinner:
        with without_garbage_collection():
            from megatrain.training.run_check import check_run

        def show_stage(part: str, share: float) -> None:
            spinner.show_activity(f"checking the {part}", share)
            # Objects of models and plans live long, so collection only costs time. Rows create garbage to collect.
            (gc.disable if part in ("model", "plan") else gc.enable)()

        with without_garbage_collection():
            for finding in check_run(
                source.path, source.extra_files, source.overrides, show_stage, read_weights=not skip_weights
            ):
                findings.append(finding)
                if not as_json:
                    with spinner.hidden():
                        _print(finding)
    codes = {_EXIT_CODES[finding.kind] for finding in findings if finding.kind is not None}
    code = next((code for code in _ORDER if code in codes), EXIT_DONE)
    if as_json:
        click.echo(json.dumps({"exit_code": code, "findings": [dataclasses.asdict(finding) for finding in findings]}))
        return code
    count = sum(finding.severity == "problem" for finding in findings)
    if count:
        click.secho(f"{count} problem{'s' if count > 1 else ''}", fg="red", bold=True)
    else:
        warnings = sum(finding.severity == "warning" for finding in findings)
        suffix = f", {warnings} warning{'s' if warnings > 1 else ''}" if warnings else ""
        click.secho(f"no problems found{suffix}", fg="yellow" if warnings else "green")
    return code


def _print(finding: CheckResult) -> None:
    width = shutil.get_terminal_size((_PLAIN_WIDTH, 24)).columns
    prefix = f"{finding.severity:<7}  {finding.subject:<12}"
    indent = len(prefix) if width >= 2 * len(prefix) else 2
    lines = wrap_words(prefix + finding.text.partition("\n")[0], width, indent=indent)
    for text in finding.text.splitlines()[1:]:
        lines += wrap_words(" " * indent + text, width, indent=indent + 2)
    click.echo(click.style(lines[0][:7], fg=_COLOURS[finding.severity]) + lines[0][7:])
    for line in lines[1:]:
        click.echo(line)
