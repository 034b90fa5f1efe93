"""Jobs for ``processes.ranks`` that run training steps. Results must not depend on the number of ranks."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from megatrain.config import load_config
from megatrain.engine.micro_batches import count_labels, shifted_labels
from megatrain.engine.program.workspace import collective_transients, peak_bytes
from megatrain.engine.tape.ranked import program_properties
from megatrain.plan.plan import Plan
from megatrain.plan.planner import plan_run
from megatrain.plan.tiers import claim_folders
from megatrain.plan.together import plan_together
from megatrain.ranks.collectives import Collectives, check_same
from megatrain.ranks.group import RankGroup
from megatrain.ranks.world import World
from megatrain.training.open_run import OpenRun
from megatrain.training.resolve import resolve
from megatrain.training.trainer import Trainer
from megatrain.training.weights import saved_shards


@dataclass
class RankResult:
    """Observations of one rank, and the contents of its blocks at the end of a run.

    Attributes:
        blocks: Contents of the blocks of weights and optimizer state, by key, without padding.
        moved: Bytes moved between tiers and between ranks, by link.
        planned: Bytes that the plan predicts for the same steps, by link.
        tiers: (peak bytes, capacity in bytes) of each tier, by name.
        window: (measured, planned) peak bytes of full copies and gradient sums.
        gathers_ahead: Number of visits between the gather of weights and their use.
        passes: Whether any tick has passing blocks, such as the parts of a large vocabulary.
        evaluations: (loss with the last weights, number of tokens) of each evaluation set, by name.
        samples: Texts generated with the last weights, by evaluation set.
        num_own_labels: Number of labels that this rank evaluates itself.
        moved_by_evaluations: Bytes that evaluations moved, by link.
        planned_of_evaluations: Bytes that the plan predicts for the evaluations, by link.
        products: Shapes of the matrix products of weight gradients, `(M, K, N)`.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    blocks: dict[str, Tensor] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)
    planned: dict[str, int] = field(default_factory=dict)
    tiers: dict[str, tuple[int, int]] = field(default_factory=dict)
    window: tuple[int, int] = (0, 0)
    gathers_ahead: int = 0
    passes: bool = False
    evaluations: dict[str, tuple[float, int]] = field(default_factory=dict)
    samples: dict[str, list[str]] = field(default_factory=dict)
    num_own_labels: int = 0
    moved_by_evaluations: dict[str, int] = field(default_factory=dict)
    planned_of_evaluations: dict[str, int] = field(default_factory=dict)
    products: frozenset[tuple[int, int, int]] = frozenset()


def plan_of_rank(config: Path, world: World) -> Plan:
    """Return a rank's plan for a config file, and check that all ranks have the same program."""
    run = replace(resolve(load_config(config).config), world=world)
    if world.is_single:
        return plan_run(run)
    collectives = Collectives()
    plan = plan_together(run, collectives.gather_objects)
    check_same(
        collectives.gather_objects,
        "program of a step",
        program_properties(plan.program, plan.run.batch.num_micro_batches),
    )
    return plan


