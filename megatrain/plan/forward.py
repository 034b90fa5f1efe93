"""Plans of forward passes, which use only blocks of weights (or of averages) and KV caches.

Each pass reads every unit's weights once for all of the pass's micro-batches, so weight traffic does not depend on the
number of tokens. Above T* tokens, computing hides the traffic (``Estimate.crossing_tokens``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from megatrain.base.errors import ConfigError, Problem
from megatrain.engine.device.device_kernels import treat_fakes_as_gpu
from megatrain.engine.device.environment import deterministic_kernels
from megatrain.engine.program.block_plan import FrozenWeights
from megatrain.engine.program.builder import ProgramBuilder
from megatrain.engine.program.forward_programs import (
    evaluation_program,
    frozen_program,
    generation_program,
    substitute_averages,
    whole_head_bytes,
)
from megatrain.engine.program.step_program import StepProgram
from megatrain.engine.program.visit_trace import VisitTrace
from megatrain.engine.program.workspace import decoded_bytes, step_workspace_bytes
from megatrain.machine.profiles import LoadedProfile
from megatrain.models.graph import ModelGraph
from megatrain.models.in_place import buffer_bytes
from megatrain.optim.average import EMA
from megatrain.optim.factory import make_optimizer
from megatrain.plan.budgets import with_folder, with_residents, with_workspace
from megatrain.plan.placement import PlacementSolver, TierBudget
from megatrain.plan.plan import PlacedStep, Plan, TracedModel
from megatrain.plan.planner import objections_to, with_objections
from megatrain.plan.run_spec import RunSpec
from megatrain.plan.run_tiers import tier_budgets
from megatrain.plan.search import STAY_SHARE, choose_fastest, price_step, with_open_room
from megatrain.plan.shortfall import DoesNotFitError, Shortfall, require_fit
from megatrain.plan.traced import find_frozen_blocks, make_graph, trace_run, with_supported_packing
from megatrain.plan.traffic import Traffic
from megatrain.trace.trace import trace_generation
from tiered.units import PAGE_BYTES, round_up

#: Number of fp32 copies of a micro-batch's logits that sampling a token needs (warped, sorted, softmax and so on).
_NUM_LOGIT_COPIES = 8
#: Passes between a run's steps are planned without rates, because the traced step's counts include a backward.
_NO_RATES = LoadedProfile(None)
#: Number of copies of a pass's scores in RAM: as computed, split by document, and as rows to write.
_NUM_SCORE_COPIES = 3


def forward_run(run: RunSpec) -> RunSpec:
    """Return the run with a frozen model and without checkpoints, which would need drive space."""
    checkpoint = replace(run.checkpoint, table=run.checkpoint.table.without_saves())
    return replace(run, model=replace(run.model, is_trained=False), checkpoint=checkpoint)


def check_weights(run: RunSpec) -> None:
    """Raise an error if the model has random weights. It can be planned, but its output is meaningless.

    Raises:
        ConfigError: If ``model.train_from_scratch`` is set.
    """
    if run.model.table.train_from_scratch:
        text = "model.train_from_scratch = true: the output of random weights is meaningless"
        advice = "Leave the key out, and name the folder of a trained model in model_name_or_path"
        raise ConfigError("the config", [Problem("model.train_from_scratch", text, advice)])


def score_bytes(run: RunSpec, top_k: int, width: int) -> int:
    """Return the RAM that a pass's scores need until they are written.

    Args:
        top_k: Number of scored vocabulary entries per token.
        width: Size of an embedding; 0 without embeddings.
    """
    return _NUM_SCORE_COPIES * run.batch.num_tokens * (12 * top_k + 16) + 4 * run.batch.num_rows * width


def _traced_forward(
    run: RunSpec, graph: ModelGraph, trace: VisitTrace, *, padded: bool, packing_warning: str = ""
) -> TracedModel:
    """Return a traced model that is never updated."""
    in_place, encodings = find_frozen_blocks(run, graph)
    return TracedModel(
        run=run,
        padded=padded,
        graph=graph,
        trace=trace,
        optimizer=make_optimizer(run.optimizer),
        compute_tier=run.tiers.compute_tier(run.device),
        in_place=in_place,
        encodings=encodings,
        packing_warning=packing_warning,
    )


def _place(
    model: TracedModel, program: StepProgram, budgets: Mapping[str, TierBudget], stay_share: float = 0
) -> PlacedStep:
    """Place a program in tiers with these budgets.

    Raises:
        DoesNotFitError: If a tier is too small.
    """
    run, profile = model.run, model.run.tiers.machine.rates()
    budgets = with_folder(budgets, program, buffer_bytes(model.in_place.values(), model.graph.dtype))
    budgets = with_residents(budgets, run, program, profile.machine if run.device.type == "cuda" else None)
    solver = PlacementSolver(program, list(budgets.values()), run.placement.homes, None, stay_share)
    return PlacedStep(run, model, program, require_fit(solver.solve()), budgets)


def plan_forward(run: RunSpec, *, top_k: int = 0, width: int = 0) -> Plan:
    """Plan forward passes that score the tokens of data rows.

    Args:
        run: Result of ``forward_run``. Each of its steps is one pass.
        top_k: Number of most likely vocabulary entries to score per token.
        width: Size of each document's embedding; 0 without embeddings.

    Raises:
        DoesNotFitError: If a tier is too small. The error contains a sufficient size.
        ModelFolderError: If the model cannot be run.
        UnsupportedModelError: If the model cannot be run.
    """
    assert not run.model.is_trained, run.model
    graph = make_graph(run)
    run, warning = with_supported_packing(run, graph)
    padded = bool(run.data.table.packing) or run.batch.micro_batch_rows > 1
    trace = trace_run(run, graph, padded=padded, top_k=top_k)
    model = _traced_forward(run, graph, trace, padded=padded, packing_warning=warning)
    program = ProgramBuilder(
        graph,
        trace,
        num_micro_batches=run.batch.num_micro_batches,
        order="layer",
        compute_tier=model.compute_tier,
        optimizer=None,
        frozen=FrozenWeights(not run.model.table.train_from_scratch, model.in_place, model.encodings),
    ).build()
    program = evaluation_program(program)
    workspace = step_workspace_bytes(graph, trace, program, run.batch.num_micro_batches, run.trace_device)
    budgets = with_workspace(tier_budgets(run, workspace), score_bytes(run, top_k, width), "ram")
    profile = run.tiers.machine.rates()
    plan = price_step(_place(model, program, budgets, STAY_SHARE), profile)
    if any(plan.traffic.values()):
        plan = choose_fastest(list(with_open_room(plan, profile)) or [plan])
    return with_objections(plan)


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """Plan for continuing prompts.

    Attributes:
        plan: Plan of a pass that generates one token for each prompt, with the KV cache in blocks.
        first_program: Program of the first pass, which fills the KV cache.
    """

    plan: Plan
    first_program: StepProgram

    def planned_bytes(self, num_passes: int) -> dict[str, int]:
        """Return the bytes that each link moves in ``num_passes`` passes. The first pass fills the KV cache."""
        placement = self.plan.placement
        moved_bytes = Counter(Traffic(self.first_program, placement.routes, placement.homes, {}).first_step_bytes())
        if num_passes > 1:
            moved_bytes.update(placement.run_traffic_bytes(num_passes - 1))
        return {link: nbytes for link, nbytes in moved_bytes.items() if nbytes}


def plan_generation(run: RunSpec) -> GenerationPlan:
    """Plan generation for a batch of prompts. A prompt and its completion have at most ``batch.max_length`` tokens.

    Args:
        run: Result of ``forward_run``.

    Raises:
        DoesNotFitError: If a tier is too small. The error contains a sufficient size.
        ModelFolderError: If the model cannot be run.
        UnsupportedModelError: If the model cannot be run.
    """
    assert not run.model.is_trained, run.model
    graph, batch = make_graph(run), run.batch
    trace, cache_nbytes = _trace_generation(run, graph, batch.micro_batch_rows, batch.max_length)
    model = _traced_forward(run, graph, trace, padded=False)
    frozen = FrozenWeights(not run.model.table.train_from_scratch, model.in_place, model.encodings)
    weights = frozen_program(graph, compute_tier=model.compute_tier, frozen=frozen)
    first_program, program = _generation_programs(weights, graph, trace, cache_nbytes, batch.num_micro_batches)
    step = _place(model, program, tier_budgets(run, _generation_workspace_bytes(run, graph, trace, program)))
    plan = price_step(step, run.tiers.machine.rates(), num_tokens=batch.num_rows)
    return GenerationPlan(replace(plan, objections=objections_to(plan)), first_program)


def _trace_generation(
    run: RunSpec, graph: ModelGraph, rows: int, max_length: int
) -> tuple[VisitTrace, Mapping[int, int]]:
    """Return the visits of a pass, and the KV cache's bytes by visit."""
    with (
        deterministic_kernels(run.trace_device, type(graph.model).__name__, enabled=run.is_deterministic),
        treat_fakes_as_gpu(enabled=run.has_fake_gpu),
    ):
        return trace_generation(graph, rows, max_length, device=run.trace_device)


