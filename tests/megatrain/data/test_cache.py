"""The token cache: entries are found by content, complete or absent, shared by processes, and limited in total size."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.config.schema import RunConfig
from megatrain.data import cache as cache_module
from megatrain.data import encoding
from megatrain.data.cache import TokenCache, cache_folder
from megatrain.data.dataset import load_dataset
from megatrain.data.encoding import load_tokenizer
from megatrain.data.packing import BatchShape
from megatrain.data.rows_report import DataError
from megatrain.data.token_dataset import TokenDataset, content_checksum
from megatrain.training.resolve import resolve_data
from oracles.rows_in_memory import loader_of
from processes import warm

MODEL = Path(__file__).parents[3] / "examples/quickstart/model"
TEXT = Path(__file__).parents[3] / "examples/quickstart/loomings.txt"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    lines = [line for line in TEXT.read_text().splitlines() if line.strip()]
    path.write_text("".join(json.dumps({"prompt": line[:20], "completion": line[20:] or "x"}) + "\n" for line in lines))
    long_ago = 1_000_000_000
    os.utime(path, (long_ago, long_ago))
    return path


def make_config(path: Path, folder: Path | str, **data: Any) -> RunConfig:
    source = {"path": str(path), **data.pop("source", {})}
    return RunConfig.model_validate(
        {
            "task": "sft",
            "output_dir": "out",
            "model": {"model_name_or_path": str(MODEL)},
            "data": {"train": [source], "max_length": 64, "cache_dir": str(folder), **data},
        }
    )


def load(config: RunConfig, messages: list[str] | None = None) -> TokenDataset:
    on_message = [].append if messages is None else messages.append
    return load_dataset(resolve_data(config), load_tokenizer(str(MODEL)), on_message)


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if (path / "manifest.json").exists())


def arrays_equal(a: TokenDataset, b: TokenDataset) -> bool:
    pairs = zip((a.tokens, a.trained, a.starts), (b.tokens, b.trained, b.starts), strict=True)
    return all(np.array_equal(one, other) for one, other in pairs)


def test_cached_data_equals_uncached_data(data: Path, tmp_path: Path) -> None:
    first, again = (load(make_config(data, tmp_path / "cache")) for _ in range(2))
    plain = load(make_config(data, "none"))
    assert arrays_equal(first, plain)
    assert first.fingerprint() == again.fingerprint() == plain.fingerprint()
    assert first.report == again.report == plain.report
    assert first.largest_id == plain.largest_id == int(plain.tokens.max())
    assert first.source_starts == plain.source_starts == (0, len(plain))
    assert isinstance(again.tokens, np.memmap)
    assert not isinstance(plain.tokens, np.memmap)
    assert first.fingerprint() == content_checksum(plain.tokens, plain.trained, plain.starts)


def test_reading_batches_keeps_no_pages_of_the_files(data: Path, tmp_path: Path) -> None:
    dataset = load(make_config(data, tmp_path / "cache"))
    loader = loader_of(dataset, BatchShape(4, 1, 64, packing=True), data_seed=1)
    batches = [next(loader) for _ in range(3)]
    assert 500 < sum(batch.num_real_tokens for batch in batches) <= 3 * 4 * 64
    mappings = re.findall(r"tokens\.int32\n(?:.*\n)*?Rss: +(\d+) kB", Path("/proc/self/smaps").read_text())
    assert mappings
    assert set(mappings) == {"0"}


def test_cached_tokens_are_reused(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(data, tmp_path / "cache")
    fingerprint = load(config).fingerprint()
    monkeypatch.setattr(encoding, "_batches", lambda rows: pytest.fail("tokenized again"))
    monkeypatch.setattr("megatrain.data.token_dataset.content_checksum", lambda *arrays: pytest.fail("read again"))
    assert load(config).fingerprint() == fingerprint
    moved = tmp_path / "moved.jsonl"
    data.rename(moved)
    assert load(make_config(moved, tmp_path / "cache")).fingerprint() == fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"max_length": 32},
        {"train_on": "all"},
        {"overlong": "drop"},
        {"bad_rows": "error"},
        {"source": {"max_samples": 5}},
        {"source": {"format": "prompt_completion"}},
        {"source": {"columns": {"prompt": "completion", "completion": "prompt"}}},
    ],
)
def test_options_that_change_tokens_make_another_entry(data: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    load(make_config(data, tmp_path / "cache"))
    load(make_config(data, tmp_path / "cache", **change))
    assert len(entries(tmp_path / "cache")) == 2


@pytest.mark.parametrize("change", [{"packing": False}, {"source": {"weight": 2.0}}])
def test_options_that_do_not_change_tokens_share_the_cache_entry(
    data: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    load(make_config(data, tmp_path / "cache"))
    load(make_config(data, tmp_path / "cache", **change))
    assert len(entries(tmp_path / "cache")) == 1


def test_changed_contents_make_another_entry(data: Path, tmp_path: Path) -> None:
    config = make_config(data, tmp_path / "cache")
    before = load(config)
    stamp = data.stat()
    text = data.read_text()
    data.write_text(text.replace("Ishmael", "Ishmaxl"))  # same size
    os.utime(data, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    after = load(config)
    assert before.fingerprint() != after.fingerprint()
    assert len(entries(tmp_path / "cache")) == 2


def test_a_file_that_was_just_written_is_read_each_time(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    folder = tmp_path / "cache"
    folder.mkdir()
    path.write_text("one")
    stamp = path.stat()
    first = TokenCache(folder).file_checksum(path)
    path.write_text("two")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # as with a clock that is too coarse to tell them apart
    assert TokenCache(folder).file_checksum(path) != first
    os.utime(path, (1_000_000_000, 1_000_000_000))
    assert TokenCache(folder).file_checksum(path) == TokenCache(folder).file_checksum(path)
    assert len(list((folder / "checksums").iterdir())) == 1


def test_another_template_makes_another_entry(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    config = make_config(path, tmp_path / "cache")
    tokenizer = load_tokenizer(str(MODEL))
    for template in ("", " "):
        tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]" + template + "{{ m.content }}\n{% endfor %}"
        load_dataset(resolve_data(config), tokenizer)
    assert len(entries(tmp_path / "cache")) == 2


@pytest.mark.parametrize("name", ["tokens.int32", "trained.bool", "starts.int64", "manifest.json"])
def test_a_damaged_entry_is_made_again(data: Path, tmp_path: Path, name: str) -> None:
    config = make_config(data, tmp_path / "cache")
    before = load(config)
    (entry,) = entries(tmp_path / "cache")
    path = entry / name
    path.write_bytes(path.read_bytes()[:-5])
    assert load(config).fingerprint() == before.fingerprint()
    assert entries(tmp_path / "cache") == [entry]


def test_refused_data_leaves_no_cache_entry(data: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no field `messages`"):
        load(make_config(data, tmp_path / "cache", source={"format": "messages"}))
    assert not entries(tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.partial*"))


def test_files_of_an_entry_are_flushed_before_its_name_exists(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut must not leave an entry with files of the right sizes but without contents."""
    flushed: list[str] = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(fd: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name.rpartition(".")[0])
        fsync(fd)

    def noted_rename(source: Path, target: Path) -> None:
        flushed.append("named")
        rename(source, target)

    monkeypatch.setattr(cache_module.os, "fsync", noted_fsync)
    monkeypatch.setattr(cache_module.os, "rename", noted_rename)
    load(make_config(data, tmp_path / "cache"))
    (made,) = entries(tmp_path / "cache")
    before = flushed[: flushed.index("named")]
    assert {path.stem for path in made.iterdir()} <= set(before)


