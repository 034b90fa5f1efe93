"""Scores on disk are read back as they were written, for any sizes of parts and row groups."""

from __future__ import annotations

import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet
import pytest
import zarr

from megatrain.base.batch_keys import TEACHER_KEYS
from megatrain.data import scores as scores_module
from megatrain.data.rows_report import DataError, DataReport
from megatrain.data.scores import DocumentScores, ScoreFolder, ScoreKind, ScoresError, TeacherScores, read_kind
from megatrain.data.token_dataset import TokenDataset

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


KIND: dict[str, Any] = {
    "model": "teacher",
    "weights": "w",
    "dtype": "bfloat16",
    "attention": "sdpa",
    "mlp_rows": 0,
    "split_experts": False,
    "tokenizer": "t",
    "data": "d",
    "max_length": 64,
    "packing": False,
    "data_seed": 3,
    "num_rows": 20,
    "top_k": K,
    "temperature": 2.0,
    "embeddings": "none",
    "formats": ("parquet",),
}


def kind_of(**changes: Any) -> ScoreKind:
    return ScoreKind(**{**KIND, **changes})


@pytest.mark.parametrize("form", ["parquet", "zarr"])
@pytest.mark.parametrize("group_nbytes", [1, 100, 1 << 20], ids=["a row", "some rows", "all rows"])
def test_every_document_is_read_back(
    form: Format, group_nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores_module, "_GROUP_NBYTES", group_nbytes)
    kind = kind_of(num_rows=sum(map(len, PARTS)), formats=(form,))
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


def test_folder_states_the_origin_of_its_scores(tmp_path: Path) -> None:
    folder = tmp_path / "scores"
    ScoreFolder(folder, kind_of())
    assert json.loads((folder / "scores.json").read_text()) == {"version": 1, **KIND, "formats": ["parquet"]}
    assert read_kind(folder) == kind_of()
    assert sorted(path.name for path in folder.iterdir()) == ["parquet", "scores.json"]
    ScoreFolder(folder, kind_of())
    for changes, names in (
        ({"model": "x", "weights": "x"}, "the model, the model's weights"),
        (
            {"dtype": "x", "attention": "x", "mlp_rows": 1},
            "precision.compute_dtype, the attention kernel, model.mlp_rows",
        ),
        ({"split_experts": True, "tokenizer": "x"}, "model.split_experts, the tokenizer"),
        ({"data": "x", "num_rows": 21, "max_length": 1}, "the rows of [[data.train]], data.max_length"),
        ({"packing": True, "data_seed": 4, "num_rows": 19}, "data.packing, data_seed, the rows of [[data.train]]"),
        ({"top_k": 1, "temperature": 1.0}, "score.top_k, score.temperature"),
        ({"embeddings": "mean", "formats": ("zarr",)}, "score.embeddings, score.formats"),
    ):
        with pytest.raises(ScoresError) as refused:
            ScoreFolder(folder, kind_of(**changes))
        assert str(refused.value) == (
            f"{folder} contains scores that differ from this config in {names}. Set another output_dir, or delete that "
            "folder"
        )


def test_folders_without_scores_are_refused(tmp_path: Path) -> None:
    folder, path = tmp_path / "scores", tmp_path / "scores/scores.json"
    missing = f"there are no scores in {folder} (no scores.json)"
    with pytest.raises(ScoresError) as refused:
        read_kind(folder)
    assert str(refused.value) == missing
    (folder / "scores").mkdir(parents=True)
    (folder / "scores/scores.json").write_text("{}")
    with pytest.raises(ScoresError) as refused:
        read_kind(folder)
    assert str(refused.value) == f"{missing}. They may be in {folder}/scores"
    with pytest.raises(ScoresError) as refused:
        ScoreFolder(folder, kind_of())
    assert str(refused.value) == f"{folder} contains other files. Set another output_dir"
    for text, problem in (
        ('{"version": 2}', "has version 2, but this program supports version 1"),
        ("{}", "cannot be read: 'version'"),
        ("[]", "cannot be read: pop expected at most 1 argument, got 0"),
    ):
        path.write_text(text)
        with pytest.raises(ScoresError) as refused:
            read_kind(folder)
        assert str(refused.value).startswith(f"{path} {problem}" if text != "[]" else f"{path} cannot be read: ")
    for name in ("version", "formats"):
        path.write_text(json.dumps({key: value for key, value in {"version": 1, **KIND}.items() if key != name}))
        with pytest.raises(ScoresError) as refused:
            read_kind(folder)
        assert str(refused.value) == f"{path} cannot be read: '{name}'"


