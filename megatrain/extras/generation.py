"""Text generation for many prompts at once with a model of any size. All prompts of a batch share each weight fetch.

The weights are frozen and are read as in ``scoring``. The KV cache is stored in blocks of the store. The tokens are the
same as with transformers' ``generate`` (see ``engine/generate.py``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.base.errors import ConfigError
from megatrain.base.names import CHECKPOINTS_NAME, RESOLVED_NAME, find_source_run, trained_model
from megatrain.base.observer import RunObserver
from megatrain.config.combinations import find_generation_problems
from megatrain.config.resolved import load_run_config, with_values
from megatrain.config.schema import RunConfig
from megatrain.converters.adapters import find_base_model
from megatrain.engine.table import TrainingConfig
from megatrain.models.folder import ADAPTER_CONFIG
from megatrain.models.graph import num_learned_positions
from megatrain.plan.forward import check_weights, forward_run, plan_generation, with_prompts
from megatrain.plan.limits import refuse
from megatrain.tasks.continuation import Continuation
from megatrain.tasks.prompts import GenerationSettings, PromptError, prompt_tokens
from megatrain.training.open_run import open_run
from megatrain.training.resolve import resolve
from megatrain.training.rows import tokenizer_of

if TYPE_CHECKING:
    from torch import Tensor

    from megatrain.plan.forward import GenerationPlan

__all__ = ["Completion", "Generator", "config_for_prompts", "config_of_folder", "generate", "tables_of_folder"]


#: Keys of ``[model]`` that determine a run's model and how it computes.
_MODEL_KEYS = ("model_name_or_path", "revision", "tokenizer_name_or_path", "attn_implementation", "split_experts")


@dataclass(frozen=True, slots=True)
class Completion:
    """The completion of one prompt.

    Attributes:
        completion: Text without special tokens.
        token_ids: Tokens of the text, including the end-of-text token.
    """

    prompt: str
    completion: str
    token_ids: tuple[int, ...]


def config_of_folder(folder: Path, **tables: Any) -> RunConfig:
    """Return a config for generation with the model in a folder.

    Args:
        folder: Folder of a model, of an adapter, or of the run that wrote one of them.
        tables: Further tables of the config, such as ``tiers``.

    Raises:
        AdapterError: The folder contains an adapter that names no base model.
    """
    values = {
        "task": "sft",
        "output_dir": str(folder.absolute() / "generate"),
        "data": {"train": [{"path": "prompts"}]},  # required by the schema, but never read
    }
    return RunConfig.model_validate({**values, **tables_of_folder(folder), **tables})


def tables_of_folder(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the config tables for the model in a folder. For an adapter, they contain its base model and the adapter.

    Args:
        folder: Folder of a model, of an adapter, or of the run that wrote one of them. For a run's adapter, model,
            revision, attention and precision come from the run's config. Other adapters name their base model.

    Raises:
        AdapterError: The folder contains an adapter that names no base model.
        ConfigError: The config of the run cannot be read.
        PromptError: The folder contains no model.
    """
    folder = trained_model(folder).absolute()
    if not any((folder / name).is_file() for name in (ADAPTER_CONFIG, "config.json")):
        if (folder / CHECKPOINTS_NAME).is_dir():
            raise PromptError(
                f"{folder}: this run has no model yet. Write one with megatrain-tier export {folder} OUT, and pass OUT"
            )
        raise PromptError(f"{folder} contains no model (no config.json). Pass a folder that an export wrote")
    if not (folder / ADAPTER_CONFIG).is_file() or (folder / "config.json").is_file():
        return {"model": {"model_name_or_path": str(folder)}}
    model: dict[str, Any] = {}
    tables = {"model": model, "lora": {"adapter_name_or_path": str(folder)}}
    run = find_source_run(folder)
    if run is not None and (run / RESOLVED_NAME).is_file():
        include: Any = {"model": set(_MODEL_KEYS), "precision": {"compute_dtype"}}
        values = load_run_config(run).model_dump(mode="json", include=include, exclude_none=True)
        model.update({name: value for name, value in values["model"].items() if value != ""})
        tables["precision"] = values["precision"]
    else:
        model["model_name_or_path"] = find_base_model(folder)
    if (folder / "tokenizer.json").is_file():
        model["tokenizer_name_or_path"] = str(folder)
    return tables


