"""Scores of a teacher on disk: log-probabilities for each token of a data set, in parts that are complete or absent.

A folder of scores has one file or group per batch of rows and format (parquet, zarr). Its ``scores.json`` records the
origin. The key of a document is a checksum of its tokens and loss mask. So a reader finds the scores of its documents
in any order, and none of other rows or of another tokenizer.
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
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from megatrain.base.batch_keys import TEACHER_KEYS
from megatrain.data.rows_report import DataError
from tiered import checksum
from tiered.ext import replace_file

if TYPE_CHECKING:
    from megatrain.data.dataset import TokenDataset

__all__ = [
    "SCORES_NAME",
    "DocumentScores",
    "ScoreFolder",
    "ScoreKind",
    "ScoresError",
    "TeacherScores",
    "read_kind",
]

#: Folder of scores, inside ``output_dir``.
SCORES_NAME = "scores"
_KIND_NAME = "scores.json"
_WRITING_NAME = ".writing"
_VERSION = 1
_PART = re.compile(r"part-([0-9]{12})-([0-9]{9})(?:\.parquet)?")
_GROUP_NBYTES = 4 << 20  # approximate bytes of a row group, which must be read for one document
_GROUPS_KEPT = 8
EXTRA = 'pip install "megatrain-tier[data]"'

Format = Literal["parquet", "zarr"]
Array = npt.NDArray[Any]


class ScoresError(Exception):
    """A folder of scores cannot be used; the text names the cause and the remedy."""


@dataclass(frozen=True, slots=True)
class ScoreKind:
    """Origin and options of scores; all scores of a folder share them.

    Attributes:
        model: name or folder.
        weights: checksum of samples of its weights.
        mlp_rows: tokens per MLP call.
        split_experts: whether fused experts were split into parts, which changes the bits of their sums.
        tokenizer: checksum of the tokenizer.
        data: fingerprint of the data set.
        max_length: tokens of a row.
        packing: whether several documents share a row.
        top_k: scored vocabulary entries per token.
        embeddings: vectors of documents from their last hidden states: "none", "mean" or "last".
        formats: file formats; each holds all scores.
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


