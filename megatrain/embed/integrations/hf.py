"""Mixin and callback for Hugging Face's ``Trainer`` and trainers based on it, such as TRL's ``SFTTrainer``.

Written against transformers 5. The mixin uses ``get_optimizer_cls_and_kwargs``, the trainer's ``accelerator``, and one
private method, ``_load_from_checkpoint``. Without this method, resuming needs more memory but works.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from megatrain.embed.block_homes import shared_state
from megatrain.embed.integrations.vllm import follow
from megatrain.embed.offloaded_module import offloaded_module
from megatrain.embed.optimizer import TieredOptimizer
from megatrain.embed.partition import OffloadError
from megatrain.embed.update_rules import TieredAdafactor, TieredAdamW, TieredLion, TieredSGD
from megatrain.models.internals import check_internals
from tiered import TieredStore

__all__ = ["RECORD_NAME", "TierCallback", "TierTrainerMixin", "offloaded"]


def __dir__() -> list[str]:
    """Return the public names, for tab completion."""
    return sorted(__all__)


#: File in a trainer's checkpoint that names the store and generation of the optimizer's state.
RECORD_NAME = "tiered.json"


def offloaded(trainer: type[Any]) -> type[Any]:
    """Return a trainer's class with ``TierTrainerMixin``: ``SFTTrainer = megatrain.hf.offloaded(SFTTrainer)``.

    Raises:
        TransformersVersionError: The installed transformers version lacks a required function.
    """
    check_internals(with_trainer=True)
    return type(f"Offloaded{trainer.__name__}", (TierTrainerMixin, trainer), {"__module__": trainer.__module__})


class TierTrainerMixin:
    """Mixin, listed before a trainer's class: ``class MyTrainer(TierTrainerMixin, SFTTrainer): pass``.

    The training arguments (``optim``, ``learning_rate``, betas, decay, ``max_grad_norm``) select and configure a tiered
    optimizer, with the trainer's parameter groups and clipping by the exact norm. Checkpoints name a generation of the
    store, which is kept as long as the checkpoint's folder exists. Resuming restores weights and state from it.

    For peft's adapters, either pass ``peft_config`` and ``store`` with an ordinary model, or create the adapters first
    (``get_peft_model``) and offload the result.

    Args:
        store: Store of the optimizer's state for an ordinary model. An offloaded model already has a store.
        optimizer_options: Other options of the optimizer, such as ``{"offload_gradients": True}``.
    """

    optimizer: Any
    args: Any
    model: Any
    accelerator: Any

    def __init__(
        self,
        *positional: Any,
        store: TieredStore | None = None,
        optimizer_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._store, self._tier_options = store, dict(optimizer_options or {})
        if options.get("peft_config") is not None:
            _check_adapters_come_first(options.get("model", positional[0] if positional else None))
        super().__init__(*positional, **options)
        self._store = _store_of(self.model) or store
        if self._store is None:
            raise OffloadError(
                "the model is not offloaded. First call megatrain.offload(model, store), or pass store=..."
            )
        self.add_callback(TierCallback(self._store))  # type: ignore[attr-defined]
        if (engine := getattr(self, "vllm_generation", None)) is not None and _store_of(self.model) is not None:
            follow(engine, self.model, self._store)
        self._accelerator_clip = self.accelerator.clip_grad_norm_
        self.accelerator.clip_grad_norm_ = self._measure_norm

    def get_optimizer_cls_and_kwargs(
        self, args: Any, model: Any = None
    ) -> tuple[type[TieredOptimizer], dict[str, Any]]:
        """Return the class and arguments of the tiered optimizer for ``args.optim``.

        Raises:
            ValueError: No tiered optimizer corresponds to ``args.optim``.
        """
        options = {"store": self._store, "max_grad_norm": args.max_grad_norm or 0.0, **self._tier_options}
        adam = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2)}
        name = str(getattr(args.optim, "value", args.optim))
        if name in ("adamw_torch", "adamw_torch_fused"):
            return TieredAdamW, {**adam, "eps": args.adam_epsilon, **options}
        if name in ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"):
            return TieredAdamW, {**adam, "eps": args.adam_epsilon, "state_dtype": "int8", **options}
        if name in ("lion_32bit", "lion"):
            return TieredLion, {**adam, **options}
        if name in ("lion_8bit", "paged_lion_8bit"):
            return TieredLion, {**adam, "state_dtype": "int8", **options}
        if name == "sgd":
            return TieredSGD, {"lr": args.learning_rate, **options}
        if name == "adafactor":
            return TieredAdafactor, {"lr": args.learning_rate, **options}
        raise ValueError(
            f'optim="{name}" has no tiered optimizer. Use adamw_torch, adamw_8bit, lion_32bit, lion_8bit, sgd or '
            "adafactor"
        )

    def _measure_norm(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Return the norm of the gradients, which the optimizer uses for clipping in the next step."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate wraps the optimizer
        if not isinstance(optimizer, TieredOptimizer):
            return self._accelerator_clip(parameters, max_norm, norm_type=norm_type)
        if norm_type != 2:
            raise ValueError(f"norm_type={norm_type}: the tiered optimizers can only clip by the 2-norm")
        return torch.tensor(optimizer.measure_grad_norm())

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load weights, except weights in a generation, which the optimizer loads together with its state."""
        has_state = os.path.isfile(os.path.join(resume_from_checkpoint, "optimizer.pt"))
        if model is None and has_state and _read_record(Path(resume_from_checkpoint)) and _store_of(self.model):
            return
        super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]


class TierCallback(TrainerCallback):  # type: ignore[misc]
    """Callback that keeps generations of a store as long as a checkpoint folder in ``output_dir`` names them.

    ``TierTrainerMixin`` adds this callback. Without the mixin, pass it to the ``Trainer``.
    """

    def __init__(self, store: TieredStore) -> None:
        self._store = store

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start keeping the generations that checkpoints name."""
        output_dir = Path(args.output_dir)
        self._store.keep_also(lambda: list(_kept_generations(output_dir, self._store.path)))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the generation that ``optimizer.state_dict()`` committed for the new checkpoint."""
        folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        _, generation = shared_state(self._store).last_commit
        if folder.is_dir() and generation is not None:
            record = {"store": self._store.path, "generation": generation}
            (folder / RECORD_NAME).write_text(json.dumps(record) + "\n", encoding="utf-8")

    def on_train_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Apply the deferred updates."""
        if model is not None and (module := offloaded_module(model)) is not None:
            module.finish_updates()


def _check_adapters_come_first(model: Any) -> None:
    """Raise an error for new adapters of an offloaded model, because peft's new layers would not be in the store."""
    if offloaded_module(model) is not None:
        raise OffloadError(
            "peft_config with an offloaded model: create the adapters first. Use model = peft.get_peft_model(model, "
            "peft_config), then megatrain.offload(model, store), and leave peft_config out. Or pass the ordinary model "
            "with peft_config and store=store"
        )


def _kept_generations(output_dir: Path, store_path: str | None) -> Iterator[int]:
    """Yield the generations of a store to which the checkpoints in an output folder refer."""
    for folder in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        record = _read_record(folder)
        if record is not None and record.get("store") == store_path:
            yield int(record["generation"])


def _read_record(folder: Path) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads((folder / RECORD_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record


def _store_of(model: Any) -> TieredStore | None:
    module = offloaded_module(model)
    return None if module is None else module.store