def test_flushing_tokens_in_small_parts_gives_equal_data(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "_FLUSH_TOKENS", 100)
    monkeypatch.setattr(encoding, "_MAX_CALL_ROWS", 3)
    small = load(make_config(data, tmp_path / "cache"))
    monkeypatch.undo()
    assert arrays_equal(small, load(make_config(data, "none")))


def test_a_long_text_in_pieces_is_one_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(TEXT, "none")
    whole = load(config)
    monkeypatch.setattr("megatrain.data.files._PIECE_CHARACTERS", 1000)
    pieces = load(config)
    assert pieces.report.num_rows == 1
    assert pieces.report.num_documents == -(-pieces.report.num_tokens // 64)
    assert pieces.lengths()[:-1].tolist() == [64] * (len(pieces) - 1)
    assert pieces.begins_row.tolist() == [True] + [False] * (len(pieces) - 1)
    assert abs(pieces.report.num_tokens - whole.report.num_tokens) < 0.02 * whole.report.num_tokens
    tokenizer = load_tokenizer(str(MODEL))
    assert tokenizer.decode(pieces.tokens.tolist()) == tokenizer.decode(whole.tokens.tolist())


CHILD = """
import sys, time
from pathlib import Path
sys.path[:0] = {paths!r}
import test_cache
from megatrain.data import encoding
real = encoding._batches
def slow(rows):
    for batch in real(rows):
        print("encoding", flush=True)
        time.sleep({seconds})
        yield batch
encoding._batches = slow
encoding._ROWS_AT_ONCE = 20
config = test_cache.make_config(Path({data!r}), {folder!r})
messages = []
print(test_cache.load(config, messages).fingerprint(), messages, flush=True)
"""


def start_child(data: Path, folder: Path, seconds: float) -> subprocess.Popen[str]:
    paths = [str(Path(__file__).parents[number]) for number in (3, 2, 0)]
    code = CHILD.format(paths=paths, data=str(data), folder=str(folder), seconds=seconds)
    return warm.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_two_processes_make_one_entry(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    first = start_child(data, folder, 0.15)
    assert first.stdout is not None
    assert first.stdout.readline() == "encoding\n"
    messages: list[str] = []
    fingerprint = load(make_config(data, folder), messages).fingerprint()
    out, _ = first.communicate(timeout=60)
    assert fingerprint in out
    assert messages == ["another process tokenizes the same data; waiting for it"]
    assert len(entries(folder)) == 1


def test_partial_cache_of_a_killed_process_is_ignored(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    child = start_child(data, folder, 30.0)
    assert child.stdout is not None
    assert child.stdout.readline() == "encoding\n"
    assert list(folder.glob("*.partial"))
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=60)
    assert not entries(folder)
    assert load(make_config(data, folder)).fingerprint() == load(make_config(data, "none")).fingerprint()
    assert not list(folder.glob("*.partial"))


def test_threads_may_load_at_once(data: Path, tmp_path: Path) -> None:
    found: list[str] = []
    config = make_config(data, tmp_path / "cache")
    threads = [threading.Thread(target=lambda: found.append(load(config).fingerprint())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len(set(found)) == len(entries(tmp_path / "cache")) == 1


def test_cache_is_bounded_and_evicts_the_oldest(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    load(make_config(data, folder))
    (first,) = entries(folder)
    size = sum(file.stat().st_size for file in first.iterdir())
    limit = f"{5 * size // 2}B"
    second = load(make_config(data, folder, train_on="all", max_cache_size=limit))
    assert len(entries(folder)) == 2
    (other,) = set(entries(folder)) - {first}
    for path, when in ((first, 2_000_000_000), (other, 1_900_000_000)):
        os.utime(path / "manifest.json", (when, when))
    load(make_config(data, folder, overlong="drop", max_cache_size=limit))
    assert first in entries(folder)
    assert other not in entries(folder)
    assert int(second.tokens.sum()) > 0  # a process that has mapped the entry can still read it


def test_too_small_cache_limit_is_refused(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with pytest.raises(DataError, match=r"the tokenized data is larger than data.max_cache_size = 1.00 KiB. Raise it"):
        load(make_config(data, folder, max_cache_size="1KiB"))
    assert not entries(folder)


def test_full_drive_is_reported(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_module.os, "fsync", full)
    with pytest.raises(DataError, match=r"tokenized data cannot be written: No space left on device. Free space, or"):
        load(make_config(data, tmp_path / "cache"))
    assert not list((tmp_path / "cache").glob("*.partial*"))


def test_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder("auto", messages.append) == tmp_path / "xdg/megatrain-tier/tokens"
    assert cache_folder("none", messages.append) is None
    assert cache_folder(str(tmp_path / "mine"), messages.append) == tmp_path / "mine"
    assert (tmp_path / "mine").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/x: data.cache_dir cannot be written: Not a directory. Name another"):
        cache_folder(str(tmp_path / "file/x"), messages.append)
    assert not messages
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cache_folder("auto", messages.append) is None
    assert messages == [
        f"{tmp_path}/file/megatrain-tier/tokens cannot be written (Not a directory): tokens are kept in RAM. "
        "data.cache_dir names another folder"
    ]
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder("auto", messages.append) == tmp_path / "home/.cache/megatrain-tier/tokens"
    assert len(messages) == 1


def test_a_folder_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(fcntl, "flock", refuse)
    messages: list[str] = []
    with pytest.raises(DataError) as refused:
        cache_folder(str(tmp_path), messages.append)
    assert str(refused.value).startswith(
        f"{tmp_path}: data.cache_dir cannot be written: '{tmp_path}' cannot be locked: No locks available."
    )
    assert not messages
    assert cache_folder("auto", messages.append) is None
    assert messages[0].startswith(f"{tmp_path}/xdg/megatrain-tier/tokens cannot be written ('{tmp_path}/xdg/")


def test_a_folder_that_another_process_locks_can_be_used(tmp_path: Path) -> None:
    held = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert cache_folder(str(tmp_path), pytest.fail) == tmp_path
    finally:
        os.close(held)


def test_a_checksum_is_stored_with_size_time_and_inode(tmp_path: Path) -> None:
    """A stored checksum is used only if all of them are unchanged."""
    path, folder = tmp_path / "a.txt", tmp_path / "cache"
    folder.mkdir()
    path.write_text("one")
    os.utime(path, (1_000_000_000, 1_000_000_000))
    expected = TokenCache(folder).file_checksum(path)
    (record,) = (folder / "checksums").iterdir()
    stat = path.stat()
    stamp = [3, 1_000_000_000 * 10**9, stat.st_ino, stat.st_dev]
    assert json.loads(record.read_text()) == {"stamp": stamp, "checksum": expected}
    record.write_text(json.dumps({"stamp": stamp, "checksum": "stored"}))
    assert TokenCache(folder).file_checksum(path) == "stored"
    for index in range(4):
        changed = [value + (position == index) for position, value in enumerate(stamp)]
        record.write_text(json.dumps({"stamp": changed, "checksum": "stored"}))
        assert TokenCache(folder).file_checksum(path) == expected
    other = tmp_path / "other.txt"
    other.write_text("one")
    os.utime(other, (1_000_000_000, 1_000_000_000))
    assert TokenCache(folder).file_checksum(other) == expected
    assert len(list((folder / "checksums").iterdir())) == 2
    with pytest.raises(DataError, match=r"none: the file cannot be read: No such file or directory. Check its perm"):
        TokenCache(folder).file_checksum(tmp_path / "none")
