"""Scores on disk are read back as they were written, for any sizes of parts and row groups."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow.parquet
import pytest

from megatrain.base.batch_keys import TEACHER_KEYS
from megatrain.data import scores as scores_module
from megatrain.data.scores import DocumentScores, ScoreFolder, ScoreKind, TeacherScores

Format = Literal["parquet", "zarr"]
K, VOCAB = 3, 50
#: Number of scored tokens of each document, in two parts. One document has none.
PARTS = ([4, 1, 0, 7, 2], [3, 5, 1, 1, 1, 9, 2, 6, 1, 4, 2])


def document(number: int, length: int) -> DocumentScores:
    rng = np.random.default_rng(number)
    numbers = rng.standard_normal((2, length, K)).astype(np.float32)
    return DocumentScores(
        key=f"{rng.integers(1 << 62):016x}",
        document=number,
        source=0,
        num_tokens=length + 1,
        positions=np.arange(1, length + 1, dtype=np.int32),
        token_ids=rng.integers(VOCAB, size=length, dtype=np.int32),
        log_probs=numbers[0, :, 0],
        top_ids=rng.integers(VOCAB, size=(length, K), dtype=np.int32),
        top_log_probs=numbers[1],
        rest_log_probs=numbers[0, :, 1],
        embedding=np.zeros(0, dtype=np.float32),
    )


@pytest.mark.parametrize("form", ["parquet", "zarr"])
@pytest.mark.parametrize("group_nbytes", [1, 100, 1 << 20], ids=["a row", "some rows", "all rows"])
def test_every_document_is_read_back(
    form: Format, group_nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores_module, "_GROUP_NBYTES", group_nbytes)
    texts = dict.fromkeys(("model", "weights", "dtype", "attention", "tokenizer", "data"), "")
    numbers = dict.fromkeys(("mlp_rows", "max_length", "data_seed"), 0)
    kind = ScoreKind(
        **texts,
        **numbers,
        split_experts=False,
        packing=False,
        num_rows=sum(map(len, PARTS)),
        top_k=K,
        temperature=1.0,
        embeddings="none",
        formats=(form,),
    )
    folder, written = ScoreFolder(tmp_path / "scores", kind), []
    for lengths in PARTS:
        documents = [document(len(written) + at, length) for at, length in enumerate(lengths)]
        folder.write(len(written), len(documents), documents)
        written += documents
    if form == "parquet":
        files = [pyarrow.parquet.ParquetFile(path) for path in sorted((folder.path / form).iterdir())]
        groups = [[file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)] for file in files]
        assert [sum(each) for each in groups] == [len(lengths) for lengths in PARTS]
        assert {1: max(map(max, groups)) == 1, 100: max(map(len, groups)) > 1, 1 << 20: len(groups[1]) == 1}[
            group_nbytes
        ]
    teacher = TeacherScores(folder.path, K, VOCAB)
    order = [*written, *written]
    random.Random(7).shuffle(order)
    for one, other in zip(order[::2], order[1::2], strict=True):
        rows = [[(each.key, each.num_tokens) for each in (one, other)]]
        found = [each[0].numpy() for each in map(teacher.batch_scores(rows, 24).get, TEACHER_KEYS)]
        start = 0
        for each in (one, other):
            for tensor, expected in zip(found, (each.top_ids, each.top_log_probs, each.rest_log_probs), strict=True):
                assert np.array_equal(tensor[start : start + len(each.positions)], expected), each.document
            start += each.num_tokens
