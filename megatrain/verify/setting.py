"""The configs of a proof: a user's config with a small copy of its model, a little text and a few steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatrain.api import (
    DoesNotFitError,
    ModelFolder,
    OptimizerConfig,
    SmallModel,
    plan_run,
    read_config,
    resolve,
    resolve_compute_dtype,
    resolve_device,
    resolve_model,
    write_small_model,
)
from megatrain.config.schema import RunConfig
from megatrain.engine.program import KINDS
from megatrain.models.small import default_config, kept_patterns

__all__ = ["Setting", "dtypes_of", "gradient_optimizer", "make_config", "make_setting", "optimizer_of"]

ROWS, MICRO_BATCHES, LENGTH = 2, 3, 64
_AMPLE = "auto"
#: Learning rates at which a few steps change the weights visibly.
_RATES = {"adamw": 1e-3, "lion": 1e-4, "sgd": 1e-2, "adafactor": 1e-3, "muon": 1e-3, "custom": 1e-3}
#: A power of two: a step of plain SGD at this rate leaves the gradient in the weights without rounding it again.
GRADIENT_RATE = 1024.0


@dataclass(frozen=True, slots=True)
class Setting:
    """What all runs of one proof share.

    Attributes:
        given: the user's config, or defaults.
        model: the scaled-down copy.
        folder: for what the runs write.
        attention: implementation.
        device: "cpu" or "cuda".
        origin: name of what was copied, "" for the default.
        freeze: globs that the copy knows.
    """

    given: RunConfig
    model: SmallModel
    folder: Path
    attention: str
    device: str
    origin: str = ""
    freeze: Sequence[str] = ()


def make_config(
    setting: Setting,
    name: str,
    optimizer: OptimizerConfig,
    *,
    num_steps: int,
    compute_dtype: str = "float32",
    grad_dtype: str = "float32",
    drives: Sequence[Path] = (),
) -> RunConfig:
    """Return the config of one run.

    Args:
        name: what its folder is called.
        drives: folders for everything there is, with as little RAM as works; none: all in RAM.
    """
    given = setting.given
    values: dict[str, Any] = {
        "task": "pretrain",
        "output_dir": str(setting.folder / name),
        "seed": given.seed,
        "data_seed": given.data_seed,
        "device": setting.device,
        "model": {
            "model_name_or_path": str(setting.model.folder),
            "tokenizer_name_or_path": str(setting.model.tokenizer),
            "attn_implementation": setting.attention,
            "use_liger_kernel": False,  # plain training has none
            "freeze": tuple(setting.freeze),
        },
        "precision": {"compute_dtype": compute_dtype, "grad_dtype": grad_dtype},
        "data": {
            "max_length": LENGTH,
            **given.data.model_dump(include={"packing"}, exclude_unset=True),
            "cache_dir": "none",
            "train": [{"path": str(setting.model.text), "format": "text"}],
        },
        "training": {
            "per_device_train_batch_size": ROWS,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "max_steps": num_steps,
        },
        "optimizer": optimizer,
        "checkpoint": {"save_steps": 10**9, "min_free_disk": "0B", "save_on_signal": False},
        "export": {"dtype": "float32"},
        "logging": {"report_to": "none", "progress": "none"},
        "tiers": {
            "ram": {"size": _AMPLE},
            "on_disk_full": "error",
            "allow_tmpfs": True,  # the folders of a proof are gone at its end anyway
            "engine": given.tiers.engine,
            "direct": "off" if given.tiers.direct == "off" else "auto",  # one of the two runs has no drives
            "verify": given.tiers.verify,
        },
        "advanced": given.advanced.model_copy(update={"emulate_gpu": False}),  # all in RAM, against all on drives
    }
    if drives:
        values["placement"] = {kind: ("nvme",) for kind in KINDS}
        values["tiers"]["nvme"] = [{"path": str(path), "size": _AMPLE} for path in drives]
        return _with_little_ram(values)
    return RunConfig.model_validate(values)


def _with_little_ram(values: dict[str, Any]) -> RunConfig:
    """Return the config with the smallest RAM tier that the plan accepts, so that copies must come and go."""
    values["tiers"]["ram"] = {"size": "4KiB"}
    for _ in range(8):  # what a plan needs may grow with its workspace, once
        config = RunConfig.model_validate(values)
        try:
            plan_run(resolve(config), names_ways_out=False)
        except DoesNotFitError as error:
            if error.tier != "ram":
                raise
            values["tiers"]["ram"] = {"size": f"{error.need_bytes}B"}
        else:
            return config
    return RunConfig.model_validate({**values, "tiers": {**values["tiers"], "ram": {"size": _AMPLE}}})


def make_setting(config: RunConfig | None, folder: Path) -> Setting:
    given = config or _no_config()
    attention = given.model.attn_implementation
    if attention == "flash_attention_2":
        attention = "sdpa"  # it knows no fp32, in which the comparison with plain training is exact
    original = default_config() if config is None else read_config(resolve_model(given).folder)
    model = write_small_model(original, folder, attn_implementation=attention, seed=given.seed)
    return Setting(
        given=given,
        model=model,
        folder=folder,
        attention=attention,
        device=resolve_device(given.device).type,
        origin="" if config is None else Path(given.model.model_name_or_path).name,
        freeze=kept_patterns(given.model.freeze, list(ModelFolder(model.folder).records)),
    )


def _no_config() -> RunConfig:
    """Return defaults, for who names no config."""
    nothing = {"task": "pretrain", "output_dir": "run", "model": {"model_name_or_path": "model"}}
    return RunConfig.model_validate({**nothing, "data": {"train": [{"path": "text"}]}})


def _constant(rate: float) -> dict[str, Any]:
    return {"learning_rate": rate, "lr_scheduler_type": "constant", "lr_scheduler_kwargs": {}, "warmup_steps": 0.0}


def optimizer_of(setting: Setting) -> OptimizerConfig:
    """Return the optimizer of the user's config with a constant rate at which a few steps show something."""
    table = setting.given.optimizer
    names = list(ModelFolder(setting.model.folder).records)
    groups = [
        group.model_copy(update={"params": tuple(kept), "learning_rate": None, "lr_mult": None})
        for group in table.groups
        if (kept := kept_patterns(group.params, names))
    ]
    changes = {**_constant(_RATES[table.optim]), "groups": tuple(groups), "nonfinite": "stop", "state_dtype": "float32"}
    changes["layer_decay"] = 1.0
    if table.optim in ("muon", "custom"):  # the engine is what is proven; muon beside torch's is a test of the package
        changes["optim"] = "adamw"
    return table.model_copy(update=changes)


def dtypes_of(setting: Setting) -> tuple[str, str]:
    """Return compute and gradient dtype of the user's config, "auto" resolved."""
    dtype = resolve_compute_dtype(setting.given.precision.compute_dtype, torch.device(setting.device))
    return str(dtype).removeprefix("torch."), setting.given.precision.grad_dtype


def gradient_optimizer() -> OptimizerConfig:
    """Return an update from which the gradient can be read: the weights before it less those after."""
    reader = {"optim": "sgd", "sgd_momentum": 0.0, "weight_decay": 0.0, "max_grad_norm": 0.0}
    return OptimizerConfig.model_validate({**reader, **_constant(GRADIENT_RATE)})
