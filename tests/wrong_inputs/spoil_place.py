"""Wrong locations, settings and sizes: unusable output folders, drives and checkpoints, and wrong tier sizes."""

# ruff: noqa: E501  -- one case per line reads best
from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from wrong_inputs.mutate_config import CODE as CONFIG
from wrong_inputs.workplace import CONFIG_NAME, Spoil, Workplace, WrongInput

from megatrain.machine.file_systems import file_system_of

DOES_NOT_FIT = 3
BOTH = ("check", "run")
_SHM = Path("/dev/shm")


def _put(key: str, value: str, *parts: str, files: tuple[str, ...] = ()) -> Spoil:
    """Return a function that sets a path in the config. The message must contain ``parts``, or the key and its line."""

    def spoil(work: Workplace) -> Sequence[str]:
        for name in files:
            work.file(name, "somebody's")
        work.config.put(key, json.dumps(value))
        return parts or (CONFIG_NAME, work.config.line(key), key.rpartition(".")[2])

    return spoil


def place_cases() -> Iterator[WrongInput]:
    kind = "run: wrong place"
    spoils = {
        "output_dir is a file": _put("output_dir", "rows.jsonl"),
        "output_dir below a file": _put("output_dir", "rows.jsonl/out", "output_dir", "rows.jsonl"),
        "output_dir where nothing can be made": _put("output_dir", "/proc/no-such-place/out", "output_dir", "/proc"),
        "output_dir is the model": _put("output_dir", "./model"),
        "the drive is a file": _put("tiers.nvme.path", "rows.jsonl"),
        "the drive below a file": _put("tiers.nvme.path", "rows.jsonl/x", "tiers.nvme.0.path", "rows.jsonl"),
        "the drive where nothing can be made": _put("tiers.nvme.path", "/proc/no-such-place", "/proc/no-such-place"),
        "the drive holds foreign files": _put("tiers.nvme.path", "mine", "mine", files=("mine/thesis.tex",)),
        "the export holds foreign files": _put("output_dir", "mine", "mine/final", files=("mine/final/thesis.tex",)),
        "continues nothing": _put("checkpoint.resume_from_checkpoint", "nowhere", "resume_from_checkpoint", "nowhere"),
        "continues a file": _put("checkpoint.resume_from_checkpoint", "rows.jsonl", "resume_from_checkpoint"),
        "continues a foreign folder": _put("checkpoint.resume_from_checkpoint", "model", "resume_from_checkpoint"),
    }  # fmt: skip
    for what, spoil in spoils.items():
        yield WrongInput(what, kind, CONFIG, spoil, BOTH)


def setting_cases() -> Iterator[WrongInput]:
    """Yield settings that do not suit the model or the machine."""
    kind = "run: does not suit"

    def put(*parts: str, **keys: str) -> Spoil:
        def spoil(work: Workplace) -> Sequence[str]:
            for key, value in keys.items():
                work.config.put(key.replace("__", "."), value)
            return parts

        return spoil

    spoils = {
        "no CUDA here": put("device", "cuda", device='"cuda"'),
        "freezes nothing": put("nothing.*", model__freeze='["nothing.*"]'),
        "freezes everything": put("freeze", model__freeze='["*"]'),
        "a group of no parameter": put("nothing.*", optimizer__groups__params='["nothing.*"]'),
        "a warm-up longer than the run": put(
            "warm-up", optimizer__warmup_steps="5000", optimizer__lr_scheduler_type='"cosine"', training__max_steps="-1"
        ),
        "longer rows than the model has positions": put("max_length", data__max_length="100000"),
    }
    for what, spoil in spoils.items():
        if what != "longer rows than the model has positions":  # this model computes positions, so it has no limit
            yield WrongInput(what, kind, CONFIG, spoil, BOTH)


def fit_cases() -> Iterator[WrongInput]:
    """Yield tiers that are too small, in several placements."""

    def sizes(tier: str, **keys: str) -> Spoil:
        def spoil(work: Workplace) -> Sequence[str]:
            for key, value in keys.items():
                work.config.put(key.replace("__", "."), value)
            return "does not fit", f"'{tier}'", "needs at least"

        return spoil

    def no_drive(work: Workplace) -> Sequence[str]:
        del work.config.tables["tiers.nvme"]
        work.config.put("tiers.ram.size", '"4MiB"')
        return "does not fit", "'ram'", "needs at least"

    spoils = {
        "RAM of 4 KiB": sizes("ram", tiers__ram__size='"4KiB"'),
        "RAM of 1 MiB": sizes("ram", tiers__ram__size='"1MiB"'),
        "RAM of 4 MiB without a drive": no_drive,
        "a drive of 4 KiB": sizes("nvme", tiers__ram__size='"6MiB"', tiers__nvme__size='"4KiB"'),
        "everything in a RAM that is too small": sizes("ram", tiers__ram__size='"6MiB"', placement__weights='["ram"]', placement__optimizer='["ram"]', placement__gradients='["ram"]'),
        "everything on a drive that is too small": sizes("nvme", tiers__nvme__size='"1MiB"', placement__weights='["nvme"]', placement__optimizer='["nvme"]'),
        "rows that are too long for RAM": sizes("ram", tiers__ram__size='"8MiB"', data__max_length="8192"),
        "too many rows at once": sizes("ram", tiers__ram__size='"8MiB"', training__per_device_train_batch_size="512"),
    }  # fmt: skip
    for what, spoil in spoils.items():
        yield WrongInput(what, "run: does not fit", DOES_NOT_FIT, spoil, ("plan", *BOTH))


def machine_cases() -> Iterator[WrongInput]:
    """Yield tiers that are too large for the machine, and drives that are not mounted or are in RAM."""

    def put(parts: tuple[str, ...], **keys: str) -> Spoil:
        def spoil(work: Workplace) -> Sequence[str]:
            for key, value in keys.items():
                work.config.put(key.replace("__", "."), value)
            return parts

        return spoil

    beyond = {
        "more RAM than there is": put(("tiers.ram.size", "too large", "free now"), tiers__ram__size='"9000TiB"'),
        "a larger drive than there is": put(("tiers.nvme.0.size", "/drive", "free"), tiers__nvme__size='"9000TiB"'),
    }
    for what, spoil in beyond.items():
        yield WrongInput(what, "run: beyond the machine", DOES_NOT_FIT, spoil, BOTH)
    places = {
        "the drive is not mounted": put(("mount_point", "nothing is mounted"), tiers__nvme__mount_point='"model"')
    }
    if file_system_of(_SHM).kind == "tmpfs":
        shm = put(("tiers.nvme.0.path", "tmpfs"), tiers__nvme__path=f'"{_SHM}/no-such-folder"')
        places["the drive is RAM"] = shm
    for what, spoil in places.items():
        yield WrongInput(what, "run: wrong place", CONFIG, spoil, BOTH)


def cases() -> Iterator[WrongInput]:
    yield from place_cases()
    yield from machine_cases()
    yield from setting_cases()
    yield from fit_cases()