def train(
    world: World,
    folder: Path,
    configs: Sequence[str],
    num_steps: int,
    change: Callable[[list[dict[str, Tensor]], int], None] | None = None,
) -> RankResult:
    """Train for some steps, and return the results.

    Args:
        folder: Folder of the test.
        configs: Config text of each rank. If there are more ranks than texts, the last text is used for the others.
        change: Function that changes the micro-batches of a step in place, given the micro-batches and the step number.
    """
    from oracles.tiered_run import make_loader

    path = folder / f"rank{world.rank}.toml"
    path.write_text(configs[min(world.rank, len(configs) - 1)])
    config = load_config(path).config
    plan = plan_of_rank(path, world)
    loader, result = make_loader(config, plan), RankResult(gathers_ahead=plan.program.sharding.gathers_ahead)
    result.passes = bool(plan.program.cuts.passing)
    trainer = Trainer(config, plan=plan)
    with trainer.open() as opened:
        opened.load()
        store = opened.store
        store.wait_idle()
        before = store.stats()
        engine = opened.make_engine(num_steps)
        for number in range(num_steps):
            micro_batches = [dict(each) for each in next(loader).micro_batches]
            if change is not None:
                change(micro_batches, number)
            found = engine.step(micro_batches, step_index=number, lr=1e-3)
            result.losses.append(found.loss)
            result.norms.append(found.grad_norm)
            result.skipped.append(found.skipped)
            result.num_tokens.append(found.num_trained_tokens)
        engine.finish_updates()
        store.wait_idle()
        moved = store.stats() - before
        result.moved = {link: stats.num_bytes for link, stats in moved.links.items()}
        for link, nbytes in engine.moved_bytes.items():
            result.moved[link] = result.moved.get(link, 0) + nbytes
        if not world.is_single:
            result.window = engine.window_bytes, peak_bytes(collective_transients(plan.graph, plan.program))
        result.planned = plan.placement.run_traffic_bytes(num_steps)
        assert moved.prefetch_wasted == 0 and moved.schedule_misses == 0, moved
        _evaluate(trainer, opened, num_steps, result)
        tiers = store.stats().tiers
        result.tiers = {name: (tier.high_water_bytes, tier.capacity_bytes) for name, tier in tiers.items()}
        opened.end_steps()
        saved = saved_shards(plan)
        for layout in plan.graph.layouts.values():
            parts = dict(zip(plan.program.weight_keys(layout), plan.program.owned_weight_parts(layout), strict=True))
            for block in plan.program.blocks.values():
                if block.kind == "optimizer" and block.tensor_key.rpartition("/")[0] == layout.name:
                    place = saved.get(block.key)  # a single process owns all packed state, which has no saved range
                    parts[block.key] = range(block.num_elements) if place is None else place.owned
            for key, owned in parts.items():
                home = plan.placement.homes[key]
                with store.acquire(key, "gpu" if home == "gpu" else "ram") as lease:
                    assert not lease.tensor[len(owned) :].any(), f"{key}: what lies past the end is not zero"
                    result.blocks[key] = lease.tensor[: len(owned)].clone()
    return result


def _evaluate(trainer: Trainer, opened: OpenRun, step: int, result: RankResult) -> None:
    """Evaluate the config's evaluation sets, and record results and traffic."""
    from megatrain.base.observer import RunObserver
    from megatrain.data.encoding import load_tokenizer
    from megatrain.tasks.evaluation import (
        Evaluator,
        count_pass_traffic,
        load_evaluation_sets,
        make_samplers,
        plan_evaluations,
    )
    from megatrain.training.resolve import resolve_evaluation

    plan, store, spec = opened.plan, opened.store, resolve_evaluation(trainer.config)
    tokenizer, plans = load_tokenizer(plan.run.model.tokenizer_folder), plan_evaluations(spec, plan)
    sets = load_evaluation_sets(spec, plan, tokenizer, lambda text: None)
    gather = (lambda number: [number]) if plan.run.world.is_single else Collectives().gather_objects
    samplers = make_samplers(spec, plans, sets, tokenizer, gather)
    evaluator = Evaluator(
        spec,
        plan,
        store,
        sets,
        RunObserver(),
        timeline=opened.timeline,
        activity=trainer.activity,
        steps_per_epoch=step,
        max_steps=step,
        should_stop=lambda: False,
        plans=plans,
        samplers=samplers,
    )
    before = store.stats()
    evaluator.run(step)
    store.wait_idle()
    moved = store.stats() - before
    result.evaluations = {name: (each.loss, each.num_tokens) for name, each in evaluator.latest_evaluations.items()}
    result.samples = {
        name: [one.generated for one in each.samples] for name, each in evaluator.latest_evaluations.items()
    }
    own = [batch["labels"] for each in sets for micro_batches in each.passes() for batch in micro_batches]
    result.num_own_labels = sum(count_labels(shifted_labels(labels).reshape(-1)) for labels in own)
    result.moved_by_evaluations = {link: stats.num_bytes for link, stats in moved.links.items()}
    result.moved_by_evaluations.update(evaluator.moved_bytes)
    num_passes, planned = sum(each.num_passes for each in sets), Counter[str]()
    for each_plan in plans.values():
        planned.update(count_pass_traffic(each_plan, num_passes))
    for sampler in samplers.values():
        planned.update(sampler.planned_bytes)
    result.planned_of_evaluations = dict(planned)


