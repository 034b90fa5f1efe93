"""``megatrain-tier data``: preview rows as the loss sees them, and print statistics of all rows."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import sys
from typing import TYPE_CHECKING

import click

from .main import Subcommands
from .options import ConfigSource, config_options, json_option
from .terminal import Spinner, block_torch_import, echo_wrapped

if TYPE_CHECKING:
    from megatrain.data.preview import DataStats, RowPreview

_BAR_WIDTH = 40
_BEGIN, _END = "[[", "]]"


@click.group("data", cls=Subcommands)
def command() -> None:
    """Show training data as the loss sees it."""


@command.command("preview")
@config_options
@click.option("-n", "count", type=click.IntRange(min=1), default=3, show_default=True, help="Number of rows.")
@click.option("--row", type=click.IntRange(min=1), metavar="I", help="Only row I, counted from 1 across all sources.")
@json_option
def preview_command(source: ConfigSource, count: int, row: int | None, as_json: bool) -> int:
    """Show rows, with the trained tokens in green.

    Without colors, [[double brackets]] enclose trained text.
    """
    with Spinner("reading the config", is_shown=not as_json) as spinner:
        loaded = source.load(spinner)

        from megatrain.data.encoding import load_tokenizer
        from megatrain.data.preview import preview_rows
        from megatrain.training.resolve_rows import resolve_data, resolve_folders

        data = resolve_data(loaded.config)
        if data.images_folder is None:
            block_torch_import()
        spinner.show_activity("opening the tokenizer")
        tokenizer = load_tokenizer(resolve_folders(loaded.config)[1], chat_template=loaded.config.model.chat_template)
        spinner.show_activity("reading rows")
        previews = preview_rows(data, tokenizer, count, row)
    if as_json:
        click.echo(json.dumps({"rows": [preview.to_json() for preview in previews]}))
        return 0
    has_color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for index, preview in enumerate(previews):
        if index:
            click.echo()
        _print_row(preview, has_color)
    return 0


def _print_row(preview: RowPreview, has_color: bool) -> None:
    def style_text(text: str, **style: object) -> str:
        return click.style(text, **style) if has_color else text  # type: ignore[arg-type]

    share = 100.0 * preview.num_trained / max(1, preview.num_tokens)
    figures = f"{preview.num_tokens:,} tokens, {preview.num_trained:,} trained ({share:.1f}%)"
    if preview.num_pieces > 1:
        figures += f", in {preview.num_pieces:,} pieces"
    if preview.num_tokens_before > preview.num_tokens:
        note = ", from the start of {:,} tokens; the run uses all" if preview.is_text else ", cut from {:,} tokens"
        figures += note.format(preview.num_tokens_before)
    echo_wrapped(f"{style_text(f'row {preview.number}', bold=True)}  {preview.kind}  {figures}")
    if preview.where:
        echo_wrapped(style_text(preview.where, dim=True))
    if preview.dropped:
        echo_wrapped(style_text(f"dropped: {_escape_controls(preview.dropped)}", fg="red"))
    for reason in preview.untrained_turns:
        echo_wrapped(style_text(f"a turn is not trained: {_escape_controls(reason)}", fg="yellow"))
    if preview.left_out:
        names = " / ".join(preview.left_out)
        advice = ": set model.chat_template" if {"tool_calls", "tools"} & set(preview.left_out) else ""
        echo_wrapped(style_text(f"the chat template has no place for {_escape_controls(names)}{advice}", fg="yellow"))
    if preview.special_tokens:
        text = f"the text of the row contains special tokens: {_escape_controls(' '.join(preview.special_tokens))}"
        echo_wrapped(style_text(text, fg="yellow"))
    parts = []
    for segment in preview.segments:
        text = _escape_controls(segment.text.rstrip("\n") if segment is preview.segments[-1] else segment.text)
        style: dict[str, object] = {"fg": "green", "bold": True} if segment.is_trained else {"dim": True}
        parts.append(style_text(text, **style) if has_color or not segment.is_trained else f"{_BEGIN}{text}{_END}")
    if parts:
        click.echo("".join(parts))


def _escape_controls(text: str) -> str:
    """Escape control characters, so that the terminal shows them instead of executing them."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode() for char in text
    )


