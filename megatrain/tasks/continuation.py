"""Generation of text that continues a batch of prompts. Uses transformers' ``generate`` and a store's blocks.

Used by commands (``generation``) and between the steps of a run (``evaluation``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatrain.base.progress import Activity
from megatrain.engine.generate import GenerationRunner
from megatrain.engine.tape.access import StoreAccess
from megatrain.optim.threads import KernelThreads
from megatrain.plan.stepping import model_for_steps
from megatrain.plan.tiers import set_schedule
from megatrain.ranks.collectives import SingleRank
from megatrain.tasks.prompts import GenerationSettings, generation_options

if TYPE_CHECKING:
    from torch import Tensor

    from megatrain.engine.program.step_program import NextUses
    from megatrain.plan.forward import GenerationPlan
    from megatrain.ranks.collectives import Collectives
    from tiered import TieredStore

__all__ = ["Continuation", "StoppedError"]


class StoppedError(Exception):
    """A stop was requested between two passes. No lease or transfer is active."""


class Continuation:
    """Generator of text that continues prompts, with the weights in a store. Must be used by only one thread.

    Args:
        plan: Plan of the passes for a batch of prompts.
        settings: Sampling and length of the generated text.
        activity: Progress of the current pass, for a live view.
        is_exact: Whether to prefetch only for the current pass. If False, links stay busy between passes, but
            prefetched bytes are wasted if all prompts end before the next pass.
        should_stop: Called before each pass, on all ranks.
        collectives: Collectives of the ranks that share the weights, or None for a single process. Each rank has
            different prompts.

    Attributes:
        planned_bytes: Planned bytes of all passes so far, by link.
    """

    def __init__(
        self,
        plan: GenerationPlan,
        store: TieredStore,
        tokenizer: Any,
        settings: GenerationSettings,
        *,
        activity: Activity | None = None,
        is_exact: bool = False,
        should_stop: Callable[[], bool] = lambda: False,
        collectives: Collectives | SingleRank | None = None,
    ) -> None:
        self._collectives = collectives or SingleRank()
        self._generation, self._plan, self._store = plan, plan.plan, store
        self._tokenizer, self._settings = tokenizer, settings
        self._activity, self._is_exact, self._should_stop = activity or Activity(), is_exact, should_stop
        self.planned_bytes: dict[str, int] = {}

    def run(self, prompts: Sequence[Tensor], first_micro_batch: int = 0) -> list[tuple[int, ...]]:
        """Return the new tokens for each prompt, including the end-of-text token.

        Args:
            prompts: Tokens of each prompt. At most one prompt per row of the plan. Can be empty on some ranks.
            first_micro_batch: Number of the first micro-batch. It determines the random numbers.

        Raises:
            StoppedError: ``should_stop`` returned True.
            VisitOrderError: The prompts call different layers, or they call layers that are not in the plan.
        """
        from transformers import DynamicCache

        plan, store = self._plan, self._store
        graph, homes, model = plan.graph, plan.placement.homes, plan.graph.model
        rows = plan.run.batch.micro_batch_rows
        batches = [self._make_batch(prompts[start : start + rows]) for start in range(0, len(prompts), rows)]
        num_new = self._settings.max_new_tokens
        num_passes = 0
        programs = (self._generation.first_program, plan.program)
        all_stays: tuple[NextUses, NextUses] = ({}, plan.placement.stays)
        models = [
            replace(model_for_steps(plan), program=program, stays=stays)
            for program, stays in zip(programs, all_stays, strict=True)
        ]
        accesses = [
            StoreAccess(store, model, KernelThreads(1), self._collectives, activity=self._activity) for model in models
        ]
        proxy = _CurrentAccess(accesses)

        def on_pass(index: int) -> None:
            nonlocal num_passes
            if index:
                proxy.access.end_step()
            if self._should_stop():
                raise StoppedError
            num_passes = index + 1
            stage = min(index, 1)  # the first pass fills the KV cache; later passes use it
            proxy.access = accesses[stage]
            if index <= 1 or self._is_exact:
                store.set_schedule(None)
                count = 1 if index == 0 or self._is_exact else max(1, num_new - 1)
                set_schedule(
                    store, programs[stage].schedule(homes, count, first_step=index), plan.run.advanced.prefetch_bytes
                )
            # The first pass reads all prompt tokens. Each later pass reads one token per prompt.
            proxy.access.start_step(index, num_tokens=sum(map(len, prompts)) if index == 0 else len(prompts))

        runner = GenerationRunner(
            graph,
            proxy,
            device=plan.device,
            trace=plan.trace,
            num_micro_batches=plan.run.batch.num_micro_batches,
            any_rank=None if self._collectives.size == 1 else self._reduce_any,
        )
        config = graph.config.get_text_config(decoder=True)
        caches = [DynamicCache(config=config) for _ in batches]
        options = generation_options(self._settings, self._tokenizer, num_new)
        functions = [
            _make_generate_call(model, batch, cache, options) for batch, cache in zip(batches, caches, strict=True)
        ]
        seeds = [(self._settings.seed or 0) + first_micro_batch + index for index in range(len(batches))]
        original_config = model.generation_config
        _read_generation_config(model, Path(plan.run.model.folder))
        end_ids = _end_token_ids(model)
        outputs: list[Any] | None = None
        try:
            outputs = runner.run(functions, caches, seeds, on_pass)
            proxy.access.end_step()
        except StoppedError:  # raised again below when the store is idle
            pass
        finally:
            model.generation_config = original_config
        proxy.access.finish()
        store.set_schedule(None)
        traffic = self._generation.planned_bytes(num_passes) if num_passes else {}
        for link, nbytes in traffic.items():
            self.planned_bytes[link] = self.planned_bytes.get(link, 0) + nbytes
        if outputs is None:
            raise StoppedError
        return [
            tuple(_trim_after_end(row, end_ids))
            for batch, output in zip(batches, outputs, strict=True)
            for row in output[:, batch["input_ids"].shape[1] :].tolist()
        ]

    def _reduce_any(self, value: bool) -> bool:
        return any(self._collectives.gather_objects(value))

    def _make_batch(self, prompts: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the prompts, padded on the left to one length, because ``generate`` requires this."""
        width = max(map(len, prompts))
        pad_id = self._tokenizer.pad_token_id
        pad_id = self._tokenizer.eos_token_id if pad_id is None else pad_id
        ids = torch.full((len(prompts), width), 0 if pad_id is None else pad_id, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(prompts):
            ids[row, width - len(tokens) :], mask[row, width - len(tokens) :] = tokens, 1
        return {"input_ids": ids.to(self._plan.device), "attention_mask": mask.to(self._plan.device)}


class _CurrentAccess:
    """``GenerationAccess`` that forwards calls to the current pass's access. The first pass has a separate access."""

    def __init__(self, accesses: Sequence[StoreAccess]) -> None:
        self.access = accesses[0]

    def begin(self, phase: Any, visit: int) -> None:
        """Begin a visit."""
        self.access.begin(phase, visit)

    def weights(self, unit: Any, visit: int) -> Any:
        """Lease the weights of a visit."""
        return self.access.weights(unit, visit)

    def skip_weights(self, unit: Any, visit: int) -> None:
        """Skip the lease of a visit's weights, which are then not moved."""
        self.access.skip_weights(unit, visit)

    def announce_idle(self, visits: Sequence[int], idle: Collection[int]) -> None:
        """Record the visits whose weights will not be moved."""
        self.access.announce_idle(visits, idle)

    def cache_block(self, visit: int, micro_batch: int) -> Any:
        """Lease the blocks of the KV cache."""
        return self.access.cache_block(visit, micro_batch)


def _make_generate_call(
    model: Any, batch: Mapping[str, Tensor], cache: Any, options: Mapping[str, Any]
) -> Callable[[], Any]:
    return lambda: model.generate(**batch, past_key_values=cache, **options)


def _read_generation_config(model: Any, folder: Path) -> None:
    """Set the model's generation config from the file in its folder, if the file exists."""
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(folder))


def _end_token_ids(model: Any) -> frozenset[int]:
    ids = model.generation_config.eos_token_id
    return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])


def _trim_after_end(ids: list[int], end_ids: frozenset[int]) -> list[int]:
    """Return the tokens up to and including the first end-of-text token. The padding after it is removed."""
    for index, token in enumerate(ids):
        if token in end_ids:
            return ids[: index + 1]
    return ids