def digests(results: Sequence[RankResult]) -> Mapping[str, str]:
    """Return digests of each unit's weights and of each kind of its optimizer state.

    Parts and shards are joined without padding, so the digests do not depend on the number of ranks.
    """
    joined: dict[str, list[Tensor]] = {}
    for key in results[0].blocks:
        name, _, kind = key.rpartition("/")
        joined.setdefault(f"{name}/{kind.partition('.')[0]}", []).extend(result.blocks[key] for result in results)
    return {
        key: hashlib.sha256(torch.cat(shares).view(torch.uint8).numpy().tobytes()).hexdigest()
        for key, shares in joined.items()
    }


def go_on(world: World, folder: Path, text: str, first_step: int, num_steps: int) -> tuple[list[float], RankResult]:
    """Resume a run from its newest checkpoint with these ranks, run some steps, and save.

    Returns:
        Losses of the steps, and the results of this rank, with the contents of its blocks at the end.
    """
    from megatrain.base.names import CHECKPOINTS_NAME
    from megatrain.checkpoint.resume import find_candidates
    from megatrain.checkpoint.state import RunState, now_text
    from megatrain.checkpoint.writer import CheckpointFolder, CheckpointWriter
    from megatrain.config.resolved import to_toml
    from oracles.tiered_run import make_loader

    path = folder / f"world{world.size}.rank{world.rank}.toml"
    path.write_text(text)
    config = load_config(path).config
    plan = plan_of_rank(path, world)
    run, loader, result = plan.run, make_loader(config, plan), RankResult()
    if not world.is_single:  # as in a real run
        if world.is_first:
            claim_folders(plan)
        Collectives().gather_objects(None)
    candidates = find_candidates(run.checkpoint, lambda notice: None)
    with Trainer(config, plan=plan).open() as trainer:
        found = trainer.load(candidates)
        assert (0 if found is None else found.state.step) == first_step
        store = trainer.store
        engine = trainer.make_engine(num_steps, first_step=first_step, num_updates=first_step)
        batches = [next(loader) for _ in range(first_step + num_steps)]
        for number in range(first_step, first_step + num_steps):
            step = engine.step(batches[number].micro_batches, step_index=number, lr=1e-3)
            result.losses.append(step.loss)
            result.norms.append(step.grad_norm)
        engine.finish_updates()
        values = dict.fromkeys(("max_steps", "num_updates", "epoch", "epoch_step", "num_real_tokens"), 0)
        state = RunState(
            **values,
            step=first_step + num_steps,
            num_trained_tokens=0,
            seconds=0.0,
            first_loss=None,
            last_loss=None,
            seed=0,
            data_seed=0,
            lr_schedule={},
            config_toml=to_toml(config),
            data_fingerprint="",
            model={"name": run.model.name},
            run_name="",
            saved_at=now_text("microseconds"),
        )
        kept = CheckpointFolder(
            run.output_dir / CHECKPOINTS_NAME, world.rank, RankGroup(world).gather, 2, lambda text: None
        )
        elements = {key: place.num_elements for key, place in saved_shards(plan).items()}
        writer = CheckpointWriter(kept, store, lanes=run.num_lanes, elements=elements)
        writer.begin()
        writer.finish(store.commit(state.to_meta()), state.to_meta())
        trainer.end_steps()
        for key, place in saved_shards(plan).items():
            home = plan.placement.homes[key]
            with store.acquire(key, "gpu" if home == "gpu" else "ram") as lease:
                result.blocks[key] = lease.tensor[: len(place.owned)].clone()
    return result.losses, result
