"""``megatrain-tier score``: write log-probabilities, likely tokens or embeddings of data."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
from typing import TYPE_CHECKING

import click

from .main import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED_AND_SAVED, RunFailedError
from .options import ConfigSource, config_options, json_option
from .terminal import Spinner, echo_wrapped, without_garbage_collection

if TYPE_CHECKING:
    from megatrain.extras.scoring import ScoreSummary


@click.command("score")
@config_options
@click.option("--dry-run", is_flag=True, help="Check the config and print the plan of a pass, then stop.")
@json_option
def command(source: ConfigSource, dry_run: bool, as_json: bool) -> int:
    """Write log-probabilities, likely tokens or embeddings of data.

    Reads [[data.train]] and trains nothing. Streams each weight from the model's folder once per pass. Each pass
    processes the rows of one training step ([training]). [score] selects the contents of output_dir/scores. Run the
    same command again to resume an interrupted scoring run.

    Ctrl-C or SIGTERM ends the command after the current pass, with exit code 75. Only the rows of an unfinished pass
    are scored again.
    """
    with Spinner("reading the config", is_shown=not as_json) as spinner:
        loaded = source.load(spinner)
        spinner.show_activity("importing torch")
        with without_garbage_collection():
            from megatrain.extras.scoring import Scorer
            from megatrain.plan.limits import refuse

            from .observers import MessageObserver, fetch_weights
            from .plan_text import print_plan

            spinner.show_activity("reading the model and planning")

            class ScoringObserver(MessageObserver):
                """Observer that prints messages, and the plan of a new scoring run or one line for a continued run."""

                def on_ready(self, step: int | None) -> None:
                    if step is None and not as_json:
                        print_plan(scorer.plan)
                    elif not as_json:
                        self.on_message(
                            f"plan   `megatrain-tier score {shlex.quote(str(source.path))} --dry-run` shows it"
                        )

            scorer = Scorer(loaded.config, observer=ScoringObserver())
    plan = scorer.plan
    if as_json or dry_run:
        print_plan(plan, as_json=as_json)
    refuse(plan.objections)
    if dry_run:
        return EXIT_DONE
    fetch_weights(plan, show_bar=not as_json)
    try:
        summary = scorer.run()
    except KeyboardInterrupt:
        raise RunFailedError(
            "interrupted; finished passes are saved: run the same command again to continue", EXIT_FAILED
        ) from None
    _print(summary, as_json=as_json)
    if summary.interrupted:
        raise RunFailedError(
            f"interrupted after {summary.num_rows_done:,} of {summary.num_rows:,} rows, saved: run the same command "
            "again to continue",
            EXIT_INTERRUPTED_AND_SAVED,
        )
    return EXIT_DONE


def _print(summary: ScoreSummary, *, as_json: bool) -> None:
    if as_json:
        values = dataclasses.asdict(summary) | {
            "folder": str(summary.folder),
            "mean_log_prob": None if math.isnan(summary.mean_log_prob) else summary.mean_log_prob,
        }
        click.echo(json.dumps(values))
        return
    relative = os.path.relpath(summary.folder)
    click.echo(f"scores  {relative if len(relative) < len(str(summary.folder)) else summary.folder}")
    if summary.num_passes:
        rate = summary.num_tokens / max(summary.seconds, 1e-9)
        echo_wrapped(
            f"        {summary.num_scored_tokens:,} tokens scored in {summary.num_passes} passes, "
            f"{rate:,.0f} tokens/s, perplexity {summary.perplexity:.4g}",
            indent=8,
        )
