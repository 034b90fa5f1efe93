"""Teacher scores on disk: log-probabilities of each token in a dataset. Each part of the scores is written atomically.

A score folder has one file (parquet) or group (zarr) per batch of rows. Its ``scores.json`` records how the scores were
made. Each document's key is a checksum of its tokens and loss mask. A reader can therefore look up documents in any
order, and never gets the scores of a different row or tokenizer.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from megatrain.base.batch_keys import TEACHER_KEYS
from megatrain.data.rows_report import DataError
from tiered import checksum
from tiered.errors import install_command
from tiered.ext import replace_file

if TYPE_CHECKING:
    from megatrain.data.token_dataset import TokenDataset

#: Name of the score folder in ``output_dir``.
SCORES_NAME = "scores"
_MANIFEST_NAME = "scores.json"
_PARTIAL_NAME = ".writing"
_VERSION = 1
_PART_PATTERN = re.compile(r"part-([0-9]{12})-([0-9]{9})(?:\.parquet)?")
_GROUP_NBYTES = 4 << 20  # approximate size of a row group; a reader loads a whole row group to get one document
_MAX_CACHED_GROUPS = 8

Array = npt.NDArray[Any]


class ScoresError(Exception):
    """Error for an unusable score folder. The message states the cause and the remedy."""


@dataclass(frozen=True, slots=True)
class ScoreKind:
    """Origin and options of scores. All scores in a folder share them.

    Attributes:
        model: Name or folder of the teacher.
        weights: Checksum of samples from the teacher's weights.
        mlp_rows: Number of tokens that an MLP computes at a time, or 0 for no limit.
        split_experts: Whether fused experts were computed in parts. This changes how their sums are rounded.
        tokenizer: Checksum of the tokenizer.
        data: Fingerprint of the dataset.
        top_k: Number of vocabulary entries that are scored for each token.
        embeddings: How a document's vector is computed from its last hidden states: "none", "mean" or "last".
        formats: File formats. Every format contains all scores.
    """

    model: str
    weights: str
    dtype: str
    attention: str
    mlp_rows: int
    split_experts: bool
    tokenizer: str
    data: str
    max_length: int
    packing: bool
    data_seed: int
    num_rows: int
    top_k: int
    temperature: float
    embeddings: str
    formats: tuple[str, ...]


#: Names of attributes in messages. All attributes that are not listed here are keys of [score].
_NAMES_IN_MESSAGES = {
    "model": "the model",
    "weights": "the model's weights",
    "dtype": "precision.compute_dtype",
    "attention": "the attention kernel",
    "mlp_rows": "model.mlp_rows",
    "split_experts": "model.split_experts",
    "tokenizer": "the tokenizer",
    "data": "the rows of [[data.train]]",
    "max_length": "data.max_length",
    "packing": "data.packing",
    "data_seed": "data_seed",
    "num_rows": "the rows of [[data.train]]",
}


def read_kind(folder: Path) -> ScoreKind:
    """Return the origin and options of the scores in a folder.

    Raises:
        ScoresError: The folder contains no readable scores.
    """
    path = folder / _MANIFEST_NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        version = values.pop("version")
        if version != _VERSION:
            raise ScoresError(f"{path} has version {version}, but this program supports version {_VERSION}")
        return ScoreKind(**{**values, "formats": tuple(values["formats"])})
    except FileNotFoundError:
        subfolder = folder / SCORES_NAME
        hint = f". They may be in {subfolder}" if (subfolder / _MANIFEST_NAME).is_file() else ""
        raise ScoresError(f"there are no scores in {folder} (no {_MANIFEST_NAME}){hint}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ScoresError(f"{path} cannot be read: {error}") from None


@dataclass(frozen=True, slots=True, eq=False)
class DocumentScores:
    """Scores that a model gives a document with ``n`` tokens in the loss.

    Attributes:
        key: Checksum of the document's tokens and loss mask.
        document: Index of the document in the dataset.
        source: Index of the ``[[data.train]]`` source.
        positions: Positions of the tokens in the loss, ``(n,)``, int32.
        token_ids: Ids of these tokens, ``(n,)``, int32.
        log_probs: Log-probability of each of these tokens given all tokens before it, ``(n,)``, fp32.
        top_ids: Most likely tokens at each position, ``(n, k)``, int32.
        top_log_probs: Log-probabilities of ``top_ids``, ``(n, k)``, fp32.
        rest_log_probs: Logarithm of the total probability of all tokens not in ``top_ids``, ``(n,)``, fp32.
        embedding: The document's vector, ``(width,)``, fp32. Empty if embeddings are off.
    """

    key: str
    document: int
    source: int
    num_tokens: int
    positions: Array
    token_ids: Array
    log_probs: Array
    top_ids: Array
    top_log_probs: Array
    rest_log_probs: Array
    embedding: Array

    @property
    def nbytes(self) -> int:
        """Size of the scores in memory, in bytes."""
        return 16 * len(self.positions) + self.top_ids.nbytes + self.top_log_probs.nbytes + self.embedding.nbytes


_TOKEN_ARRAYS = ("positions", "token_ids", "log_probs", "top_ids", "top_log_probs", "rest_log_probs")


class ScoreFolder:
    """Writer of scores. The caller must hold the lock of ``output_dir``, so that only one process writes.

    Each part is written under a temporary name, flushed to the drive and then renamed, so that a crash leaves only
    complete parts.

    Raises:
        ScoresError: The folder contains other files, or scores whose origin or options differ.
    """

    def __init__(self, folder: Path, kind: ScoreKind) -> None:
        self.path, self._kind = folder, kind
        if (folder / _MANIFEST_NAME).exists():
            stored_kind = read_kind(folder)
            differences = [
                _NAMES_IN_MESSAGES.get(field.name, f"score.{field.name}")
                for field in dataclasses.fields(kind)
                if getattr(stored_kind, field.name) != getattr(kind, field.name)
            ]
            if differences:
                raise ScoresError(
                    f"{folder} contains scores that differ from this config in "
                    f"{', '.join(dict.fromkeys(differences))}. Set another output_dir, or delete that folder"
                )
        elif folder.is_dir() and any(folder.iterdir()):
            raise ScoresError(f"{folder} contains other files. Set another output_dir")
        if "parquet" in kind.formats:
            _import_parquet()
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder / _PARTIAL_NAME, ignore_errors=True)
        if not (folder / _MANIFEST_NAME).exists():
            values = {"version": _VERSION, **dataclasses.asdict(kind)}
            replace_file(folder / _MANIFEST_NAME, json.dumps(values, indent=2) + "\n", durable=True)
        for fmt in kind.formats:
            (folder / fmt).mkdir(exist_ok=True)
        if "zarr" in kind.formats:
            import zarr

            zarr.open_group(str(folder / "zarr"), mode="a")

    def missing_rows(self) -> list[range]:
        """Return the ranges of rows whose scores are missing in at least one format."""
        parts = set.intersection(*({part[:2] for part in _list_parts(self.path / fmt)} for fmt in self._kind.formats))
        ranges, next_row = [], 0
        for start, count in sorted(parts):
            if start > next_row:
                ranges.append(range(next_row, start))
            next_row = max(next_row, start + count)
        return [*ranges, *([range(next_row, self._kind.num_rows)] if next_row < self._kind.num_rows else [])]

    def write(self, first_row: int, num_rows: int, documents: Sequence[DocumentScores]) -> None:
        """Write the scores of ``num_rows`` rows in every format. Raises OSError."""
        name = f"part-{first_row:012d}-{num_rows:09d}"
        partial_folder = self.path / _PARTIAL_NAME
        partial_folder.mkdir(exist_ok=True)
        for fmt in self._kind.formats:
            suffix = ".parquet" if fmt == "parquet" else ""
            partial_path, final_path = partial_folder / f"{name}{suffix}", self.path / fmt / f"{name}{suffix}"
            if fmt == "parquet":
                _write_parquet(partial_path, documents, self._kind)
            else:
                _write_zarr(partial_path, documents, self._kind)
            # Remove older parts that contain some of these rows. A crash between two formats can leave such parts.
            for start, count, stale_path in _list_parts(self.path / fmt):
                if start < first_row + num_rows and first_row < start + count:
                    shutil.rmtree(stale_path) if stale_path.is_dir() else stale_path.unlink()
            _commit_part(partial_path, final_path)


def _list_parts(folder: Path) -> list[tuple[int, int, Path]]:
    """Return (first row, number of rows, path) for each part in a folder, in order of rows."""
    parts = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _PART_PATTERN.fullmatch(path.name)
        if match is not None:
            parts.append((int(match[1]), int(match[2]), path))
    return sorted(parts)


def _commit_part(partial_path: Path, final_path: Path) -> None:
    """Flush a file or folder to the drive, then rename it to its final name."""
    for folder, _, names in os.walk(partial_path, topdown=False):
        for name in names:
            _fsync(Path(folder, name))
        _fsync(Path(folder))
    if partial_path.is_file():
        _fsync(partial_path)
    os.replace(partial_path, final_path)
    _fsync(final_path.parent)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _import_parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ScoresError(f"parquet files need pyarrow: {install_command('data')}. Or use zarr or .jsonl") from None
    return pyarrow.parquet


def _make_arrays(documents: Sequence[DocumentScores], kind: ScoreKind) -> dict[str, Array]:
    """Return a part's arrays: the per-document values, ``starts``, and the concatenated per-token values."""
    counts = [len(document.positions) for document in documents]
    arrays: dict[str, Array] = {
        "document": np.array([document.document for document in documents], dtype=np.int64),
        "source": np.array([document.source for document in documents], dtype=np.int32),
        "num_tokens": np.array([document.num_tokens for document in documents], dtype=np.int32),
        "perplexity": np.array([_perplexity(document.log_probs) for document in documents], dtype=np.float64),
        "starts": np.cumsum([0, *counts], dtype=np.int64),
    }
    for name in _TOKEN_ARRAYS:
        if kind.top_k or name in ("positions", "token_ids", "log_probs"):
            arrays[name] = np.concatenate([getattr(document, name) for document in documents])
    if kind.embeddings != "none":
        arrays["embedding"] = np.stack([document.embedding for document in documents])
    return arrays