def test_missing_rows_are_those_that_one_format_lacks(tmp_path: Path) -> None:
    kind = kind_of(formats=("parquet", "zarr"))
    folder = ScoreFolder(tmp_path / "scores", kind)
    assert folder.missing_rows() == [range(20)]
    for start, count in ((3, 4), (7, 2), (12, 5)):
        folder.write(start, count, [document(start + at, 2) for at in range(count)])
    assert folder.missing_rows() == [range(3), range(9, 12), range(17, 20)]
    names = [f"part-{start:012d}-{count:09d}" for start, count in ((3, 4), (7, 2), (12, 5))]
    assert sorted(path.name for path in (folder.path / "parquet").iterdir()) == [f"{name}.parquet" for name in names]
    assert sorted(path.name for path in (folder.path / "zarr").glob("part*")) == names
    shutil.rmtree(folder.path / "zarr" / names[1])
    assert folder.missing_rows() == [range(3), range(7, 12), range(17, 20)]
    folder.write(5, 3, [document(5 + at, 2) for at in range(3)])  # replaces the parts of rows 3 to 9
    for name in ("parquet", "zarr"):
        starts = [path.name[:17] for path in sorted((folder.path / name).glob("part*"))]
        assert starts == ["part-000000000005", "part-000000000012"]
    folder.write(0, 5, [document(at, 2) for at in range(5)])
    folder.write(8, 4, [document(8 + at, 2) for at in range(4)])
    folder.write(17, 3, [document(17 + at, 2) for at in range(3)])
    assert folder.missing_rows() == []
    (folder.path / ".writing/rest").write_text("")
    assert ScoreFolder(folder.path, kind).missing_rows() == [] and not (folder.path / ".writing").exists()


@pytest.mark.parametrize("form", ["parquet", "zarr"])
def test_every_value_of_a_document_is_stored(tmp_path: Path, form: Format) -> None:
    documents = [
        replace(document(4, 3), source=1, embedding=np.array([0.5, 2.0], dtype=np.float32)),
        replace(document(9, 0), num_tokens=6, embedding=np.array([1.5, 3.0], dtype=np.float32)),
    ]
    folder = ScoreFolder(tmp_path / "scores", kind_of(embeddings="mean", formats=(form,)))
    folder.write(0, 2, documents)
    (path,) = (folder.path / form).glob("part*")
    per_token = ("positions", "token_ids", "log_probs", "top_ids", "top_log_probs", "rest_log_probs")
    if form == "parquet":
        table = pyarrow.parquet.read_table(path)
        rows = table.to_pylist()
        assert table.column_names == ["key", "document", "source", "num_tokens", "perplexity", *per_token, "embedding"]
        found = {name: rows[0][name] for name in per_token}
        assert all(rows[1][name] == [] for name in per_token)
        values = {name: [row[name] for row in rows] for name in table.column_names if name not in per_token}
    else:
        group = zarr.open_group(str(path), mode="r")
        assert group["starts"][:].tolist() == [0, 3, 3]
        found = {name: group[name][:].tolist() for name in per_token}
        values = {
            name: group[name][:].tolist() for name in ("document", "source", "num_tokens", "perplexity", "embedding")
        }
        values["key"] = [f"{key:016x}" for key in group["key"][:].tolist()]
        assert set(group.array_keys()) == {*values, *per_token, "starts"}
    assert found == {name: getattr(documents[0], name).tolist() for name in per_token}
    perplexities = values.pop("perplexity")
    assert values == {
        "key": [each.key for each in documents],
        "document": [4, 9],
        "source": [1, 0],
        "num_tokens": [4, 6],
        "embedding": [[0.5, 2.0], [1.5, 3.0]],
    }
    mean = sum(float(value) for value in documents[0].log_probs) / 3
    assert perplexities[0] == pytest.approx(math.exp(-mean)) and math.isnan(perplexities[1])
    plain = ScoreFolder(tmp_path / "plain", kind_of(top_k=0, formats=("parquet",)))
    plain.write(0, 1, documents[:1])
    (path,) = (plain.path / "parquet").iterdir()
    assert pyarrow.parquet.read_schema(path).names == [
        *("key", "document", "source", "num_tokens", "perplexity", "positions", "token_ids", "log_probs")
    ]


