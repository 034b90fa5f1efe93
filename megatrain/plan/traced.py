"""Trace of a run's model: all facts that planning needs from the model's folder, tokenizer and forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from megatrain.base.errors import ConfigError, Problem, UnsupportedModelError
from megatrain.converters.fused import find_fused
from megatrain.converters.liger import apply_liger_kernels, check_liger_kernels, has_liger_kernels
from megatrain.converters.packed_rows import choose_packing
from megatrain.converters.spec import ModelSpec
from megatrain.converters.tiled import tile_mlps
from megatrain.data.encoding import load_tokenizer
from megatrain.engine.device.device_kernels import treat_fakes_as_gpu
from megatrain.engine.device.environment import deterministic_kernels
from megatrain.engine.device.flash import FlashKernels, flash_for_gpu, plan_flash, unsupported_flash, unusable_reason
from megatrain.engine.program.encoding import Encoding
from megatrain.engine.program.visit_trace import VisitTrace
from megatrain.models.folder import ModelFolderError
from megatrain.models.graph import ModelGraph, num_learned_positions
from megatrain.models.in_place import FrozenBlock, frozen_blocks, unread_block
from megatrain.models.load import open_loader
from megatrain.optim.base import Optimizer
from megatrain.optim.factory import check_groups, make_optimizer
from megatrain.optim.on_device import DeviceKernelError, device_optimizer
from megatrain.optim.threads import KernelThreads, num_update_threads
from megatrain.plan.budgets import FOLDER
from megatrain.plan.plan import TracedModel
from megatrain.plan.run_spec import RunSpec
from megatrain.trace.trace import trace_visits


def trace_model(run: RunSpec, padded: bool | None, like: TracedModel | None) -> TracedModel:
    """Build the model, trace one step, and create the optimizer.

    Args:
        padded: Whether rows may have padding or hold several documents. None derives this from the data.
        like: Model of another plan. Its graph is reused. Its trace is reused if micro-batches have the same shape.
    """
    run, graph = _choose_kernels(run, like)
    run, packing_warning = with_supported_packing(run, graph)
    packing = run.data.table.packing
    check_groups(run.optimizer, (e for layout in graph.layouts.values() if layout.trainable for e in layout.entries))
    if padded is None:
        padded = bool(packing) or run.batch.micro_batch_rows > 1
    run, trace, flash_note = _trace_with_flash(run, graph, padded, like)
    threads = KernelThreads(num_update_threads(run.device.type))
    fused = find_fused(graph)[0] if run.optimizer.optim == "muon" else None
    optimizer = make_optimizer(run.optimizer, threads, vocabulary=_vocabulary(graph), seed=run.seed, fused=fused)
    compute_tier = run.tiers.compute_tier(run.device)
    device_optimizer, host_updates = _device_optimizer(optimizer, run.trace_device, compute_tier)
    in_place, encodings = find_frozen_blocks(run, graph)
    return TracedModel(
        run=run,
        padded=padded,
        graph=graph,
        trace=trace,
        optimizer=optimizer,
        device_optimizer=device_optimizer,
        host_updates=host_updates,
        compute_tier=compute_tier,
        packing_warning=packing_warning,
        flash_note=flash_note,
        in_place=in_place,
        encodings=encodings,
    )


def _choose_kernels(run: RunSpec, like: TracedModel | None) -> tuple[RunSpec, ModelGraph]:
    """Decide whether the run uses liger's kernels. Return the run and its model, which can be reused from ``like``."""
    if run.model.table.use_liger_kernel == "auto":
        if like is not None and like.run.device.type == run.device.type:
            run = run.with_kernels(use_liger_kernel=like.run.uses_liger)
        elif can_use_liger_kernels(run):
            liger_run = run.with_kernels(use_liger_kernel=True)
            try:
                return liger_run, make_graph(liger_run)
            except UnsupportedModelError:  # if the model itself is unsupported, the next attempt raises again
                run = run.with_kernels(use_liger_kernel=False)
        else:
            run = run.with_kernels(use_liger_kernel=False)
    if like is not None and like.run.uses_liger == run.uses_liger:
        return run, like.graph
    return run, make_graph(run)


