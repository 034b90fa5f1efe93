"""Lightning strategy that trains a ``LightningModule`` from a store.

Written against Lightning 2.6 (``import lightning``). The strategy uses the ``Strategy`` interface and
``_forward_redirection``, which other strategies use in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tiered.errors import install_command

try:
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
    from lightning.pytorch.trainer.states import TrainerFn
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"Lightning cannot be imported ({error.name} is missing): {install_command('lightning')}", name=error.name
    ) from error

from megatrain.embed.block_homes import compute_device, shared_state
from megatrain.embed.integrations.lightning_files import KeptGenerations, MappedCheckpointIO, file_exists, local_path
from megatrain.embed.offload import offload
from megatrain.embed.optimizer import TieredOptimizer
from megatrain.embed.partition import OffloadError
from megatrain.embed.stores import open_store
from megatrain.embed.weights import block_of
from tiered import TieredStore

__all__ = ["TierStrategy"]


def __dir__() -> list[str]:
    """Return the public names, for tab completion."""
    return sorted(__all__)


_PRECISIONS = ("32-true", "bf16-true", "bf16-mixed")
#: Optimizers of each module's last fit. The module's parameters keep their state until the next fit.
_LAST_OPTIMIZERS: WeakKeyDictionary[nn.Module, list[TieredOptimizer]] = WeakKeyDictionary()


class TierStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """Strategy that trains from a store: ``Trainer(strategy=TierStrategy(store))``. It needs a tiered optimizer.

    During setup, the module's parameters move to the store, as with ``megatrain.offload``. Parameters that are already
    in a store and direct parameters of the ``LightningModule`` stay in place. ``gradient_clip_val`` clips by the exact
    norm in the optimizer's step. Checkpoints are ordinary ``.ckpt`` files with the weights. They name a generation of
    the store with the state, which is kept as long as the file exists.

    Args:
        store: Store for weights and state. None opens a store with the free RAM and ``default_root_dir/tiers``, which
            stays open until the program ends; ``strategy="megatrain"`` does the same.
        offload_model: False to keep the module in memory, so that the store contains only optimizer state.
        options: Options of ``megatrain.offload``.
    """

    strategy_name = "megatrain"
    _root_device: torch.device
    _checkpoint_io: Any

    def __init__(
        self,
        store: TieredStore | None = None,
        *,
        offload_model: bool = True,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **options: Any,
    ) -> None:
        device = torch.device("cpu") if store is None else compute_device(store)
        super().__init__(device, accelerator, checkpoint_io, precision_plugin)
        self._store, self._tier_model, self._options = store, offload_model, options
        self._kept: KeptGenerations | None = None
        self._clipping: list[TieredOptimizer] = []
        self._loads_late: bool | None = None
        self._strict: bool | None = None

    def connect(self, model: Any) -> None:
        """Connect the strategy to a module."""
        super().connect(model)
        self._loads_late = self._strict = None

    def setup_environment(self) -> None:
        """Check that trainer and store are compatible. Open a store if the user passed none.

        Raises:
            OffloadError: The devices differ, the precision has no master weights, or the store has no folder for state.
        """
        trainer = self.lightning_module.trainer
        if self._store is None:
            self._store = open_store(nvme=Path(trainer.default_root_dir, "tiers"), nvme_size="auto")
        _check_trainer(trainer, self.root_device, self._store)
        super().setup_environment()

    @property
    def store(self) -> TieredStore:
        """Store of weights and state. If the user passed no store, it is available after ``fit`` has started."""
        assert self._store is not None, "fit, validate, test or predict opens the store"
        return self._store

    def model_to_device(self) -> None:
        """Move the module's parameters to the store, and other tensors to the compute device."""
        model = self.lightning_module
        if self._tier_model:
            own_ids = {id(parameter) for parameter in model.parameters(recurse=False)}
            kept_names = [name for name, p in model.named_parameters() if id(p) in own_ids or block_of(p) is not None]
            if len(kept_names) < len(list(model.parameters())):
                options = {**self._options, "leave": [*self._options.get("leave", ()), *map(escape, kept_names)]}
                offload(model, self.store, **options)
        super().model_to_device()

    def setup_optimizers(self, trainer: Any) -> None:
        """Create the optimizers, after removing the state of an earlier fit's optimizers from the store.

        Raises:
            OffloadError: An optimizer cannot use gradients in the store, or belongs to an earlier fit.
        """
        old_optimizers = _LAST_OPTIMIZERS.pop(self.lightning_module, [])
        for optimizer in old_optimizers:
            optimizer.release()
        super().setup_optimizers(trainer)
        _LAST_OPTIMIZERS[self.lightning_module] = [o for o in self.optimizers if isinstance(o, TieredOptimizer)]
        _check_optimizers(trainer, self.optimizers, old_optimizers)

    def setup_precision_plugin(self) -> None:
        """Leave the clipping of gradients to the tiered optimizers, instead of the precision plugin."""
        super().setup_precision_plugin()
        plugin = self.precision_plugin
        if "clip_grad_by_norm" not in vars(plugin):
            plugin.clip_grad_by_norm = partial(self._clip_by_norm, plugin.clip_grad_by_norm)
            plugin.clip_grad_by_value = partial(_clip_by_value, plugin.clip_grad_by_value)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Create modules in RAM, because the compute device may be too small for them."""
        device, self._root_device = self._root_device, torch.device("cpu")
        try:
            with super().tensor_init_context(empty_init):
                yield
        finally:
            self._root_device = device

    def teardown(self) -> None:
        """Tear down without moving the module or the optimizers out of the store, so that they stay usable."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step as its forward, so that the step can use weights outside of their modules.

        With manual optimization, the step is not run as a forward, because it would change weights in use.
        """
        if not self.lightning_module.automatic_optimization:
            return super().training_step(*args, **kwargs)
        with self.precision_plugin.train_step_context():
            return self._run_as_forward("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step as its forward."""
        with self.precision_plugin.val_step_context():
            return self._run_as_forward("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step as its forward."""
        with self.precision_plugin.test_step_context():
            return self._run_as_forward("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step as its forward."""
        with self.precision_plugin.predict_step_context():
            return self._run_as_forward("predict_step", *args, **kwargs)

    def _run_as_forward(self, name: str, *args: Any, **kwargs: Any) -> Any:
        model = self.lightning_module
        return self._forward_redirection(model, model, name, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Step with the trainer's clipping, which applies only to this step."""
        try:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            while self._clipping:
                self._clipping.pop().max_grad_norm = 0.0

    def _clip_by_norm(self, clip: Any, optimizer: Any, clip_val: float) -> None:
        optimizer = _unwrap(optimizer)
        if not isinstance(optimizer, TieredOptimizer):
            clip(optimizer, clip_val)
        elif optimizer.max_grad_norm == 0:
            optimizer.max_grad_norm = float(clip_val)
            self._clipping.append(optimizer)
        elif optimizer.max_grad_norm != clip_val:
            raise OffloadError(
                f"gradient_clip_val={clip_val} differs from {type(optimizer).__name__}(max_grad_norm="
                f"{optimizer.max_grad_norm}). Set only one of them"
            )

    @property
    def checkpoint_io(self) -> Any:
        """Checkpoint IO that the user passed, or a ``MappedCheckpointIO``."""
        if self._checkpoint_io is None:
            self._checkpoint_io = MappedCheckpointIO()
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io = io

    def optimizer_state(self, optimizer: Any) -> dict[str, Tensor]:
        """Return the state of an optimizer. For a tiered optimizer, it is a small record that names a generation."""
        optimizer = _unwrap(optimizer)
        if isinstance(optimizer, TieredOptimizer):
            shared = shared_state(optimizer.store)
            # The file may be loaded after more steps, so even the state before the first step needs a generation.
            if not shared.num_changes:
                shared.note_change()
            self._get_kept_generations()
        return cast("dict[str, Tensor]", super().optimizer_state(optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint file, and keep the generation that it names until the file is deleted."""
        record = self._get_kept_generations()
        if record is not None:
            path = local_path(filepath)
            for state in checkpoint.get("optimizer_states", ()):
                generation = state.get("tiered", {}).get("generation")
                if generation is not None:
                    record.note(str(filepath) if path is None else str(path.absolute()), generation)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _get_kept_generations(self) -> KeptGenerations | None:
        if self._kept is None and self.store.path is not None:
            self._kept = KeptGenerations(self.store.path, file_exists)
            self.store.keep_also(self._kept.numbers)
        return self._kept

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether to restore checkpoints after setup: True if weights are on the meta device before setup."""
        if self._loads_late is None:
            self._loads_late = any(parameter.is_meta for parameter in self.lightning_module.parameters())
        return self._loads_late

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights. If optimizer state will also be loaded, load them after it: its generation contains weights.

        Weights that a hook changed in ``checkpoint`` take precedence over the weights of the generation.
        """
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING and "optimizer_states" in checkpoint:
            self._strict = strict
        else:
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the generation that a checkpoint names, or the state of torch's equivalent optimizer."""
        self._get_kept_generations()
        super().load_optimizer_state_dict(checkpoint)
        if self._strict is not None:
            super().load_model_state_dict(checkpoint, self._strict)
            self._strict = None


StrategyRegistry.register(
    TierStrategy.strategy_name, TierStrategy, description="A tiered store of RAM and drives", override=True
)


def _unwrap(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _clip_by_value(clip: Any, optimizer: Any, clip_val: float) -> None:
    optimizer = _unwrap(optimizer)
    if isinstance(optimizer, TieredOptimizer):
        _refuse_clipping_by_value()
    clip(optimizer, clip_val)


def _refuse_clipping_by_value() -> None:
    raise OffloadError(
        'gradient_clip_algorithm="value": the tiered optimizers can only clip by norm. Leave it out, or pass "norm"'
    )


def _check_trainer(trainer: Any, device: torch.device, store: TieredStore) -> None:
    precision = trainer.precision_plugin.precision
    if precision not in _PRECISIONS:
        raise OffloadError(f'precision="{precision}": an offloaded module needs one of {", ".join(_PRECISIONS)}')
    accelerator = type(trainer.accelerator).__name__
    if accelerator != f"{device.type.upper()}Accelerator":
        raise OffloadError(
            f"the store computes on {device.type}, but the trainer has a {accelerator}. "
            'Use Trainer(accelerator="cpu"), or open_store(gpu="auto") for a CUDA device'
        )
    saves_state = any(not getattr(callback, "save_weights_only", False) for callback in trainer.checkpoint_callbacks)
    if trainer.state.fn == TrainerFn.FITTING and saves_state and store.path is None:
        raise OffloadError(
            "the trainer saves checkpoints, but the store has no folder for state. Use open_store(path=...), "
            "open_store(nvme=...), or Trainer(enable_checkpointing=False)"
        )


def _check_optimizers(trainer: Any, optimizers: list[Any], old_optimizers: list[TieredOptimizer]) -> None:
    for optimizer in optimizers:
        if any(optimizer is old for old in old_optimizers):
            raise OffloadError("configure_optimizers returned the optimizer of the last fit. Create a new one there")
        if isinstance(optimizer, TieredOptimizer):
            if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
                _refuse_clipping_by_value()
            continue
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if (block := block_of(parameter)) is not None:
                raise OffloadError(
                    f"configure_optimizers returned {type(optimizer).__name__} for {block.name_of(parameter)}, whose "
                    "gradient is in the store. Return megatrain.TieredAdamW(self.parameters(), ...)"
                )
