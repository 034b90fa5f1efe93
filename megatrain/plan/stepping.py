"""Inputs that an engine needs to run a plan: the model in its tiers, the recipe of a step, and warm kernels."""

from __future__ import annotations

from dataclasses import replace

from megatrain.engine.device import device_kernels
from megatrain.engine.program.forward_programs import evaluation_program
from megatrain.engine.tape.streamed import StepRecipe, StreamedModel
from megatrain.engine.tape.updates import has_split_weights
from megatrain.engine.unit.compiled_layers import LayerCompiler
from megatrain.optim import clip
from megatrain.optim.factory import segment_builder
from megatrain.optim.on_device import warm_up_norm
from megatrain.plan.plan import Plan


def model_for_steps(plan: Plan) -> StreamedModel:
    """Return the model as an engine runs it in training steps."""
    placement = plan.placement
    return StreamedModel(plan.graph, plan.trace, plan.program, placement.homes, plan.device, placement.stays)


def model_for_passes(plan: Plan) -> StreamedModel:
    """Return the model as an engine runs it in forward passes, where no copies stay between two passes."""
    return replace(model_for_steps(plan), program=evaluation_program(plan.program), stays={})


def step_recipe(plan: Plan) -> StepRecipe:
    """Return the recipe with which an engine computes the run's steps."""
    run, graph, optimizer = plan.run, plan.graph, plan.traced.optimizer
    return StepRecipe(
        optimizer,
        segment_builder(run.optimizer, optimizer, split_master=has_split_weights(graph), graph=graph),
        run.optimizer.max_grad_norm,
        device_optimizer=plan.traced.device_optimizer,
        nonfinite=run.optimizer.nonfinite,
        seed=run.seed,
        order=run.batch.order,
        objective=run.objective,
        compiler=LayerCompiler(run.model.table.compiler) if run.model.table.compiler else None,
    )


def warm_up(plan: Plan) -> None:
    """Compile or load the host's and the device's update kernels now, to keep this out of the first step."""
    gradients = {block.dtype for block in plan.program.blocks.values() if block.kind == "gradients"}
    formats = [(plan.graph.dtype.itemsize == 2, dtype) for dtype in gradients]
    plan.traced.optimizer.warm_up(formats)
    if plan.traced.device_optimizer is not None and plan.updates.gpu_memory_ticks:
        plan.traced.device_optimizer.warm_up(formats)
    clip.warm_up()
    warm_up_norm(plan.device)
    device_kernels.warm_up(plan.device, plan.graph.dtype)