def can_use_liger_kernels(run: RunSpec) -> bool:
    """Return whether ``use_liger_kernel = "auto"`` uses liger's kernels for a run, if they support its model."""
    is_allowed = run.model.table.compiler is None and run.task != "distill"
    return is_allowed and run.device.type == "cuda" and has_liger_kernels()


def _trace_with_flash(
    run: RunSpec, graph: ModelGraph, padded: bool, like: TracedModel | None
) -> tuple[RunSpec, VisitTrace, str]:
    """Choose the flash kernels and trace. Return the run, its trace, and why torch's own kernels are used, or ""."""
    is_auto, note = run.model.table.flash_attention == "auto", ""
    if is_auto and like is not None and like.run.device.type == run.device.type:
        run = run.with_kernels(flash_attention=like.run.flash)
    elif is_auto:
        kernels, note = choose_flash(run)
        run = run.with_kernels(flash_attention=kernels)
    elif run.flash != "FA2":
        check_flash(run)
    if like is not None and graph is like.graph and _trace_key(like.run) == _trace_key(run) and like.padded == padded:
        return run, like.trace, note
    try:
        return run, trace_run(run, graph, padded=padded), note
    except UnsupportedModelError as error:
        if not is_auto or run.flash == "FA2":
            raise
        note = _flash_note(error.problem.partition(". Write")[0])
        run = run.with_kernels(flash_attention="FA2")
    return run, trace_run(run, graph, padded=padded), note


def choose_flash(run: RunSpec) -> tuple[FlashKernels, str]:
    """Return the kernels that ``flash_attention = "auto"`` selects, and the reason if they are torch's own, else ""."""
    if run.device.type != "cuda":
        return "FA2", ""
    if run.model.table.compiler is not None:
        return "FA2", _flash_note("model.compile makes its own graphs")
    planned_gpu = _planned_gpu_name(run)
    kernels = flash_for_gpu(run.device, planned_gpu)
    if kernels == "FA2":
        return "FA2", _flash_note("FA3 and FA4 have no kernels for this GPU")
    reason = unusable_reason(kernels, run.device, planned_gpu)
    return ("FA2", _flash_note(reason)) if reason else (kernels, "")


def check_flash(run: RunSpec) -> None:
    """Check that the GPU and the installed packages support the flash kernels from the config or a checkpoint.

    Raises:
        UnsupportedModelError: If the GPU or a package does not support the kernels.
    """
    if run.device.type != "cuda":
        reason = "it needs a GPU"
    else:
        reason = unusable_reason(run.flash, run.device, _planned_gpu_name(run))
    if reason:
        raise unsupported_flash(run.flash, reason)


def _planned_gpu_name(run: RunSpec) -> str | None:
    """Return the name of a GPU that is not in this machine, or None for this machine's GPU."""
    machine = run.tiers.machine
    return None if machine.is_here else machine.gpu_name(run.device)


def _flash_note(reason: str) -> str:
    return f"model.flash_attention: FA2, torch's own kernels: {reason}"


def _trace_key(run: RunSpec) -> tuple[str, int, int, str]:
    """Return the settings of a run that affect its trace, including the device, which determines the kernels."""
    return run.device.type, run.batch.micro_batch_rows, run.batch.max_length, run.flash


def with_supported_packing(run: RunSpec, graph: ModelGraph) -> tuple[RunSpec, str]:
    """Return the run with a packing that the model supports, and the reason if it is not the default, or ""."""
    packing, warning = choose_packing(run.model, graph, run.data.table.packing, is_default=run.data.has_default_packing)
    batch = replace(run.batch, single_rows=run.batch.single_rows and bool(packing))
    return replace(run, data=run.data.with_keys(packing=packing), batch=batch), warning


def check_positions(model: ModelSpec, max_length: int, graph: ModelGraph) -> None:
    """Raise an error if rows are longer than the model's learned positions.

    Raises:
        ConfigError: If rows are too long. The error refers to data.max_length.
    """
    positions = num_learned_positions(graph)
    if positions is not None and max_length > positions:
        message = f"data.max_length = {max_length}, but this model has {positions} positions"
        problem = Problem("data.max_length", message, f"Write at most {positions}")
        raise ConfigError(model.name, [problem])


