"""Texts continued by a model of any size: many prompts at once, each weight fetched once for a token of all of them.

The model's weights are frozen and read as scores read them (``scoring``). What it keeps of the tokens so far, keys and
values, are blocks of the store. Tokens are those of transformers' ``generate`` (``engine/generate.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatrain.chat import ChatError, ChatSettings, generation_options, prompt_tokens
from megatrain.config.resolve import resolve, resolve_score
from megatrain.config.schema import RunConfig
from megatrain.engine.generate import GenerationRunner
from megatrain.engine.step import StoreAccess
from megatrain.models.graph import num_learned_positions
from megatrain.optim.threads import KernelThreads
from megatrain.plan.forward import forward_run, plan_generation
from megatrain.plan.limits import refuse
from megatrain.run.activity import Activity
from megatrain.run.metrics import RunObserver
from megatrain.tiers import set_schedule
from megatrain.trainer import Trainer, tokenizer_of

if TYPE_CHECKING:
    from torch import Tensor

    from megatrain.engine.program import Stays
    from megatrain.plan.forward import GenerationPlan
    from megatrain.plan.plan import RunSpec

__all__ = ["Completion", "Generator", "config_of_folder", "generate"]


@dataclass(frozen=True, slots=True)
class Completion:
    """What a model made of a prompt.

    Attributes:
        prompt: as it was given.
        completion: text, without special tokens.
        token_ids: that the text is of, the end of text included.
    """

    prompt: str
    completion: str
    token_ids: tuple[int, ...]


def config_of_folder(folder: Path, **tables: Any) -> RunConfig:
    """Return a config whose model is that of an exported folder; nothing is trained or written.

    Args:
        folder: of a model.
        tables: more of the config, such as ``tiers``.
    """
    values = {
        "task": "sft",
        "output_dir": str(folder.absolute() / "generate"),
        "model": {"model_name_or_path": str(folder.absolute())},
        "data": {"train": [{"path": "prompts"}]},  # nothing reads it
    }
    return RunConfig.model_validate({**values, **tables})


def generate(
    config: RunConfig | Path | str,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 128,
    temperature: float | None = 0.0,
    seed: int = 0,
    system: str = "",
    observer: RunObserver | None = None,
) -> list[Completion]:
    """Continue prompts with a model that need not fit into memory.

    Args:
        config: a config, of which model, tiers, precision and the size of a step count (rows of a micro-batch are the
            prompts that are padded to one length, those of a step are the prompts at once), or an exported folder.
        prompts: turns of a chat where the model has a template, else beginnings of texts.
        max_new_tokens: of each completion.
        temperature: 0: the likeliest token each time. None: as the model's generation_config.json says.
        seed: of sampling: micro-batch m draws as transformers does after ``torch.manual_seed(seed + m)``.
        system: the message in front of each prompt.
        observer: is called with messages.

    Returns:
        A completion for each prompt, in order.

    Raises:
        ChatError: a prompt has no token, or more than the model has positions.
        DoesNotFitError: a tier is too small.
        ModelFolderError: the model is unusable.
        UnsupportedModelError: the model is unusable.
    """
    config = config if isinstance(config, RunConfig) else config_of_folder(Path(config))
    settings = ChatSettings(max_new_tokens, temperature, seed, system)
    return Generator(config, prompts, settings, observer=observer).run()


class Generator:
    """Continues prompts; see ``generate``.

    Args:
        config: of the model.
        prompts: texts, at least one.
        settings: of the completions.
        observer: is called with messages.

    Attributes:
        plan: of a batch of prompts.
        moved_bytes: link -> bytes that ``run`` moved.
        planned_bytes: link -> bytes that its passes were planned to move.
        seconds: of the passes.
    """

    def __init__(
        self,
        config: RunConfig,
        prompts: Sequence[str],
        settings: ChatSettings,
        *,
        observer: RunObserver | None = None,
    ) -> None:
        resolve_score(config)  # refuses what is no plain model
        run = forward_run(resolve(config))
        self._settings, self._prompts = settings, list(prompts)
        self._observer = observer or RunObserver()
        self._tokenizer = tokenizer_of(run.model)
        self._tokens = [self._encoded(number, prompt) for number, prompt in enumerate(self._prompts)]
        longest = max(len(tokens) for tokens in self._tokens)
        self._run = _with_prompts(run, len(self._prompts), longest + settings.max_new_tokens)
        self.plan: GenerationPlan = plan_generation(self._run)
        self._check_positions(longest)
        self._trainer = Trainer(config, observer=self._observer, plan=self.plan.plan)
        self.moved_bytes: dict[str, int] = {}
        self.planned_bytes: dict[str, int] = {}
        self.seconds = 0.0

    def _encoded(self, number: int, prompt: str) -> Tensor:
        try:
            return prompt_tokens(self._tokenizer, prompt, self._settings.system)[0]
        except ChatError as error:
            raise ChatError(f"prompt {number + 1}: {error}") from error

    def _check_positions(self, longest: int) -> None:
        most = num_learned_positions(self.plan.plan.graph)
        if most is not None and longest + self._settings.max_new_tokens > most:
            raise ChatError(
                f"the longest prompt has {longest:,} tokens; with {self._settings.max_new_tokens:,} new ones that is "
                f"more than the {most:,} positions of the model. Lower max_new_tokens, or shorten the prompt"
            )

    def run(self) -> list[Completion]:
        """Return the completions, in the order of the prompts. See ``generate`` for errors."""
        plan, batch = self.plan.plan, self._run.batch
        refuse(plan.objections)
        found: list[Completion] = []
        with self._trainer.open() as trainer:
            trainer.load()
            trainer.store.wait_idle()
            before, start_s = trainer.store.stats(), time.perf_counter()
            for first in range(0, len(self._tokens), batch.num_rows):
                together = list(range(first, min(first + batch.num_rows, len(self._tokens))))
                rows = batch.micro_batch_rows
                groups = [together[at : at + rows] for at in range(0, len(together), rows)]
                found += self._continue(trainer, groups, first // rows)
                done = f"{together[-1] + 1:,} of {len(self._tokens):,} prompts continued"
                self._observer.on_message(f"{done}, {time.perf_counter() - start_s:.1f} s")
            self.seconds = time.perf_counter() - start_s
            trainer.store.wait_idle()
            moved = trainer.store.stats() - before
        self.moved_bytes = {name: link.num_bytes for name, link in moved.links.items() if link.num_bytes}
        return found

    def _continue(self, trainer: Trainer, groups: Sequence[Sequence[int]], first_micro_batch: int) -> list[Completion]:
        """Return the completions of a batch of prompts, given as micro-batches of their numbers."""
        from transformers import DynamicCache

        plan, settings, store = self.plan.plan, self._settings, trainer.store
        graph, homes = plan.graph, plan.placement.homes
        num_new = settings.max_new_tokens
        num_passes = 0
        programs = (self.plan.first, plan.program)
        all_stays: tuple[Stays, Stays] = ({}, plan.placement.stays)
        accesses = [
            StoreAccess(store, graph, plan.trace, program, homes, stays, KernelThreads(1), activity=Activity())
            for program, stays in zip(programs, all_stays, strict=True)
        ]
        turn = _Turns(accesses)

        def on_pass(number: int) -> None:
            nonlocal num_passes
            if number:
                turn.access.end_step()
            num_passes = number + 1
            if number <= 1:  # the first pass fills the cache, the others have it
                store.set_schedule(None)
                turn.access = accesses[number]
                count = 1 if number == 0 else max(1, num_new - 1)
                schedule = programs[number].schedule(homes, count, first_step=number)
                set_schedule(store, schedule, plan.run.prefetch_bytes)
            # Of a pass that makes a token of each prompt; the first one has all of their tokens.
            each = (len(self._tokens[prompt]) if number == 0 else 1 for group in groups for prompt in group)
            turn.access.num_tokens = sum(each)
            turn.access.start_step(number)

        count = plan.num_micro_batches
        runner = GenerationRunner(graph, turn, device=plan.device, trace=plan.trace, num_micro_batches=count)
        config = graph.config.get_text_config(decoder=True)
        caches = [DynamicCache(config=config) for _ in groups]
        options = generation_options(settings, self._tokenizer, num_new)
        batches = [self._batch(group) for group in groups]
        functions = [
            _generating(graph.model, batch, cache, options) for batch, cache in zip(batches, caches, strict=True)
        ]
        seeds = [(settings.seed or 0) + first_micro_batch + number for number in range(len(groups))]
        _read_generation_config(graph.model, Path(plan.run.model.folder))
        outputs = runner.run(functions, caches, seeds, on_pass)
        turn.access.end_step()
        turn.access.finish()
        store.set_schedule(None)
        for link, nbytes in self.plan.planned_bytes(num_passes).items():
            self.planned_bytes[link] = self.planned_bytes.get(link, 0) + nbytes
        found: list[Completion] = []
        for group, batch, output in zip(groups, batches, outputs, strict=True):
            for number, row in zip(group, output[:, batch["input_ids"].shape[1] :].tolist(), strict=True):
                ids = _until_end(row, _ends_of(graph.model))
                text = self._tokenizer.decode(ids, skip_special_tokens=True)
                found.append(Completion(self._prompts[number], text, tuple(ids)))
        return found

    def _batch(self, group: Sequence[int]) -> dict[str, Tensor]:
        """Return prompts padded on the left to one length, as ``generate`` wants them."""
        own = [self._tokens[number] for number in group]
        width = max(map(len, own))
        pad = self._tokenizer.pad_token_id
        pad = self._tokenizer.eos_token_id if pad is None else pad
        ids = torch.full((len(own), width), 0 if pad is None else pad, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(own):
            ids[row, width - len(tokens) :], mask[row, width - len(tokens) :] = tokens, 1
        device = self.plan.plan.device
        return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


class _Turns:
    """The blocks of the pass that runs: those of the first one, or of the others; a ``GenerationAccess``."""

    def __init__(self, accesses: Sequence[StoreAccess]) -> None:
        self.access = accesses[0]

    def begin(self, phase: Any, visit: int) -> None:
        """Go to a visit."""
        self.access.begin(phase, visit)

    def weights(self, unit: Any, visit: int) -> Any:
        """Lease weights."""
        return self.access.weights(unit, visit)

    def skip_weights(self, unit: Any, visit: int) -> None:
        """Leave weights where they are."""
        self.access.skip_weights(unit, visit)

    def note_idle(self, visits: Sequence[int], idle: Collection[int]) -> None:
        """Note visits whose weights will be left where they are."""
        self.access.note_idle(visits, idle)

    def cache_room(self, visit: int, micro_batch: int) -> Any:
        """Lease what the cache holds."""
        return self.access.cache_room(visit, micro_batch)


def _with_prompts(run: RunSpec, num_prompts: int, max_length: int) -> RunSpec:
    """Return a run whose steps are batches of prompts: no more rows than there are, each so many tokens long."""
    rows = min(run.batch.micro_batch_rows, num_prompts)
    num_micro_batches = min(run.batch.num_micro_batches, -(-num_prompts // rows))
    batch = replace(run.batch, num_rows=rows * num_micro_batches, max_length=max_length, given_rows=rows, order="layer")
    return replace(run, batch=batch)


def _generating(model: Any, batch: Mapping[str, Tensor], cache: Any, options: Mapping[str, Any]) -> Callable[[], Any]:
    return lambda: model.generate(**batch, past_key_values=cache, **options)


def _read_generation_config(model: Any, folder: Path) -> None:
    """Give a model the generation_config.json of its folder, if there is one."""
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(folder))


def _ends_of(model: Any) -> frozenset[int]:
    ends = model.generation_config.eos_token_id
    return frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])


def _until_end(ids: list[int], ends: frozenset[int]) -> list[int]:
    """Return the tokens up to the first that ends a text, with it; what follows is padding."""
    for number, token in enumerate(ids):
        if token in ends:
            return ids[: number + 1]
    return ids
