"""Reference of a preference loss: the initial model's log-probability of every answer.

The training engine computes the log-probabilities once, before the first step, with evaluation passes over all rows.
A second model is therefore never in memory. The results are stored twice. The run's folder keeps them for a resumed
run, which no longer has the initial weights. The token cache keeps them for other runs with the same model and rows.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatrain.converters.adapters import ADAPTER_WEIGHTS
from megatrain.data.cache import TokenCache, cache_folder
from megatrain.data.rows_report import DataError
from megatrain.engine.forward import LayerRunner
from megatrain.ranks.collectives import make_collectives
from megatrain.ranks.group import RankGroup
from megatrain.tasks.passes import Passes
from tiered import checksum
from tiered.units import format_duration

if TYPE_CHECKING:
    from torch import Tensor

    from megatrain.base.progress import Activity
    from megatrain.data.loader import BatchLoader
    from megatrain.plan.plan import Plan
    from tiered import TieredStore

__all__ = ["FOLDER_NAME", "RECORD", "Reference", "num_reference_passes"]

#: Name of the folder in ``output_dir`` and in the token cache.
FOLDER_NAME = "reference"
#: Key in ``RunState.model`` for the checksum of each loader's log-probabilities, by checksum of the loader's rows.
RECORD = "reference_xxh3_64"
_FORMAT = 1
_SUFFIX = ".logps"

Logps = npt.NDArray[np.float32]


class ReferenceFileError(Exception):
    """Error for a file of log-probabilities that is damaged, or belongs to another model or to other rows."""


def num_reference_passes(plan: Plan, loader: BatchLoader) -> int:
    """Return the number of passes over the weights that are needed to score all answers in a loader's data."""
    num_micro_batches = -(-len(loader.dataset) // loader.ordered_batch_rows)
    return -(-num_micro_batches // plan.run.batch.together(plan.run.batch.num_micro_batches))


class Reference:
    """Source of reference log-probabilities, which are read from a file or computed, and added to loaders.

    Args:
        activity: Progress shared with a live view.
        on_message: Called with a report for each loader.
        saved_checksums: ``RECORD`` of the resumed checkpoint, or None for a new run with initial weights.
        group: Ranks of the run. All ranks must call ``fill_loaders``. Only rank 0 reads and writes files.
    """

    def __init__(
        self,
        plan: Plan,
        store: TieredStore,
        *,
        activity: Activity,
        on_message: Callable[[str], None],
        saved_checksums: Mapping[str, str] | None,
        group: RankGroup | None = None,
    ) -> None:
        self._group = group or RankGroup.single()
        self._plan, self._store = plan, store
        self._activity, self._on_message = activity, on_message
        self._checksums = saved_checksums
        self._run_folder = plan.run.output_dir / FOLDER_NAME
        resume_from = plan.run.checkpoint.table.resume_from_checkpoint
        self._folders = [self._run_folder]
        if resume_from not in ("auto", "no"):
            self._folders.append(Path(resume_from) / FOLDER_NAME)
        self._cache = cache_folder(plan.run.data.table.cache_dir, lambda text: None)
        self._digest: str | None = None
        self.record: dict[str, str] = dict(saved_checksums or {})

    def fill_loaders(self, loaders: Sequence[BatchLoader]) -> None:
        """Add the log-probabilities of the answers to each loader.

        Raises:
            DataError: The run is resumed, but its reference log-probabilities are missing or have changed.
            OSError: The file cannot be written.
        """
        logps: dict[str, Logps] = {}
        for loader in loaders:
            content = loader.dataset.total_checksum
            if content not in logps:
                logps[content] = self._find_or_compute(loader)
                self.record[content] = checksum(logps[content].view(np.uint8))
            loader.use_reference(logps[content])

    # -- a new run -----------------------------------------------------------------------------------------------

    def _find_or_compute(self, loader: BatchLoader) -> Logps:
        values = None
        if self._group.world.is_first:
            values = self._read_cached(loader) if self._checksums is None else self._restore(loader, self._checksums)
        values = self._group.broadcast(values)
        return self._compute_and_store(loader) if values is None else values

    def _cache_file(self, key: str) -> Path | None:
        return None if self._cache is None else self._cache / FOLDER_NAME / (key + _SUFFIX)

    def _read_cached(self, loader: BatchLoader) -> Logps | None:
        """Return the log-probabilities that an earlier run with the same model and rows has cached, or None."""
        key = self._key(loader)
        cache_path, count = self._cache_file(key), len(loader.dataset)
        if cache_path is not None and cache_path.exists():
            try:
                values = _read(cache_path, key, count)
            except ReferenceFileError as error:
                self._on_message(f"{cache_path}: {error}; the values are computed again")
            else:
                self._on_message(f"reference: log-probabilities of {count:,} answers found in the cache ({cache_path})")
                _write(self._run_folder / _file_name(loader), key, values)
                return values
        return None

    def _compute_and_store(self, loader: BatchLoader) -> Logps:
        """Compute the log-probabilities and store them."""
        start_s = time.perf_counter()
        values = self._compute(loader)
        seconds = format_duration(time.perf_counter() - start_s)
        if not self._group.world.is_first:
            return values
        key, count, path = self._key(loader), len(loader.dataset), self._run_folder / _file_name(loader)
        cache_path = self._cache_file(key)
        _write(path, key, values)
        if cache_path is not None:
            # Ignore cache errors, because the values are also stored in the run's folder.
            with suppress(OSError):
                _write(cache_path, key, values)
        self._on_message(f"reference: log-probabilities of {count:,} answers computed in {seconds}, stored in {path}")
        return values

    def _compute(self, loader: BatchLoader) -> Logps:
        plan = self._plan
        passes = Passes(
            plan,
            self._store,
            activity=self._activity,
            collectives=make_collectives(plan.run.world, plan.program.compute_tier),
        )
        num_passes, num_rows = num_reference_passes(plan, loader), loader.ordered_batch_rows
        batches_per_pass = plan.run.batch.together(plan.run.batch.num_micro_batches)
        results: list[float] = []
        self._activity.begin("scoring with the reference", num_parts=passes.num_ticks)

        def make_batches(offset: int) -> list[dict[str, Tensor]]:
            starts = range(offset, offset + batches_per_pass * num_rows, num_rows)
            return [batch for start in starts if (batch := loader.ordered_batch(start)) is not None]

        batches = map(make_batches, range(0, num_passes * batches_per_pass * num_rows, batches_per_pass * num_rows))
        for pass_results in passes.run(batches, LayerRunner.log_probs, num_passes=num_passes):
            for logps in pass_results:
                results += logps
        self._store.wait_idle()
        loader.dataset.release_pages()
        values = np.array(results[: len(loader.dataset)], dtype=np.float32)
        if not np.isfinite(values).all():
            document = int(np.flatnonzero(~np.isfinite(values))[0])
            raise DataError(
                "data",
                f"the initial model gives answer {document + 1} a log-probability of {values[document]}",
                "Use an undamaged model",
            )
        return values

    def _key(self, loader: BatchLoader) -> str:
        """Return a key of 32 hex digits that depends on everything that determines the log-probabilities."""
        run = self._plan.run
        self._digest = self._digest or self._model_digest()
        parts = {
            "format": _FORMAT,
            "model": self._digest,
            "rows": loader.dataset.total_checksum,
            "micro_batch_rows": loader.ordered_batch_rows,
            "dtype": str(run.dtype),
            "device": self._plan.device.type,
            "attention": self._plan.graph.model.config._attn_implementation,
            "kernels": [
                run.model.table.compiler,
                run.uses_liger,
                run.model.table.mlp_rows,
                run.model.table.split_experts,  # this setting changes the order of sums
                *(() if run.flash == "FA2" else (run.flash,)),
            ],
            "libraries": {name: version(name) for name in ("torch", "transformers")},
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

    def _model_digest(self) -> str:
        """Return a checksum of the files or the seed that determine the initial weights."""
        model, seed = self._plan.run.model, self._plan.run.seed
        folder = Path(model.folder)
        parts: dict[str, Any] = {"config": checksum((folder / "config.json").read_bytes())}
        files = [] if model.table.train_from_scratch else sorted(folder.glob("*.safetensors"))
        if model.lora is not None:
            # New adapters do not change the initial model's results, except that DoRA changes how they are rounded.
            parts["dora"] = model.lora.use_dora
            if model.lora.adapter_name_or_path is not None:
                files.append(Path(model.lora.adapter_name_or_path) / ADAPTER_WEIGHTS)
        cache = None if self._cache is None else TokenCache(self._cache)
        self._activity.begin("reading the model for its checksum")
        parts["files"] = [_file_checksum(file) if cache is None else cache.file_checksum(file) for file in files]
        if model.table.train_from_scratch:
            parts["seed"] = seed
        return checksum(json.dumps(parts, sort_keys=True).encode())

    # -- a resumed run ---------------------------------------------------------------------------------------------

    def _restore(self, loader: BatchLoader, saved_checksums: Mapping[str, str]) -> Logps:
        saved_checksum = saved_checksums.get(loader.dataset.total_checksum)
        if saved_checksum is None:
            raise DataError(
                "data.eval",
                "these rows are new, but a resumed run no longer has its initial model to compare them with",
                "Remove them, or start a new run with another output_dir",
            )
        reasons = []
        for path in (folder / _file_name(loader) for folder in self._folders):
            if not path.exists():
                continue
            try:
                values = _read(path, None, len(loader.dataset))
            except ReferenceFileError as error:
                reasons.append(f"{path}: {error}")
                continue
            if checksum(values.view(np.uint8)) == saved_checksum:
                if path.parent != self._run_folder:
                    _write(self._run_folder / path.name, "", values)
                return values
            reasons.append(f"{path}: it does not belong to this run's initial model")
        cached_values = self._search_cache(loader, saved_checksum)
        if cached_values is not None:
            return cached_values
        raise DataError(
            str(self._run_folder),
            "; ".join(reasons) or "the reference log-probabilities of the answers are missing",
            "Restore the folder, or start a new run with another output_dir",
        )

    def _search_cache(self, loader: BatchLoader, saved_checksum: str) -> Logps | None:
        """Return the log-probabilities in a cached file with the checksum ``saved_checksum``, or None."""
        if self._cache is None:
            return None
        for path in sorted((self._cache / FOLDER_NAME).glob(f"*{_SUFFIX}")):
            with suppress(ReferenceFileError, OSError):
                values = _read(path, None, len(loader.dataset))
                if checksum(values.view(np.uint8)) == saved_checksum:
                    _write(self._run_folder / _file_name(loader), "", values)
                    return values
        return None


def _file_name(loader: BatchLoader) -> str:
    return checksum(loader.dataset.total_checksum.encode()) + _SUFFIX


def _file_checksum(path: Path) -> str:
    return checksum(np.memmap(path, dtype=np.uint8, mode="r"))  # a memory map, because files can exceed the RAM


def _read(path: Path, key: str | None, count: int) -> Logps:
    """Return the log-probabilities in a file.

    Args:
        key: Key that the file must have, or None to accept any key.
        count: Expected number of log-probabilities.

    Raises:
        ReferenceFileError: The file is damaged, or it belongs to another model or to other rows.
    """
    try:
        header_line, _, body = path.read_bytes().partition(b"\n")
        header = json.loads(header_line)
        values = np.frombuffer(body, dtype=np.float32)
        is_intact = (
            header["format"] == _FORMAT and header["checksum"] == checksum(body) and header["count"] == len(values)
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReferenceFileError("it cannot be read") from error
    if not is_intact:
        raise ReferenceFileError("it is damaged")
    if len(values) != count or (key is not None and header["key"] != key):
        raise ReferenceFileError("it belongs to another model or to other rows")
    return values


def _write(path: Path, key: str, values: Logps) -> None:
    """Write log-probabilities to a file atomically."""
    body = values.tobytes()
    header = {"format": _FORMAT, "key": key, "count": len(values), "checksum": checksum(body)}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_path = path.with_name(f"{path.name}.{os.getpid()}")
    with partial_path.open("wb") as file:
        file.write(json.dumps(header).encode() + b"\n" + body)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial_path, path)