#: Names of facts in messages; the other facts are keys of [score].
_WORDS = {
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
    """Return origin and options of the scores in a folder.

    Raises:
        ScoresError: there are none.
    """
    path = folder / _KIND_NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        version = values.pop("version")
        if version != _VERSION:
            raise ScoresError(f"{path} is of version {version}, this program knows {_VERSION}")
        return ScoreKind(**{**values, "formats": tuple(values["formats"])})
    except FileNotFoundError:
        inside = folder / SCORES_NAME
        hint = f". They may be in {inside}" if (inside / _KIND_NAME).is_file() else ""
        raise ScoresError(f"there are no scores in {folder} (no {_KIND_NAME}){hint}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ScoresError(f"{path} cannot be read: {error}") from None


@dataclass(frozen=True, slots=True, eq=False)
class DocumentScores:
    """A model's scores of one document.

    Attributes:
        key: checksum of its tokens and loss mask.
        document: number in the data set.
        source: number of its ``[[data.train]]``.
        positions: [n] int32, positions in the document of the scored tokens, which are the trained ones.
        token_ids: [n] int32, ids of these tokens.
        log_probs: [n] fp32, log-probability of each token given the tokens before it.
        top_ids: [n, k] int32, the likeliest tokens there.
        top_log_probs: [n, k] fp32.
        rest_log_probs: [n] fp32, log of the probability of all other tokens.
        embedding: [width] fp32, or [0].
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
        """Bytes of the scores in memory."""
        return 16 * len(self.positions) + self.top_ids.nbytes + self.top_log_probs.nbytes + self.embedding.nbytes


_BY_TOKEN = ("positions", "token_ids", "log_probs", "top_ids", "top_log_probs", "rest_log_probs")


class ScoreFolder:
    """Writer of scores. Only one process at a time: the caller holds the lock of ``output_dir``.

    Each part is written under a temporary name, flushed to the drive and renamed, so that a crash leaves complete parts
    only.

    Args:
        folder: created if missing.
        kind: Origin and options of the scores.

    Raises:
        ScoresError: the folder holds scores of another kind.
    """

    def __init__(self, folder: Path, kind: ScoreKind) -> None:
        self.path, self._kind = folder, kind
        if (folder / _KIND_NAME).exists():
            found = read_kind(folder)
            different = [
                _WORDS.get(field.name, f"score.{field.name}")
                for field in dataclasses.fields(kind)
                if getattr(found, field.name) != getattr(kind, field.name)
            ]
            if different:
                raise ScoresError(
                    f"{folder} holds scores that differ from those asked for in {', '.join(dict.fromkeys(different))}. "
                    "Name another output_dir, or delete that folder"
                )
        elif folder.is_dir() and any(folder.iterdir()):
            raise ScoresError(f"{folder} holds other files. Name another output_dir")
        if "parquet" in kind.formats:
            _parquet()
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder / _WRITING_NAME, ignore_errors=True)
        if not (folder / _KIND_NAME).exists():
            values = {"version": _VERSION, **dataclasses.asdict(kind)}
            replace_file(folder / _KIND_NAME, json.dumps(values, indent=2) + "\n", durable=True)
        for form in kind.formats:
            (folder / form).mkdir(exist_ok=True)
        if "zarr" in kind.formats:
            _zarr().open_group(str(folder / "zarr"), mode="a")

    def missing(self) -> list[range]:
        """Return the rows without complete scores in every format."""
        whole = set.intersection(*({part[:2] for part in _parts(self.path / form)} for form in self._kind.formats))
        found, done = [], 0
        for first, count in sorted(whole):
            if first > done:
                found.append(range(done, first))
            done = max(done, first + count)
        return [*found, *([range(done, self._kind.num_rows)] if done < self._kind.num_rows else [])]

    def write(self, first_row: int, num_rows: int, documents: Sequence[DocumentScores]) -> None:
        """Write the scores of some rows, in every format.

        Raises:
            OSError: writing failed.
        """
        name = f"part-{first_row:012d}-{num_rows:09d}"
        writing = self.path / _WRITING_NAME
        writing.mkdir(exist_ok=True)
        for form in self._kind.formats:
            ending = ".parquet" if form == "parquet" else ""
            partial, place = writing / f"{name}{ending}", self.path / form / f"{name}{ending}"
            if form == "parquet":
                _write_parquet(partial, documents, self._kind)
            else:
                _write_zarr(partial, documents, self._kind)
            # A process that ended between two formats left parts of these rows, possibly with other boundaries.
            for first, count, stale in _parts(self.path / form):
                if first < first_row + num_rows and first_row < first + count:
                    shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
            _put(partial, place)


def _parts(folder: Path) -> list[tuple[int, int, Path]]:
    """Return (first row, number of rows, path) of every part in a folder, in order."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _PART.fullmatch(path.name)
        if match is not None:
            found.append((int(match[1]), int(match[2]), path))
    return sorted(found)


def _put(partial: Path, place: Path) -> None:
    """Flush a file or a folder to the drive, then rename it to its final name."""
    for folder, _, names in os.walk(partial, topdown=False):
        for name in names:
            _flush(Path(folder, name))
        _flush(Path(folder))
    if partial.is_file():
        _flush(partial)
    os.replace(partial, place)
    _flush(place.parent)


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ScoresError(f"files of parquet need pyarrow: {EXTRA}. Or choose zarr, or .jsonl") from None
    return pyarrow.parquet


def _zarr() -> Any:
    import zarr

    return zarr


def _arrays(documents: Sequence[DocumentScores], kind: ScoreKind) -> dict[str, Array]:
    """Return the arrays of a part: one value per document, ``starts``, and one value per token, concatenated."""
    counts = [len(document.positions) for document in documents]
    arrays: dict[str, Array] = {
        "document": np.array([document.document for document in documents], dtype=np.int64),
        "source": np.array([document.source for document in documents], dtype=np.int32),
        "num_tokens": np.array([document.num_tokens for document in documents], dtype=np.int32),
        "perplexity": np.array([_perplexity(document.log_probs) for document in documents], dtype=np.float64),
        "starts": np.cumsum([0, *counts], dtype=np.int64),
    }
    for name in _BY_TOKEN:
        if kind.top_k or name in ("positions", "token_ids", "log_probs"):
            arrays[name] = np.concatenate([getattr(document, name) for document in documents])
    if kind.embeddings != "none":
        arrays["embedding"] = np.stack([document.embedding for document in documents])
    return arrays


def _perplexity(log_probs: Array) -> float:
    """Return the perplexity of the scored tokens; NaN without any."""
    return float(np.exp(-log_probs.astype(np.float64).mean())) if len(log_probs) else float("nan")


def _write_parquet(path: Path, documents: Sequence[DocumentScores], kind: ScoreKind) -> None:
    import pyarrow as pa

    arrays = _arrays(documents, kind)
    starts = pa.array(arrays.pop("starts"))
    columns: dict[str, Any] = {"key": pa.array([document.key for document in documents])}
    for name, values in arrays.items():
        flat = pa.array(values.reshape(-1))
        if values.ndim == 2:
            flat = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
        columns[name] = pa.LargeListArray.from_arrays(starts, flat) if name in _BY_TOKEN else flat
    nbytes = sum(document.nbytes for document in documents)
    group = max(1, len(documents) * _GROUP_NBYTES // max(_GROUP_NBYTES, nbytes))
    # No dictionaries: for such numbers they only cost time.
    _parquet().write_table(pa.table(columns), path, row_group_size=group, use_dictionary=False, compression="zstd")


def _write_zarr(path: Path, documents: Sequence[DocumentScores], kind: ScoreKind) -> None:
    group = _zarr().create_group(str(path))
    arrays = _arrays(documents, kind)
    arrays["key"] = np.array([int(document.key, 16) for document in documents], dtype=np.uint64)
    for name, values in arrays.items():
        row_nbytes = max(1, values.nbytes // max(1, len(values)))
        chunk = max(1, min(len(values) or 1, _GROUP_NBYTES // row_nbytes))
        group.create_array(name, data=values, chunks=(chunk, *values.shape[1:]))


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as a parquet file.

    Raises:
        ScoresError: pyarrow is missing.
    """
    parquet = _parquet()
    import pyarrow as pa

    parquet.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)


# -- reading ---------------------------------------------------------------------------------------------------------


class _ParquetPart:
    """Reader of single documents in a parquet part."""

    def __init__(self, path: Path) -> None:
        self._file = _parquet().ParquetFile(path, memory_map=True)
        counts = [self._file.metadata.row_group(n).num_rows for n in range(self._file.num_row_groups)]
        self._ends = np.cumsum(counts)
        self._groups: OrderedDict[int, Any] = OrderedDict()

    def keys(self) -> list[str]:
        return list(self._file.read(columns=["key"]).column("key").to_pylist())

    def read(self, row: int, names: Sequence[str]) -> list[Array]:
        number = int(np.searchsorted(self._ends, row, side="right"))
        if number not in self._groups:
            self._groups[number] = self._file.read_row_group(number, columns=list(names))
            while len(self._groups) > _GROUPS_KEPT:
                self._groups.popitem(last=False)
        self._groups.move_to_end(number)
        at = row - (int(self._ends[number - 1]) if number else 0)
        found = []
        for name in names:
            values = self._groups[number].column(name)[at].values
            width = values.type.list_size if hasattr(values.type, "list_size") else 0
            flat = values.flatten() if width else values
            numbers = flat.to_numpy(zero_copy_only=False)
            found.append(numbers.reshape(-1, width) if width else numbers)
        return found


class _ZarrPart:
    """Reader of single documents in a zarr part."""

    def __init__(self, path: Path) -> None:
        self._group = _zarr().open_group(str(path), mode="r")
        self._starts = self._group["starts"][:]

    def keys(self) -> list[str]:
        return [f"{int(key):016x}" for key in self._group["key"][:]]

    def read(self, row: int, names: Sequence[str]) -> list[Array]:
        part = slice(int(self._starts[row]), int(self._starts[row + 1]))
        return [np.asarray(self._group[name][part]) for name in names]


class TeacherScores:
    """Reader of the scores of documents, for distillation.

    Args:
        top_k: likeliest tokens to use; further scored tokens are added to the rest.
        vocab_size: vocabulary size of the student.

    Raises:
        DataError: a part is damaged.
        ScoresError: there are no scores.
    """

    def __init__(self, folder: Path, top_k: int, vocab_size: int) -> None:
        self.kind = read_kind(folder)
        self._folder, self._top_k, self._vocab_size = folder, top_k, vocab_size
        form = self.kind.formats[0]
        self._parts: list[_ParquetPart | _ZarrPart] = []
        self._index: dict[str, tuple[int, int]] = {}
        names = []
        for _, _, path in _parts(folder / form):
            with _damage_explained(path):
                part = _ParquetPart(path) if form == "parquet" else _ZarrPart(path)
                keys = part.keys()
            self._index.update((key, (len(self._parts), row)) for row, key in enumerate(keys))
            self._parts.append(part)
            names.append((path.name, len(keys)))
        self._paths = [path for _, _, path in _parts(folder / form)]
        self._fingerprint = checksum(json.dumps([dataclasses.asdict(self.kind), names, top_k]).encode())

    def fingerprint(self) -> str:
        """Return a checksum of the origin of the scores and of their number."""
        return self._fingerprint

    def check_covers(self, dataset: TokenDataset, tokenizer: str) -> None:
        """Raise ``DataError`` if a document of a data set has no scores.

        Args:
            tokenizer: checksum of the data set's tokenizer.

        Raises:
            DataError: names the number of these documents and a likely cause.
        """
        used = dataset.epoch_documents(0) if dataset.in_use is None else dataset.in_use
        missing = [int(document) for document in used if dataset.key_of(int(document)) not in self._index]
        if not missing:
            return
        if tokenizer != self.kind.tokenizer:
            cause = (
                f"The scores belong to another tokenizer ({self.kind.model}). A student needs the tokenizer of its "
                "teacher: model.tokenizer_name_or_path"
            )
        elif self._num_rows < self.kind.num_rows:
            cause = (
                f"Only {self._num_rows:,} of {self.kind.num_rows:,} rows are scored yet: run the same megatrain-tier "
                "score again, it continues"
            )
        else:
            cause = (
                "Score the rows of this very [[data.train]], with the same chat template, data.train_on and "
                f"data.max_length (the scores: {self.kind.max_length})"
            )
        raise DataError(
            str(self._folder),
            f"{len(missing):,} of {len(used):,} documents of data.train have no scores, the first is document "
            f"{missing[0]:,} ({dataset.starts[missing[0] + 1] - dataset.starts[missing[0]]:,} tokens)",
            cause,
        )

    @property
    def _num_rows(self) -> int:
        return sum(count for _, count, _ in _parts(self._folder / self.kind.formats[0]))

    def of_rows(self, rows: Sequence[Sequence[tuple[str, int]]], width: int) -> dict[str, torch.Tensor]:
        """Return the teacher's scores of the next token at each position of some rows, under ``TEACHER_KEYS``.

        Args:
            rows: key and length of each document, in the order of the row.
            width: positions of a row.

        Returns:
            [rows, width, k] int32 and fp32, and [rows, width] fp32; zeros at positions without scores.

        Raises:
            DataError: a document has no scores, or its scores contain a token outside the student's vocabulary.
        """
        shape = (len(rows), width)
        ids = np.zeros((*shape, self._top_k), dtype=np.int32)
        log_probs = np.zeros((*shape, self._top_k), dtype=np.float32)
        rest = np.zeros(shape, dtype=np.float32)
        for number, row in enumerate(rows):
            at = 0
            for key, length in row:
                positions, *found = self._read(key)
                places = at + positions - 1  # the position before a token predicts it
                ids[number, places], log_probs[number, places], rest[number, places] = self._likeliest(key, *found)
                at += length
        return dict(zip(TEACHER_KEYS, map(torch.from_numpy, (ids, log_probs, rest)), strict=True))

    def _read(self, key: str) -> list[Array]:
        if key not in self._index:
            raise DataError(str(self._folder), f"there are no scores of the document {key}")
        part, row = self._index[key]
        with _damage_explained(self._paths[part]):
            return self._parts[part].read(row, ("positions", "top_ids", "top_log_probs", "rest_log_probs"))

    def _likeliest(self, key: str, ids: Array, log_probs: Array, rest: Array) -> tuple[Array, Array, Array]:
        if ids.size and ids.max() >= self._vocab_size:
            raise DataError(
                str(self._folder),
                f"the scores of document {key} contain token id {int(ids.max()):,}, and the student has "
                f"{self._vocab_size:,} tokens",
                "A student needs the vocabulary of its teacher",
            )
        left_out = log_probs[:, self._top_k :]
        if left_out.shape[1]:
            for column in left_out.T:
                rest = np.logaddexp(rest, column)
        return ids[:, : self._top_k], log_probs[:, : self._top_k], rest


@contextmanager
def _damage_explained(path: Path) -> Iterator[None]:
    """Report which file is damaged if it cannot be read."""
    try:
        yield
    except ScoresError:
        raise
    except Exception as error:  # pyarrow and zarr raise many kinds
        text = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            str(path),
            f"this part of the scores cannot be read: {text}",
            "Delete it and run the same megatrain-tier score again: it makes what is missing",
        ) from error


def documents_of(
    loader_rows: Sequence[Sequence[int]], dataset: TokenDataset
) -> Iterator[tuple[int, int, int, npt.NDArray[np.int64]]]:
    """Yield (row, offset in it, document, scored positions) of the documents of rows, in the order of their labels."""
    for number, row in enumerate(loader_rows):
        at = 0
        for document in row:
            part = slice(int(dataset.starts[document]), int(dataset.starts[document + 1]))
            yield number, at, document, np.flatnonzero(dataset.trained[part])
            at += part.stop - part.start


def tokenizer_checksum(tokenizer: Any) -> str:
    """Return a checksum of the vocabulary and rules of a tokenizer."""
    return checksum(tokenizer.backend_tokenizer.to_str().encode())