def _generation_programs(
    weights: StepProgram, graph: ModelGraph, trace: VisitTrace, cache_nbytes: Mapping[int, int], num_micro_batches: int
) -> tuple[StepProgram, StepProgram]:
    """Return the program of the pass that fills the KV cache, and the program of all later passes."""
    make = partial(generation_program, weights, graph, trace, cache_nbytes, num_micro_batches=num_micro_batches)
    return make(is_first=True), make(is_first=False)


def _generation_workspace_bytes(run: RunSpec, graph: ModelGraph, trace: VisitTrace, program: StepProgram) -> int:
    """Return a generation pass's workspace in the compute tier, in bytes."""
    vocab_size: int = graph.config.get_text_config().vocab_size
    logit_bytes = _NUM_LOGIT_COPIES * 4 * run.batch.micro_batch_rows * vocab_size
    head_bytes = round_up(whole_head_bytes(program, graph), PAGE_BYTES)
    workspace = step_workspace_bytes(graph, trace, program, run.batch.num_micro_batches, run.trace_device)
    return workspace + logit_bytes + head_bytes


def with_prompts(run: RunSpec, rows: int, num_prompts: int, max_length: int) -> RunSpec:
    """Return a run whose steps are batches of prompts.

    Args:
        rows: Prompts per micro-batch, at most ``num_prompts``.
        num_prompts: Prompts per batch, rounded up to whole micro-batches.
        max_length: Maximum number of tokens in a prompt and its completion together.
    """
    num_rows = -(-num_prompts // rows) * rows
    batch = replace(run.batch, num_rows=num_rows, max_length=max_length, configured_rows=rows, order="layer")
    return replace(run, batch=batch)


def plan_averages(plan: Plan) -> Plan:
    """Plan evaluation passes that read a run's averaged weights from their homes.

    Averages are streamed in fp32 and rounded for each visit. The passes reuse the memory of gradients and activations.

    Raises:
        DoesNotFitError: If a tier is too small. The error contains a sufficient size.
    """
    graph, trace = plan.graph, plan.trace
    program = substitute_averages(evaluation_program(plan.program), graph, EMA.name)
    rounding_bytes = decoded_bytes(graph, trace, program) - decoded_bytes(graph, trace, plan.program)
    budgets = {name: replace(budget, residency=None) for name, budget in plan.budgets_by_tier.items()}
    budget = budgets[program.compute_tier]
    workspace = budget.workspace_bytes + round_up(rounding_bytes, PAGE_BYTES)
    budgets[program.compute_tier] = replace(budget, workspace_bytes=workspace)
    homes = {key: plan.placement.homes[key] for key in program.blocks}
    placement = PlacementSolver(program, list(budgets.values()), plan.run.placement.homes, existing_homes=homes).solve()
    if isinstance(placement, Shortfall):
        advice = (
            "This size is for evaluating the averaged weights, which are in fp32. "
            f'Give tiers.{placement.tier} that size, or write weights = "trained" in [evaluation].'
        )
        raise DoesNotFitError(replace(placement, advice=advice))
    return price_step(replace(plan.step, program=program, placement=placement, budgets_by_tier=budgets), _NO_RATES)


def plan_samples(plan: Plan, *, rows: int, num_prompts: int, max_length: int) -> GenerationPlan:
    """Plan text generation between two steps of a run, with the run's weights at their homes.

    The passes reuse the memory of gradients and activations. If not all prompts fit, fewer prompts run
    together. This does not change the generated tokens, because a micro-batch keeps its rows.

    Args:
        plan: Plan of the training run.
        rows: Prompts per micro-batch.
        max_length: Tokens of the longest prompt and its completion.

    Raises:
        DoesNotFitError: If one micro-batch does not fit in a tier. The error contains a sufficient size.
        UnsupportedModelError: If the model cannot generate with streamed weights.
    """
    graph, run = plan.graph, plan.run
    trace, cache_nbytes = _trace_generation(run, graph, rows, max_length)
    num_micro_batches = -(-num_prompts // rows)
    while True:
        batch_run = with_prompts(run, rows, num_micro_batches * rows, max_length)
        result = _place_samples(plan, batch_run, trace, cache_nbytes)
        if not isinstance(result, Shortfall):
            return result
        if num_micro_batches == 1:
            advice = (
                f"This size is for continuing {rows} prompts of evaluations, {max_length} tokens each. Give "
                f"tiers.{result.tier} that size, or lower evaluation.max_new_tokens, "
                "evaluation.max_predict_samples or evaluation.per_device_eval_batch_size."
            )
            raise DoesNotFitError(replace(result, advice=advice))
        num_micro_batches = -(-num_micro_batches // 2)


def _place_samples(
    plan: Plan, run: RunSpec, trace: VisitTrace, cache_nbytes: Mapping[int, int]
) -> GenerationPlan | Shortfall:
    """Return the plan for ``run``'s prompts, or the shortfall of a tier that is too small for them."""
    graph = plan.graph
    first_program, program = _generation_programs(plan.program, graph, trace, cache_nbytes, run.batch.num_micro_batches)
    workspace = dict.fromkeys(plan.budgets_by_tier, 0)
    workspace[program.compute_tier] = _generation_workspace_bytes(run, graph, trace, program)
    if any(block.in_place for block in program.blocks.values()):
        workspace["ram"] += buffer_bytes(find_frozen_blocks(run, graph)[0].values(), graph.dtype)
    budgets = {}
    for name, budget in plan.budgets_by_tier.items():
        residency = budget.residency
        if residency is not None:
            residency = replace(residency, kinds=residency.kinds & {"activations"})
        budgets[name] = replace(budget, workspace_bytes=workspace[name], residency=residency)
    homes = {key: plan.placement.homes[key] for key in program.blocks if key in plan.placement.homes}
    placement = PlacementSolver(program, list(budgets.values()), run.placement.homes, existing_homes=homes).solve()
    if isinstance(placement, Shortfall):
        return placement
    traced = replace(plan.traced, trace=trace)
    step = PlacedStep(run, traced, program, placement, budgets, plan.ticks)
    return GenerationPlan(price_step(step, _NO_RATES, num_tokens=run.batch.num_rows), first_program)