def trace_run(run: RunSpec, graph: ModelGraph, *, padded: bool, top_k: int | None = None) -> VisitTrace:
    """Trace one micro-batch. With ``top_k``, trace only a forward that scores ``top_k`` vocabulary entries per token.

    Raises:
        ConfigError: If rows are longer than the model's learned positions.
    """
    check_positions(run.model, run.batch.max_length, graph)
    # Trace with the run's settings, because they determine the kernels and the kernels' memory.
    with (
        deterministic_kernels(run.trace_device, type(graph.model).__name__, enabled=run.is_deterministic),
        treat_fakes_as_gpu(enabled=run.has_fake_gpu),
        plan_flash(run.flash),
    ):
        return trace_visits(
            graph,
            run.batch.micro_batch_rows,
            run.batch.max_length,
            run.dtype,
            device=run.trace_device,
            objective=run.objective,
            padded=padded,
            is_compiled=run.model.table.compiler is not None,
            example=_example_batch(run),
            top_k=top_k,
        )


def _example_batch(run: RunSpec) -> Mapping[str, Tensor] | None:
    """Return an example micro-batch with the run's maximum number of images, or None without images."""
    if run.data.images_folder is None:
        return None
    tokenizer = load_tokenizer(run.model.tokenizer_folder)
    processor = run.data.image_processor(tokenizer)
    assert processor is not None
    return processor.make_example(run.batch.micro_batch_rows)


def make_graph(run: RunSpec) -> ModelGraph:
    """Build a run's model without weights."""
    graph = run.model.build(run.dtype)
    if run.model.table.mlp_rows:
        tile_mlps(graph, run.model.table.mlp_rows)
    if run.uses_liger:
        check_liger_kernels(graph.model, run.device)
        apply_liger_kernels(graph.model, include_mlps=not run.model.table.mlp_rows)
    return graph


def find_frozen_blocks(run: RunSpec, graph: ModelGraph) -> tuple[Mapping[str, FrozenBlock], Mapping[str, Encoding]]:
    """Return the frozen layouts that may stay in the model's folder, and the encodings of packed layouts."""
    frozen = _frozen_blocks(run, graph)
    encodings: dict[str, Encoding] = {
        name: block.packing for name, block in frozen.items() if block.packing is not None
    }
    return frozen if FOLDER in run.placement.homes["in place"] else {}, encodings


def _frozen_blocks(run: RunSpec, graph: ModelGraph) -> Mapping[str, FrozenBlock]:
    """Return the frozen layouts that can be read from the model's folder, as plain or packed tensors."""
    frozen = [layout for layout in graph.layouts.values() if not layout.trainable]
    if run.model.table.train_from_scratch or not frozen:
        return {}
    if not run.world.is_single:  # the folder has complete tensors, but each process needs shards
        return {}
    try:
        return frozen_blocks(open_loader(run.model.folder, graph), frozen, graph.dtype)
    except (ModelFolderError, OSError):  # a plan needs no weights, and the run will report the error
        return {layout.name: unread_block(layout, graph.dtype) for layout in frozen}


def _vocabulary(graph: ModelGraph) -> frozenset[str]:
    """Return the names of the parameters of the embeddings and the output head."""
    modules = {name: module for name, module in graph.model.named_modules() if isinstance(module, nn.Embedding)}
    head = graph.model.get_output_embeddings()
    modules |= {name: module for name, module in graph.model.named_modules() if module is head}
    names = (f"{path}.{parameter}" for path, module in modules.items() for parameter, _ in module.named_parameters())
    return frozenset(graph.owner_names.get(name, name) for name in names)


def _device_optimizer(optimizer: Optimizer, device: torch.device, compute_tier: str) -> tuple[Optimizer | None, str]:
    """Return the optimizer for blocks in GPU memory. If there is none, return None and the reason."""
    if compute_tier == "ram":
        return None, ""
    try:
        return device_optimizer(optimizer, device), ""
    except DeviceKernelError as error:
        return None, str(error)
