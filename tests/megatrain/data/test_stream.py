"""Streamed rows equal rows that are read at once, from any step on, and are mixed according to the sources' weights."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from megatrain.data import shards as shards_module
from megatrain.data import stream_window
from megatrain.data.chat import RowEncoder
from megatrain.data.collate import Collator
from megatrain.data.dataset import DataSpec
from megatrain.data.formats import Document
from megatrain.data.loader import BatchLoader, StepBatch
from megatrain.data.packing import pack_documents
from megatrain.data.row_order import LoaderPosition
from megatrain.data.rows_report import DataError
from megatrain.data.shards import Shards
from megatrain.data.stream import StreamDataset, changed_sources, open_dataset
from megatrain.data.stream_order import StreamOrder
from megatrain.data.table import DataConfig, DatasetConfig
from megatrain.data.text_rows import TEXTS
from oracles import shards as written
from oracles.rows_in_memory import encode_rows

SEED = 11
MAX_LENGTH = 24
WORDS = ["whale", "ship", "sea", "captain", "harpoon", "deck", "mast", "sail", "wind", "water", "cabin", "coffin"]
START = LoaderPosition()


def texts(count: int, name: str = "") -> list[str]:
    """Return different texts with a number and one to twenty words. Some texts are longer than a row."""
    rng = random.Random(count)
    return [f"{name}{number} " + " ".join(rng.choices(WORDS, k=rng.randint(1, 20))) for number in range(count)]


def write(folder: Path, kind: str, rows: Sequence[str], per_shard: int = 7) -> None:
    folder.mkdir(parents=True)
    parts = [rows[start : start + per_shard] for start in range(0, len(rows), per_shard)]
    written.WRITERS[kind](folder, [[{"text": row, "number": len(row)} for row in part] for part in parts])


def loader_of(
    tokenizer: Any,
    *sources: Mapping[str, Any],
    packing: bool | str = True,
    rows: int = 2,
    count: int = 3,
    position: LoaderPosition = START,
    said: list[str] | None = None,
    max_steps: int = 1000,
    **keys: Any,
) -> BatchLoader:
    table = DataConfig(
        train=tuple(DatasetConfig(**source) for source in sources),
        streaming=True,
        max_length=MAX_LENGTH,
        packing=packing,
        train_on="all",
        **keys,
    )
    data = DataSpec(table, TEXTS, seed=SEED)
    dataset = open_dataset(data, tokenizer, ([] if said is None else said).append)
    assert isinstance(dataset, StreamDataset)
    shape = data.batch_shape(rows, count)
    order = StreamOrder(dataset, shape, SEED, max_steps=max_steps, num_embeddings=10**6)
    loader = BatchLoader(order, Collator(shape))
    loader.seek(position)
    return loader


def flat(batch: StepBatch) -> list[Any]:
    return [(name, values.tolist()) for micro in batch.micro_batches for name, values in sorted(micro.items())]


def take(loader: BatchLoader, count: int) -> list[Any]:
    return [flat(batch) for batch in itertools.islice(loader, count)]


def build_expected_rows(
    tokenizer: Any, rows: Sequence[str], per_shard: int, window: int, *, packing: bool
) -> list[list[int]]:
    """Build the batches' rows for the first pass over the source by hand, from all rows. Return each row's tokens."""
    num_shards = -(-len(rows) // per_shard)
    order = np.random.default_rng((SEED, 4, 0, 0)).permutation(num_shards)
    drawn = [row for shard in order for row in rows[shard * per_shard : (shard + 1) * per_shard]]
    found: list[list[int]] = []
    for number, start in enumerate(range(0, len(drawn) - window + 1, window)):
        part = [Document(text, "") for text in drawn[start : start + window]]
        whole = encode_rows(part, RowEncoder(tokenizer, train_on="all"), max_length=MAX_LENGTH)
        documents = np.random.default_rng((SEED, 5, number)).permutation(len(whole))
        members, starts = documents, np.arange(len(documents) + 1)
        if packing:
            table = pack_documents(documents, whole.lengths()[documents], MAX_LENGTH)
            members, starts = table.members, table.starts
        for row in np.random.default_rng((SEED, 6, number)).permutation(len(starts) - 1):
            of_row = members[starts[row] : starts[row + 1]]
            found.append(
                [int(token) for each in of_row for token in whole.tokens[whole.starts[each] : whole.starts[each + 1]]]
            )
    return found


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("kind", written.WRITERS)
def test_streamed_rows_equal_rows_read_at_once(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, packing: bool
) -> None:
    monkeypatch.setattr(stream_window, "WINDOW_ROWS", 10)
    rows = texts(40)
    write(tmp_path / "shards", kind, rows)
    expected = build_expected_rows(tokenizer, rows, 7, 10, packing=packing)
    num_steps = len(expected) // 6
    assert num_steps >= 2
    found: list[list[int]] = []
    for batch in itertools.islice(loader_of(tokenizer, {"path": str(tmp_path / "shards")}, packing=packing), num_steps):
        assert batch.num_real_tokens > 0 and batch.num_trained_tokens > 0
        step: list[list[int]] = [[]] * 6
        for number, micro in enumerate(batch.micro_batches):
            for place, ids in enumerate(micro["input_ids"].tolist()):
                step[place * 3 + number] = ids
        found += step
    for ids, wanted in zip(found, expected, strict=False):
        assert ids[: len(wanted)] == wanted and not any(ids[len(wanted) :])


def test_every_row_is_read_once_before_any_repeats(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_window, "WINDOW_ROWS", 41)
    write(tmp_path / "shards", "jsonl", [f"{number} sea" for number in range(41)], per_shard=5)
    said: list[str] = []
    loader = loader_of(tokenizer, {"path": str(tmp_path / "shards")}, packing=False, rows=1, count=1, said=said)
    assert len(said) == 0
    numbers = [int(tokenizer.decode(ids).split()[0]) for _, ids in _documents(loader, 82)]
    assert sorted(numbers[:41]) == sorted(numbers[41:]) == list(range(41))
    assert numbers[:41] != numbers[41:] and "starts again, with its shards in another order" in said[0]


def test_end_of_a_source_is_reported_after_its_rows_are_used(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window is read ahead of the steps. Here, one window holds three passes over the source."""
    monkeypatch.setattr(stream_window, "WINDOW_ROWS", 30)
    write(tmp_path / "shards", "jsonl", [f"{number} sea" for number in range(10)], per_shard=3)
    said: list[str] = []
    loader = loader_of(tokenizer, {"path": str(tmp_path / "shards")}, packing=False, rows=2, count=1, said=said)
    counts = []
    for _ in range(20):
        next(loader)
        counts.append(len(said))
    assert counts == [0] * 5 + [1] * 15  # row 10, the first that may repeat, is in step 6
    name = f"data.train.0 ({tmp_path / 'shards'})"
    assert said == [f"{name} has been read to its end and starts again, with its shards in another order"]