def config_for_prompts(config: RunConfig, rows: int, num_prompts: int) -> RunConfig:
    """Return a config whose steps process prompts instead of training rows.

    Args:
        rows: Number of prompts in a micro-batch. They are padded to the same length.
        num_prompts: Number of prompts that share each fetch of a weight.
    """
    step = TrainingConfig(per_device_train_batch_size=rows, gradient_accumulation_steps=-(-num_prompts // rows))
    return with_values(config, {"data.packing": False}).model_copy(update={"task": "sft", "training": step})


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
    """Complete prompts with a model that need not fit in memory.

    Args:
        config: A config, of which only model, tiers, precision and step size are used; or the folder of a model, of an
            adapter (its base model is loaded too), or of a run. A micro-batch consists of prompts that are padded to
            the same length, a step of prompts that share each fetch of a weight.
        prompts: User messages if the model has a chat template, otherwise beginnings of texts.
        max_new_tokens: Maximum number of new tokens per completion.
        temperature: 0 for the most likely token, None for the value in the model's generation_config.json.
        seed: Seed of sampling. Micro-batch m samples like transformers after ``torch.manual_seed(seed + m)``.
        system: System message before each prompt.
        observer: Observer that receives messages.

    Returns:
        A completion for each prompt, in order.

    Raises:
        PromptError: A prompt is empty, or exceeds the model's positions.
        ConfigError: The config is unsuitable for generation, or has random weights.
        DoesNotFitError: A tier is too small.
        ModelFolderError: The model folder cannot be read.
        UnsupportedModelError: The model is not supported.
    """
    config = config if isinstance(config, RunConfig) else config_of_folder(Path(config))
    settings = GenerationSettings(max_new_tokens, temperature, seed, system)
    return Generator(config, prompts, settings, observer=observer).run()


class Generator:
    """Generator of completions; see ``generate``.

    Args:
        config: Model and tiers.
        prompts: At least one prompt.
        settings: Options of generation.
        observer: Observer that receives messages.
        history: Messages of the conversation before each prompt; ignored if the model has no chat template.

    Attributes:
        plan: Plan of the passes for a batch of prompts.
        moved_bytes: Bytes that ``run`` moved, by link.
        planned_bytes: Bytes that the plan expects ``run`` to move, by link.
        seconds: Time of the passes.
    """

    def __init__(
        self,
        config: RunConfig,
        prompts: Sequence[str],
        settings: GenerationSettings,
        *,
        observer: RunObserver | None = None,
        history: Sequence[dict[str, str]] = (),
    ) -> None:
        if problems := list(find_generation_problems(config)):
            raise ConfigError("the config", problems)
        run = forward_run(resolve(config))
        self._settings, self._prompts, self._history = settings, list(prompts), list(history)
        self._observer = observer or RunObserver()
        self._tokenizer = tokenizer_of(run.model)
        self._tokens = [self._encode(index, prompt) for index, prompt in enumerate(self._prompts)]
        longest_prompt = max(len(tokens) for tokens in self._tokens)
        rows = min(run.batch.micro_batch_rows, len(self._prompts))
        num_prompts = min(rows * run.batch.num_micro_batches, len(self._prompts))
        self._run = with_prompts(run, rows, num_prompts, longest_prompt + settings.max_new_tokens)
        self.plan: GenerationPlan = plan_generation(self._run)
        self._check_positions(longest_prompt)
        self.moved_bytes: dict[str, int] = {}
        self.planned_bytes: dict[str, int] = {}
        self.seconds = 0.0

    def _encode(self, index: int, prompt: str) -> Tensor:
        try:
            return prompt_tokens(self._tokenizer, prompt, self._settings.system, self._history)[0]
        except PromptError as error:
            raise PromptError(f"prompt {index + 1}: {error}") from error

    def _check_positions(self, longest_prompt: int) -> None:
        max_positions = num_learned_positions(self.plan.plan.graph)
        if max_positions is not None and longest_prompt + self._settings.max_new_tokens > max_positions:
            raise PromptError(
                f"the longest prompt ({longest_prompt:,} tokens) and {self._settings.max_new_tokens:,} new tokens need "
                f"more than the {max_positions:,} positions of the model. Lower max_new_tokens, or shorten the prompt"
            )

    def run(self) -> list[Completion]:
        """Return the completions, in the order of the prompts. See ``generate`` for errors."""
        plan, batch = self.plan.plan, self._run.batch
        check_weights(plan.run)
        refuse(plan.objections)
        completions: list[Completion] = []
        with open_run(plan, on_message=self._observer.on_message) as runtime:
            runtime.load()
            store = runtime.store
            store.wait_idle()
            passes = Continuation(self.plan, store, self._tokenizer, self._settings)
            start_stats, start_s = store.stats(), time.perf_counter()
            for start in range(0, len(self._tokens), batch.num_rows):
                token_batch = self._tokens[start : start + batch.num_rows]
                for prompt, ids in zip(
                    self._prompts[start:], passes.run(token_batch, start // batch.micro_batch_rows), strict=False
                ):
                    text = self._tokenizer.decode(ids, skip_special_tokens=True)
                    completions.append(Completion(prompt, text, ids))
                progress = f"{len(completions):,} of {len(self._tokens):,} prompts completed"
                self._observer.on_message(f"{progress}, {time.perf_counter() - start_s:.1f} s")
            self.seconds = time.perf_counter() - start_s
            store.wait_idle()
            traffic = store.stats() - start_stats
        self.planned_bytes = passes.planned_bytes
        self.moved_bytes = {name: link.num_bytes for name, link in traffic.links.items() if link.num_bytes}
        return completions
