"""Converts a row of levels to the config of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pairs.factors import PREFERENCES, Row
from pairs.places import LENGTH, Place

NUM_STEPS, NUM_MICRO_BATCHES, MICRO_BATCH_ROWS = 4, 4, 2
ROWS_PER_STEP = NUM_MICRO_BATCHES * MICRO_BATCH_ROWS
LEARNING_RATE = 1e-3
WORLDS = {"alone": (1, 1), "2ranks": (2, 1), "2hosts": (2, 2)}
#: Size of a tier in which everything fits, and a size that ``runs`` enlarges to the planned minimum.
AMPLE, LEAST = "64MiB", "4KiB"
ON_A_GPU = ("cuda", "one_memory")
#: Folder of the object tier (next to the config), and size of the drive between RAM and the object tier.
OBJECTS_FOLDER, OBJECTS_DRIVE = "objects", "2MiB"
#: Steps at which the config sets the stream's weight again. Each of these steps begins with a new window.
WINDOW_STARTS = (2, 4)
LAYER_DECAY = 0.5
_KINDS = ("weights", "gradients", "optimizer", "activations")
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"optim": "adamw"},
    "adamw_bf16": {"optim": "adamw", "state_dtype": "bfloat16"},
    "adamw_int8": {"optim": "adamw", "state_dtype": "int8"},
    "lion_int8": {"optim": "lion", "state_dtype": "int8"},
    "sgd": {"optim": "sgd"},
    "adafactor": {"optim": "adafactor"},
    "muon": {"optim": "muon"},
}
_CLIPS: dict[str, dict[str, Any]] = {
    "global": {"max_grad_norm": 0.5},
    "layer": {"max_grad_norm": 0.5, "clip_scope": "layer"},
    "none": {"max_grad_norm": 0.0},
}
_RECOMPUTES = {"full": "full", "none": "none:1", "selective": "selective:2"}
_PACKING = {"rows": False, "packed": True, "concat": "concat"}
_TARGETS = {"gpt2": ["c_attn", "c_proj"], "zamba2": ["q_proj", "out_proj"]}

Config = dict[str, Any]


def plain_of(row: Row) -> dict[str, str]:
    """Return the plain row that must have bit-identical results: one process, one memory, full recompute, not saved.

    The cut of the model is unchanged, because it determines the order of sums.
    """
    size, _ = WORLDS[row["ranks"]]
    lanes = f"{size}lanes" if row["lanes"] == "open" and size > 1 else row["lanes"]
    placement = "cuda" if row["placement"] in ON_A_GPU else "ram"  # a GPU and a CPU add in different orders
    where = {"placement": placement, "recompute": "full", "ranks": "alone", "order": "by_layer"}
    return {**row, **where, "lanes": lanes, "checkpoints": "unsaved"}


def config_of(row: Row, place: Place, folder: Path, *, is_plain: bool = False) -> Config:
    """Return the config tables of a run."""
    train, held_out = place.data(row["task"], images=row["images"] != "text")
    is_preference = row["task"] in PREFERENCES
    config: Config = {
        "task": "dpo" if is_preference else row["task"],
        "output_dir": str(folder / "out"),
        "device": "cuda" if row["placement"] in ON_A_GPU else "cpu",
        "seed": 3,
        "model": {"model_name_or_path": str(place.model(row["model"], row["base"], row["task"]))},
        "precision": {
            "compute_dtype": "float32" if row["precision"] == "fp32" else "bfloat16",
            "grad_dtype": "bfloat16" if row["precision"] == "bf16_gradients" else "float32",
        },
        "data": {
            "max_length": LENGTH,
            "packing": _PACKING[row["packing"]],
            "cache_dir": "none",
            "overlong": "error",
            "bad_rows": "error",
            "train": [{"path": str(train)}],
        },
        "training": {
            "per_device_train_batch_size": MICRO_BATCH_ROWS,
            "gradient_accumulation_steps": NUM_MICRO_BATCHES,
            "max_steps": NUM_STEPS,
        },
        # The learning rate of the first step is 0, so the first two losses use the initial weights.
        "optimizer": {
            "learning_rate": LEARNING_RATE,
            "lr_scheduler_type": "constant_with_warmup",
            "warmup_steps": 1,
            **_OPTIMIZERS[row["optimizer"]],
            **_CLIPS[row["clip"]],
        },
        "export": {"dtype": "float32"},
        "checkpoint": {"min_free_disk": "0MiB", "save_steps": 2, "save_strategy": "steps"},
        "logging": {"progress": "none"},
        "tiers": {"ram": {"size": AMPLE}},
        "advanced": {},
    }
    if row["lanes"] != "open":
        config["training"]["gradient_lanes"] = int(row["lanes"][0])
    if is_preference:
        config["preference"] = {"loss_type": "sigmoid" if row["task"] == "dpo" else row["task"]}
    if row["task"] == "distill":
        config["distill"] = {"scores": str(folder.parent / "scores" / "scores"), "temperature": 2.0, "alpha": 0.25}
    if row["adapters"] != "full":
        targets = _TARGETS.get(row["model"], ["q_proj", "v_proj"])
        config["lora"] = {"r": 4, "target_modules": targets, "use_dora": row["adapters"] == "dora"}
    if row["images"] != "text":
        config["model"]["images"] = row["images"]
    if row["reading"] == "streamed":
        config["data"]["streaming"] = True
        config["data"]["train"][0]["weight_from_step"] = {str(step): 1.0 for step in WINDOW_STARTS}
    if row["layers"] == "compiled":
        config["model"] |= {"compile": True, "compile_backend": "eager"}  # other backends take minutes
    if row["kernels"] == "liger":
        config["model"]["use_liger_kernel"] = True
    if row["rates"] == "layer_decay":
        config["optimizer"]["layer_decay"] = LAYER_DECAY
    if row["checkpoints"] == "unsaved":
        config["checkpoint"]["save_strategy"] = "no"
    if row["checkpoints"] == "copied":
        config["checkpoint"]["save_copy"] = True
    if row["checkpoints"] == "away":
        config["checkpoint"]["save_copy"] = f"file://{folder}/away"
    _cut(config, row)
    _place(config, row, folder)
    _evaluate(config, row, held_out)
    return keep_all_blocks_on_device(config) if is_plain else config


def _cut(config: Config, row: Row) -> None:
    if row["cut"] == "experts":
        config["model"]["split_experts"] = True
    elif row["cut"] == "mlp_rows":
        config["model"]["mlp_rows"] = 40
    advanced = config["advanced"]
    config["training"]["recompute"] = _RECOMPUTES[row["recompute"]]
    if row["order"] == "by_micro_batch":
        advanced["micro_batch_order"] = "micro_batch"


def _place(config: Config, row: Row, folder: Path) -> None:
    tiers, where = config["tiers"], row["placement"]
    if where in ("least", "drive", "objects", *ON_A_GPU):
        # With several hosts, the same path leads to a different drive on each host.
        own = Path("/proc/self/cwd") if WORLDS[row["ranks"]][1] > 1 else folder
        tiers["nvme"] = [{"path": str(own / "drive"), "size": "200MiB"}]
    if where in ("least", "objects"):
        tiers["ram"]["size"] = LEAST
    if where == "objects":  # takes blocks that do not fit on the drive; see ``runs.train_here``
        tiers["nvme"][0]["size"] = OBJECTS_DRIVE
        (folder / OBJECTS_FOLDER).mkdir(exist_ok=True)
    elif where == "drive":
        config["placement"] = {kind: ["nvme"] for kind in _KINDS}
    elif where == "emulated":
        tiers["gpu"] = {"size": LEAST}
        config["advanced"]["emulate_gpu"] = True
    elif where == "one_memory":  # without a GPU tier; see ``runs.train_here``
        tiers["ram"]["size"] = LEAST
        config["placement"] = {"optimizer": ["nvme"]}
    elif where == "cuda":
        tiers["gpu"] = {"size": LEAST}
        config["placement"] = {"optimizer": ["nvme"]}


def _evaluate(config: Config, row: Row, held_out: Path) -> None:
    if row["average"] == "averaged":
        config["optimizer"]["ema_decay"] = 0.5
    if row["evaluation"] == "blind":
        return
    config["data"]["eval"] = [{"path": str(held_out), "name": "held_out"}]
    table = config["evaluation"] = {"eval_steps": 3}
    if row["average"] == "averaged":
        table["weights"] = "both"
    if row["evaluation"] == "sampled":
        table |= {"predict_with_generate": True, "max_predict_samples": 3, "max_new_tokens": 3, "eval_on_start": True}


def keep_all_blocks_on_device(config: Config) -> Config:
    """Return a copy of a config with all blocks in the device's memory, full recompute and no prefetch."""
    tiers = {"ram": {"size": AMPLE}} | ({"gpu": {"size": AMPLE}} if config["device"] == "cuda" else {})
    kept = {name: value for name, value in config.items() if name != "placement"}
    training = {**config["training"], "recompute": "full"}
    return {**kept, "training": training, "tiers": tiers, "advanced": {"prefetch": "0"}}


def to_text(config: Mapping[str, Any]) -> str:
    """Return a config as TOML."""
    return "\n".join(_lines(config, "")) + "\n"


def _lines(table: Mapping[str, Any], name: str) -> list[str]:
    inner = {key: value for key, value in table.items() if _is_table(value)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in table.items() if key not in inner]
    for key, value in inner.items():
        full = f"{name}.{key}" if name else key
        for each in value if isinstance(value, list) else [value]:
            lines += [f"[[{full}]]" if isinstance(value, list) else f"[{full}]", *_lines(each, full)]
    return lines


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))