@pytest.mark.parametrize("kind", ["jsonl", "gz", "zst"])
def test_blank_lines_are_skipped(tmp_path: Path, kind: str) -> None:
    """A cursor counts rows, not lines. From each row on, all remaining rows are read, with their line numbers."""
    lines = ["", '{"text": "a"}', "", "  ", '{"text": "b"}', '{"text": "c"}', "\t", '{"text": "d"}', ""]
    content = "\n".join(lines).encode()
    if kind == "gz":
        content = gzip.compress(content)
    if kind == "zst":
        content = pyarrow.compress(content, codec="zstd", asbytes=True)
    (tmp_path / f"rows.jsonl{'' if kind == 'jsonl' else '.' + kind}").write_bytes(content)
    shards = Shards(str(tmp_path))
    expected = [("line 2", "a"), ("line 5", "b"), ("line 6", "c"), ("line 8", "d")]
    for start in range(5):
        found = [(" ".join(where.split()[-2:]), value["text"]) for where, value in shards.rows(0, start)]
        assert found == expected[start:]


def _documents(loader: BatchLoader, count: int) -> list[tuple[int, list[int]]]:
    found = []
    for step, batch in enumerate(itertools.islice(loader, count)):
        for micro in batch.micro_batches:
            found += [(step, ids) for ids in micro["input_ids"].tolist()]
    return found


@pytest.mark.parametrize("packing", [True, False, "concat"])
def test_stream_cursor_resumes_exactly(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: bool | str
) -> None:
    """The stream resumes from several steps, across ends of windows, shards and sources, and changes of weights."""
    monkeypatch.setattr(stream_window, "WINDOW_ROWS", 16)
    write(tmp_path / "a", "parquet", texts(30, "a"))
    write(tmp_path / "b", "zst", texts(9, "b"), per_shard=4)
    sources = (
        {"path": str(tmp_path / "a"), "weight": 3.0, "weight_from_step": {"4": 1.0}},
        {"path": str(tmp_path / "b"), "weight_from_step": {"9": 0.0}},
    )
    whole = loader_of(tokenizer, *sources, packing=packing)
    positions, expected = [whole.position], []
    for batch in itertools.islice(whole, 16):
        expected.append(flat(batch))
        positions.append(batch.position)
    for step in [*random.Random(0).sample(range(16), 6), 0, 15]:
        saved = json.loads(json.dumps({"cursor": positions[step].cursor}))
        again = loader_of(tokenizer, *sources, packing=packing, position=LoaderPosition(0, step, saved["cursor"]))
        assert take(again, 16 - step) == expected[step:], step