def _perplexity(log_probs: Array) -> float:
    """Return the perplexity of the scored tokens, or NaN if there are none."""
    return float(np.exp(-log_probs.astype(np.float64).mean())) if len(log_probs) else float("nan")


def _write_parquet(path: Path, documents: Sequence[DocumentScores], kind: ScoreKind) -> None:
    import pyarrow as pa

    arrays = _make_arrays(documents, kind)
    starts = pa.array(arrays.pop("starts"))
    columns: dict[str, Any] = {"key": pa.array([document.key for document in documents])}
    for name, values in arrays.items():
        array = pa.array(values.reshape(-1))
        if values.ndim == 2:
            array = pa.FixedSizeListArray.from_arrays(array, values.shape[1])
        columns[name] = pa.LargeListArray.from_arrays(starts, array) if name in _TOKEN_ARRAYS else array
    nbytes = sum(document.nbytes for document in documents)
    group_rows = max(1, len(documents) * _GROUP_NBYTES // max(_GROUP_NBYTES, nbytes))
    # Disable dictionary encoding, because it takes time and does not compress log-probabilities.
    parquet = _import_parquet()
    parquet.write_table(pa.table(columns), path, row_group_size=group_rows, use_dictionary=False, compression="zstd")


def _write_zarr(path: Path, documents: Sequence[DocumentScores], kind: ScoreKind) -> None:
    import zarr

    group = zarr.create_group(str(path))
    arrays = _make_arrays(documents, kind)
    arrays["key"] = np.array([int(document.key, 16) for document in documents], dtype=np.uint64)
    for name, values in arrays.items():
        row_nbytes = max(1, values.nbytes // max(1, len(values)))
        chunk_rows = max(1, min(len(values) or 1, _GROUP_NBYTES // row_nbytes))
        group.create_array(name, data=values, chunks=(chunk_rows, *values.shape[1:]))


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows to a parquet file. Raises ScoresError if pyarrow is not installed."""
    parquet = _import_parquet()
    import pyarrow as pa

    parquet.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)


# -- reading ---------------------------------------------------------------------------------------------------------


class _ParquetPart:
    """Reader of single documents in a parquet part."""

    def __init__(self, path: Path) -> None:
        self._file = _import_parquet().ParquetFile(path, memory_map=True)
        counts = [self._file.metadata.row_group(n).num_rows for n in range(self._file.num_row_groups)]
        self._ends = np.cumsum(counts)
        self._groups: OrderedDict[int, Any] = OrderedDict()

    def keys(self) -> list[str]:
        return list(self._file.read(columns=["key"]).column("key").to_pylist())

    def read(self, row: int, names: Sequence[str]) -> list[Array]:
        group = int(np.searchsorted(self._ends, row, side="right"))
        if group not in self._groups:
            self._groups[group] = self._file.read_row_group(group, columns=list(names))
            while len(self._groups) > _MAX_CACHED_GROUPS:
                self._groups.popitem(last=False)
        self._groups.move_to_end(group)
        offset = row - (int(self._ends[group - 1]) if group else 0)
        arrays = []
        for name in names:
            values = self._groups[group].column(name)[offset].values
            width = values.type.list_size if hasattr(values.type, "list_size") else 0
            flat_values = values.flatten() if width else values
            numbers = flat_values.to_numpy(zero_copy_only=False)
            arrays.append(numbers.reshape(-1, width) if width else numbers)
        return arrays


class _ZarrPart:
    """Reader of single documents in a zarr part."""

    def __init__(self, path: Path) -> None:
        import zarr

        self._group = zarr.open_group(str(path), mode="r")
        self._starts = self._group["starts"][:]

    def keys(self) -> list[str]:
        return [f"{int(key):016x}" for key in self._group["key"][:]]

    def read(self, row: int, names: Sequence[str]) -> list[Array]:
        span = slice(int(self._starts[row]), int(self._starts[row + 1]))
        return [np.asarray(self._group[name][span]) for name in names]


class TeacherScores:
    """Reader of teacher scores for distillation.

    Args:
        top_k: Number of most likely tokens to use. The probabilities of all other tokens are summed.
        vocab_size: The student's vocabulary size.

    Raises:
        DataError: A part is damaged.
        ScoresError: The folder contains no scores.
    """

    def __init__(self, folder: Path, top_k: int, vocab_size: int) -> None:
        self.kind = read_kind(folder)
        self._folder, self._top_k, self._vocab_size = folder, top_k, vocab_size
        fmt = self.kind.formats[0]
        self._parts: list[tuple[Path, _ParquetPart | _ZarrPart]] = []
        self._index: dict[str, tuple[int, int]] = {}
        part_sizes = []
        for _, _, path in _list_parts(folder / fmt):
            with _explain_damage(path):
                part = _ParquetPart(path) if fmt == "parquet" else _ZarrPart(path)
                keys = part.keys()
            self._index.update((key, (len(self._parts), row)) for row, key in enumerate(keys))
            self._parts.append((path, part))
            part_sizes.append((path.name, len(keys)))
        self._fingerprint = checksum(json.dumps([dataclasses.asdict(self.kind), part_sizes, top_k]).encode())

    def fingerprint(self) -> str:
        """Return a checksum of the scores' origin, the parts' names and sizes, and ``top_k``."""
        return self._fingerprint

    def check_coverage(self, dataset: TokenDataset, tokenizer: str) -> None:
        """Check that every document of a dataset has scores.

        Args:
            tokenizer: Checksum of the dataset's tokenizer.

        Raises:
            DataError: Some documents have no scores. The message states their number and a likely cause.
        """
        documents = dataset.epoch_documents(0) if dataset.in_use is None else dataset.in_use
        unscored = [int(document) for document in documents if dataset.document_key(int(document)) not in self._index]
        if not unscored:
            return
        num_rows = sum(count for _, count, _ in _list_parts(self._folder / self.kind.formats[0]))
        if tokenizer != self.kind.tokenizer:
            cause = (
                f"The scores belong to another tokenizer ({self.kind.model}). A student needs the tokenizer of its "
                "teacher: set model.tokenizer_name_or_path"
            )
        elif num_rows < self.kind.num_rows:
            cause = (
                f"Only {num_rows:,} of {self.kind.num_rows:,} rows have been scored: run the same megatrain-tier "
                "score command again to continue"
            )
        else:
            cause = (
                "Score exactly these [[data.train]] rows, with the same chat template, data.train_on and "
                f"data.max_length (the scores have {self.kind.max_length})"
            )
        raise DataError(
            str(self._folder),
            f"{len(unscored):,} of {len(documents):,} documents of data.train have no scores (first: document "
            f"{unscored[0]:,}, with {dataset.starts[unscored[0] + 1] - dataset.starts[unscored[0]]:,} tokens)",
            cause,
        )

    def batch_scores(self, rows: Sequence[Sequence[tuple[str, int]]], width: int) -> dict[str, torch.Tensor]:
        """Return the teacher's scores for the next token at each position of the rows.

        Args:
            rows: For each row, the key and the length of each document.
            width: Number of positions in a row.

        Returns:
            The values of ``TEACHER_KEYS``: token ids, ``(rows, width, k)``, int32; their log-probabilities, fp32, same
            shape; all other tokens' log-probability, ``(rows, width)``, fp32. Positions without scores are zero.

        Raises:
            DataError: A document has no scores, or its scores contain a token outside the student's vocabulary.
        """
        shape = (len(rows), width)
        ids = np.zeros((*shape, self._top_k), dtype=np.int32)
        log_probs = np.zeros((*shape, self._top_k), dtype=np.float32)
        rest_log_probs = np.zeros(shape, dtype=np.float32)
        for i, row in enumerate(rows):
            start = 0
            for key, length in row:
                positions, *arrays = self._read(key)
                columns = start + positions - 1  # each token is predicted at the position before it
                ids[i, columns], log_probs[i, columns], rest_log_probs[i, columns] = self._select_top(key, *arrays)
                start += length
        return dict(zip(TEACHER_KEYS, map(torch.from_numpy, (ids, log_probs, rest_log_probs)), strict=True))

    def _read(self, key: str) -> list[Array]:
        if key not in self._index:
            raise DataError(str(self._folder), f"there are no scores for document {key}")
        part_index, row = self._index[key]
        path, part = self._parts[part_index]
        with _explain_damage(path):
            return part.read(row, ("positions", "top_ids", "top_log_probs", "rest_log_probs"))

    def _select_top(self, key: str, ids: Array, log_probs: Array, rest_log_probs: Array) -> tuple[Array, Array, Array]:
        if ids.size and ids.max() >= self._vocab_size:
            raise DataError(
                str(self._folder),
                f"the scores of document {key} contain token id {int(ids.max()):,}, but the student has only "
                f"{self._vocab_size:,} tokens",
                "A student needs the vocabulary of its teacher",
            )
        omitted_log_probs = log_probs[:, self._top_k :]
        if omitted_log_probs.shape[1]:
            for column in omitted_log_probs.T:
                rest_log_probs = np.logaddexp(rest_log_probs, column)
        return ids[:, : self._top_k], log_probs[:, : self._top_k], rest_log_probs


@contextmanager
def _explain_damage(path: Path) -> Iterator[None]:
    """Convert any error while reading a part to a DataError that names the file."""
    try:
        yield
    except ScoresError:
        raise
    except Exception as error:  # pyarrow and zarr raise many types of errors
        text = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            str(path),
            f"this part of the scores cannot be read: {text}",
            "Delete it and run the same megatrain-tier score command again, which scores the missing rows",
        ) from error


def tokenizer_checksum(tokenizer: Any) -> str:
    """Return a checksum of a tokenizer's vocabulary and rules."""
    return checksum(tokenizer.backend_tokenizer.to_str().encode())