def test_fewer_tokens_are_added_to_the_rest(tmp_path: Path) -> None:
    given = document(4, 2)
    folder = ScoreFolder(tmp_path / "scores", kind_of())
    folder.write(0, 1, [given])
    found = TeacherScores(folder.path, 1, VOCAB).batch_scores([[], [(given.key, 3)]], 5)
    ids, log_probs, rest = (values.numpy() for values in map(found.get, TEACHER_KEYS) if values is not None)
    assert ids.shape == log_probs.shape == (2, 5, 1) and rest.shape == (2, 5)
    assert not ids[0].any() and not log_probs[0].any() and not rest[0].any() and not rest[1, 2:].any()
    assert ids[1, :2, 0].tolist() == given.top_ids[:, 0].tolist()
    assert log_probs[1, :2, 0].tolist() == given.top_log_probs[:, 0].tolist()
    total = np.exp(given.rest_log_probs) + np.exp(given.top_log_probs[:, 1:]).sum(1)
    assert rest[1, :2] == pytest.approx(np.log(total), rel=1e-5)
    names = {TeacherScores(folder.path, top_k, VOCAB).fingerprint() for top_k in (1, 2)}
    folder.write(1, 1, [document(5, 2)])
    assert len({*names, TeacherScores(folder.path, 1, VOCAB).fingerprint()}) == 3


def test_unusable_scores_are_explained(tmp_path: Path) -> None:
    given = document(4, 2)
    folder = ScoreFolder(tmp_path / "scores", kind_of())
    folder.write(0, 1, [given])
    largest = int(given.top_ids.max())
    assert TeacherScores(folder.path, K, largest + 1).batch_scores([[(given.key, 3)]], 3)
    with pytest.raises(DataError) as refused:
        TeacherScores(folder.path, K, largest).batch_scores([[(given.key, 3)]], 3)
    assert str(refused.value) == (
        f"{folder.path}: the scores of document {given.key} contain token id {largest}, but the student has only "
        f"{largest} tokens. A student needs the vocabulary of its teacher"
    )
    with pytest.raises(DataError) as refused:
        TeacherScores(folder.path, K, VOCAB).batch_scores([[("0" * 16, 3)]], 3)
    assert str(refused.value) == f"{folder.path}: there are no scores for document {'0' * 16}"
    (path,) = (folder.path / "parquet").iterdir()
    path.write_bytes(b"PAR1")
    with pytest.raises(DataError) as refused:
        TeacherScores(folder.path, K, VOCAB)
    assert str(refused.value).startswith(f"{path}: this part of the scores cannot be read: ")
    assert str(refused.value).endswith(
        ". Delete it and run the same megatrain-tier score command again, which scores the missing rows"
    )


def test_documents_without_scores_are_counted(tmp_path: Path) -> None:
    starts = np.array([0, 4, 9, 15, 22], dtype=np.int64)
    tokens, trained = np.arange(22, dtype=np.int32), np.ones(22, dtype=np.bool_)
    dataset = TokenDataset(tokens, trained, starts, DataReport(4, 4, 0, 0, 0, 22, 22))
    folder = ScoreFolder(tmp_path / "scores", kind_of(num_rows=4))
    scored = [replace(document(at, 2), key=dataset.document_key(at)) for at in (0, 2)]
    folder.write(0, 3, scored)
    start = f"{folder.path}: 2 of 4 documents of data.train have no scores (first: document 1, with 5 tokens). "

    def refusal(data: TokenDataset, tokenizer: str = "t") -> str:
        with pytest.raises(DataError) as refused:
            TeacherScores(folder.path, K, VOCAB).check_coverage(data, tokenizer)
        return str(refused.value)

    assert refusal(dataset, "other") == start + (
        "The scores belong to another tokenizer (teacher). A student needs the tokenizer of its teacher: set "
        "model.tokenizer_name_or_path"
    )
    assert refusal(dataset) == start + (
        "Only 3 of 4 rows have been scored: run the same megatrain-tier score command again to continue"
    )
    folder.write(3, 1, [document(3, 2)])
    assert refusal(dataset) == start + (
        "Score exactly these [[data.train]] rows, with the same chat template, data.train_on and data.max_length (the "
        "scores have 64)"
    )
    assert refusal(replace(dataset, in_use=np.array([2, 3]))).startswith(
        f"{folder.path}: 1 of 2 documents of data.train have no scores (first: document 3, with 7 tokens). "
    )
    TeacherScores(folder.path, K, VOCAB).check_coverage(replace(dataset, in_use=np.array([0, 2])), "other")