@pytest.mark.parametrize("window", [32, 29, 13])
def test_weights_follow_their_schedule(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """The sources' shares of rows are within one row of the weights, and change at the exact step.

    Windows of 29 and 13 rows begin within a step of eight rows.
    """
    monkeypatch.setattr(stream_window, "WINDOW_ROWS", window)
    for name in "abc":
        write(tmp_path / name, "jsonl", [f"{name} sea" for _ in range(50)], per_shard=20)
    sources = (
        {"path": str(tmp_path / "a"), "weight": 2.0, "weight_from_step": {"7": 0.5}},
        {"path": str(tmp_path / "b"), "weight": 1.0, "weight_from_step": {"12": 0.0}},
        {"path": str(tmp_path / "c"), "weight": 1.0, "weight_from_step": {"7": 0.0, "12": 3.5}},
    )
    of_letter = {tokenizer(f"{name} sea")["input_ids"][0]: name for name in "abc"}
    loader = loader_of(tokenizer, *sources, packing=False, rows=4, count=2)
    counts = [Counter[str]() for _ in range(20)]
    for step, ids in _documents(loader, 20):
        counts[step][of_letter[ids[0]]] += 1
    for first, end, shares in (
        (0, 7, {"a": 0.5, "b": 0.25, "c": 0.25}),
        (7, 12, {"a": 1 / 3, "b": 2 / 3, "c": 0.0}),
        (12, 20, {"a": 0.125, "b": 0.0, "c": 0.875}),
    ):
        total = sum(counts[first:end], Counter())
        assert sum(total.values()) == 8 * (end - first)
        for name, share in shares.items():
            assert abs(total[name] - share * 8 * (end - first)) <= 1.0 + 1e-9, (first, name)
            assert share > 0 or total[name] == 0


# -- file accesses -------------------------------------------------------------------------------------------------


class CountingFiles(MemoryFileSystem):
    """File system in RAM that records which files are opened, and can fail as a server would."""

    protocol = "counted"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    opened: ClassVar[list[str]] = []
    num_failures: ClassVar[int] = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("counted://").strip("/")

    def _open(self, path: str, *arguments: Any, **options: Any) -> Any:
        type(self).opened.append(path.rpartition("/")[2])
        if type(self).num_failures:
            type(self).num_failures -= 1
            raise OSError("connection reset by peer")
        return super()._open(path, *arguments, **options)


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[CountingFiles]:
    """Write fifty shards of eight rows to counted://rows, and return their file system."""
    fsspec.register_implementation("counted", CountingFiles, clobber=True)
    write(tmp_path / "shards", "jsonl", texts(400), per_shard=8)
    CountingFiles.store.clear()
    for path in (tmp_path / "shards").iterdir():
        CountingFiles().pipe_file(f"/rows/{path.name}", path.read_bytes())
    CountingFiles.opened.clear()
    CountingFiles.num_failures = 0
    monkeypatch.setattr(stream_window, "WINDOW_ROWS", 16)
    monkeypatch.setattr(shards_module, "_FIRST_RETRY_S", 0.001)
    return CountingFiles


def wait_for_windows() -> None:
    """Wait for the windows that are prepared ahead."""
    for thread in threading.enumerate():
        if thread.name == "data-window":
            thread.join()


def test_streaming_does_not_read_all_shards_first(tokenizer: Any, counted: type[CountingFiles]) -> None:
    loader = loader_of(tokenizer, {"path": "counted://rows"}, packing=False, rows=1, count=2)
    assert counted.opened == [], "shards are listed, not read"
    position = [batch.position for batch in itertools.islice(loader, 30)][-1]
    wait_for_windows()
    num_before = len(set(counted.opened))
    assert 30 * 2 / 8 <= num_before < 12
    counted.opened.clear()
    again = loader_of(tokenizer, {"path": "counted://rows"}, packing=False, rows=1, count=2, position=position)
    next(again)
    wait_for_windows()
    assert 1 <= len(set(counted.opened)) <= 5, "used rows are not read again"


def test_failing_server_is_retried(tokenizer: Any, counted: type[CountingFiles]) -> None:
    undisturbed = loader_of(tokenizer, {"path": "counted://rows"})
    expected = take(undisturbed, 3)
    wait_for_windows()  # so that no other thread uses up one of the failures
    counted.num_failures = 3
    said: list[str] = []
    assert take(loader_of(tokenizer, {"path": "counted://rows"}, said=said), 3) == expected
    assert len(said) == 3 and "connection reset by peer" in said[0]
    counted.num_failures = 1000
    with pytest.raises(DataError, match="connection reset by peer"):
        take(loader_of(tokenizer, {"path": "counted://rows"}), 1)


def test_fingerprint_depends_on_shards_and_weights(tokenizer: Any, tmp_path: Path) -> None:
    write(tmp_path / "a", "jsonl", texts(9))
    source = {"path": str(tmp_path / "a")}
    own = loader_of(tokenizer, source).fingerprint()
    assert own == loader_of(tokenizer, {"path": str(tmp_path / "a" / "*.jsonl")}).fingerprint()
    assert own != loader_of(tokenizer, source | {"weight": 2.0}).fingerprint()
    (tmp_path / "a" / "part-009.jsonl").write_text('{"text": "one more"}\n')
    assert own != loader_of(tokenizer, source).fingerprint()


@pytest.mark.parametrize(
    ("name", "contents", "said"),
    [
        ("a.jsonl", b'{"text": "sea"}\n{"text": ', "a.jsonl line 2: broken JSON"),
        ("a.jsonl.gz", b"\x1f\x8b\x08\x00torn", "a.jsonl.gz: it cannot be read"),
        ("a.jsonl.zst", b"(\xb5/\xfdtorn", "a.jsonl.zst: it cannot be read"),
        ("a.parquet", b"PAR1torn", "a.parquet: it cannot be read"),
        ("shard.00000.mds", b"", "shard.00000.mds: MDS shards are not supported. Convert them to .jsonl or .parquet"),
        ("shard.00000.mds.zstd", b"", "shard.00000.mds.zstd: MDS shards are not supported"),
        ("a.csv", b"text\nsea\n", "no file there can be streamed"),
        ("a.jsonl", b"\n\n", "none of its shards has a row"),
    ],
)
def test_unreadable_shards_are_named(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, contents: bytes, said: str
) -> None:
    monkeypatch.setattr(shards_module, "_FIRST_RETRY_S", 0.0)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).write_bytes(contents)
    with pytest.raises(DataError) as error:
        next(loader_of(tokenizer, {"path": str(tmp_path / "a")}))
    assert said in str(error.value), error.value