@command.command("stats")
@config_options
@json_option
def stats_command(source: ConfigSource, as_json: bool) -> int:
    """Show lengths, the trained share, padding and dropped rows.

    Reads and tokenizes all rows, or reads them from the cache.
    """
    loaded = source.load()

    from megatrain.converters.packed_rows import choose_model_packing
    from megatrain.data.encoding import load_tokenizer
    from megatrain.data.preview import dataset_stats
    from megatrain.machine.this_machine import THIS_MACHINE
    from megatrain.training.resolve import resolve_batch, resolve_data, resolve_model

    model, data = resolve_model(loaded.config), resolve_data(loaded.config)
    # Do not resolve "cuda", so that the command also works on a machine without a GPU.
    device = loaded.config.device
    batch = resolve_batch(loaded.config, device if device == "cuda" else THIS_MACHINE.resolve_device(device).type)
    packing, warning = choose_model_packing(model, data.table.packing, is_default=data.has_default_packing)
    data = data.with_keys(packing=packing)
    if warning:
        echo_wrapped(f"warning: {warning}", err=True)
    tokenizer = load_tokenizer(model.tokenizer_folder, chat_template=model.table.chat_template)
    # Also compute the padding without packing: rows are padded to the longest row in their micro-batch.
    micro_batch_rows = dataclasses.replace(batch, single_rows=False).micro_batch_rows
    stats = dataset_stats(data, tokenizer, batch.num_rows, micro_batch_rows, lambda text: echo_wrapped(text, err=True))
    if as_json:
        click.echo(json.dumps(stats.to_json()))
    else:
        _print_stats(stats, is_packed=bool(packing), max_length=data.table.max_length)
    return 0


def _print_stats(stats: DataStats, *, is_packed: bool, max_length: int) -> None:
    echo = functools.partial(echo_wrapped, indent=11)
    report = stats.report
    echo(
        f"rows       {report.num_rows:,} read, {report.num_dropped:,} dropped, {report.num_truncated:,} truncated to "
        f"{max_length:,} tokens"
    )
    for label, reasons in (("dropped", report.dropped), ("turns not trained", report.untrained_turns)):
        for group in reasons:
            echo(f"  {group.count:>8,}  {label}: {_escape_controls(group.reason)} (first: {group.example})")
    untrained = f"without a trained token (first: {report.first_untrained})"
    for count, reason in ((report.num_too_long, "too long"), (report.num_untrained, untrained)):
        if count:
            echo(f"  {count:>8,}  dropped: {reason}")
    for severity, text in report.remarks():
        echo(f"{severity:<11}{_escape_controls(text)}")
    if report.empty_files is not None:
        echo(f"  {_escape_controls(report.empty_files.skip_message)}")
    if stats.held_out:
        echo(f"held out   {stats.held_out}")
    share = 100.0 * stats.num_trained_tokens / max(1, stats.num_tokens)
    echo(
        f"epoch      {stats.num_documents:,} documents, {stats.num_tokens:,} tokens, {stats.num_trained_tokens:,} "
        f"trained ({share:.1f}%)"
    )
    echo(f"           {stats.num_rows:,} rows in {stats.num_steps:,} steps")
    other_padding = f"{100 * stats.padding_share_other:.1f}% {'without' if is_packed else 'with'} packing"
    echo(f"padding    {100 * stats.padding_share:.1f}%   ({other_padding})")
    if len(stats.sources) > 1 or any(source.weight != 1.0 for source in stats.sources):
        for source in stats.sources:
            share = 100.0 * source.num_trained_tokens / max(1, source.num_tokens)
            echo(
                f"source     {source.path}  {source.num_documents:,} documents, {source.num_tokens:,} tokens, "
                f"{share:.1f}% trained, weight {source.weight:g}"
            )
    lengths = "   ".join(f"{percent}% <= {tokens:,}" for percent, tokens in stats.percentiles.items() if percent)
    echo(f"lengths    shortest {stats.percentiles[0]:,}   {lengths}")
    max_documents = max(bucket.num_documents for bucket in stats.histogram)
    bar_width = min(_BAR_WIDTH, shutil.get_terminal_size().columns - 30)  # after 30 columns of numbers
    for bucket in stats.histogram:
        bar = "#" * max(1, round(bar_width * bucket.num_documents / max_documents))
        click.echo(f"  {f'{bucket.low:,}-{bucket.high:,}':>15}  {bucket.num_documents:>9,}  {bar}")
