"""Checks whether a run's config supports several ranks."""

from __future__ import annotations

from collections.abc import Iterator

from megatrain.base.errors import ConfigError, Problem
from megatrain.optim.base import MatrixOptimizer
from megatrain.optim.factory import make_optimizer
from megatrain.plan.run_spec import RunSpec
from megatrain.ranks.lanes import has_work_for_all


def check_ranks(run: RunSpec) -> None:
    """Raise an error if the config does not support more than one rank.

    Raises:
        ConfigError: If a key has an unsupported value. The error contains all such keys.
    """
    if run.world.is_single:
        return
    if run.num_lanes < run.world.size:  # the other checks assume at least one lane per rank
        raise ConfigError("the config", [_lane_problem(run)])
    problems = list(_find_rank_problems(run))
    if problems:
        raise ConfigError("the config", problems)


def _lane_problem(run: RunSpec) -> Problem:
    message = (
        f"training.gradient_lanes = {run.num_lanes}: {run.world.size} processes need at least one lane each. "
        "A run keeps its number of lanes, because it affects the last bits of the results"
    )
    advice = f"Start at most {_format_processes(run.num_lanes)}, or begin a new run with more lanes"
    return Problem("training.gradient_lanes", message, advice)


def _find_rank_problems(run: RunSpec) -> Iterator[Problem]:
    """Yield the reasons why the config cannot run on several ranks. The caller checks that each rank has a lane."""
    world = run.world
    clause = f"with {world.size} processes"
    if 1 < world.num_hosts < world.size:
        message = (
            f"{world.num_hosts} hosts with {world.local_size} processes each: a world with several hosts and several "
            "processes on each is refused until two real hosts have trained in it"
        )
        advice = "Start one process on each host, or all processes on one host"
        yield Problem("distributed.processes", message, advice)
    if not has_work_for_all(world.size, run.num_lanes, run.batch.num_micro_batches):
        yield _micro_batch_problem(run)
    if run.batch.order != "layer":
        message = (
            f'advanced.micro_batch_order = "{run.batch.order}": {clause} all micro-batches of a layer run before the '
            "next layer"
        )
        yield Problem("advanced.micro_batch_order", message, 'Write "layer"')
    optimizer = make_optimizer(run.optimizer)
    kinds = optimizer.state_kinds(run.dtype.itemsize == 2)
    needs_whole = any(kind.elements_of is not None or kind.needs_whole for kind in kinds)
    if needs_whole or isinstance(optimizer, MatrixOptimizer):
        requirement = f'optimizer.optim = "{run.optimizer.optim}" needs whole matrices'
        message = f"{requirement}, and {clause} each has only a part of every matrix"
        advice = "Start one process, which also resumes a checkpoint of several, or write an optimizer such as adamw"
        yield Problem("optimizer.optim", message, advice)


def _micro_batch_problem(run: RunSpec) -> Problem:
    """Return the problem that a rank would have no micro-batch in a step, with config values that solve it."""
    size, lanes, batch = run.world.size, run.num_lanes, run.batch
    count, rows_per_example = batch.num_micro_batches, batch.rows_per_example
    # A new run has one lane per process unless the config sets the number.
    max_size = max(n for n in range(1, size) if has_work_for_all(n, n if lanes == size else lanes, count))
    min_count = next(n for n in range(size, lanes + 1) if has_work_for_all(size, lanes, n))
    alternative = f"or start at most {_format_processes(max_size)}"
    if batch.configured_rows is None:
        noun = "rows" if rows_per_example == 1 else "examples of two rows"
        message = (
            f"training.train_batch_tokens = {batch.num_tokens}: with {size} processes each needs a micro-batch, and a "
            f"step has {batch.num_rows // rows_per_example} {noun} of data.max_length = {batch.max_length}"
        )
        advice = f"Write train_batch_tokens = {min_count * rows_per_example * batch.max_length}, {alternative}"
        return Problem("training.train_batch_tokens", message, advice)
    if size < lanes and has_work_for_all(size, size, count):
        alternative = f"for a new run gradient_lanes = {size}, so that each has one; {alternative}"
    examples = batch.num_rows // rows_per_example
    message = (
        f"training.gradient_accumulation_steps = {count}: with {size} processes each needs a micro-batch, but a step "
        "has only that many"
    )
    # Prefer to split the same rows into smaller micro-batches. Otherwise suggest a larger step.
    divisors = (n for n in range(min_count, examples + 1) if examples % n == 0 and has_work_for_all(size, lanes, n))
    parts = next(divisors, None)
    if parts is not None:
        advice = f"Write per_device_train_batch_size = {examples // parts} and gradient_accumulation_steps = {parts}, "
        advice += f"which is the same step in smaller micro-batches, {alternative}"
    else:
        advice = f"Write gradient_accumulation_steps = {min_count}, {alternative}"
    return Problem("training.gradient_accumulation_steps", message, advice)


def _format_processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