def test_invalid_rows_are_dropped_and_counted(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such rows are dropped and counted. If there are more than the config allows, the run ends with an error."""
    monkeypatch.setattr(stream_window, "WINDOW_ROWS", 20)
    folder = tmp_path / "a"
    folder.mkdir()
    rows = [json.dumps({"text": "sea"} if number % 4 else ["no object"]) for number in range(40)]
    (folder / "a.jsonl").write_text("\n".join(rows))
    said: list[str] = []
    take(loader_of(tokenizer, {"path": str(folder)}, said=said), 2)
    assert len([text for text in said if text.startswith("warning:") and "a row must be an object" in text]) == 1
    with pytest.raises(DataError, match=r"more than data\.max_dropped = 0\.1"):
        take(loader_of(tokenizer, {"path": str(folder)}, max_dropped=0.1), 1)
    with pytest.raises(DataError, match="a row must be an object"):
        take(loader_of(tokenizer, {"path": str(folder)}, bad_rows="error"), 1)


@pytest.mark.parametrize("streaming", [True, False])
def test_sources_that_cannot_be_read_are_listed(tmp_path: Path, streaming: bool) -> None:
    """Unreadable sources do not raise an error, because an error would hide the other changed sources."""
    (tmp_path / "a.jsonl").write_text('{"text": "sea"}\n')
    (tmp_path / "file").touch()
    paths = [str(tmp_path / "gone"), str(tmp_path / "a.jsonl")]
    train = [{"path": path, "format": "text"} for path in paths]
    cache_dir = str(tmp_path / "file" / "tokens")  # a folder that cannot be created
    table = DataConfig.model_validate({"train": train, "streaming": streaming, "cache_dir": cache_dir})
    gone, changed = changed_sources(table, ["0", "1"])
    assert gone.startswith(f"data.train.0: cannot be compared: {paths[0]}: there is no such file or folder"), gone
    assert changed.startswith("data.train.1: the "), changed
