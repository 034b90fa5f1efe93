"""Wrong data: files that are broken, truncated, empty, missing or of unknown type, and wrong sources and settings."""

from __future__ import annotations

import gzip
import io
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from wrong_inputs.break_rows import CODE, SOUND, _case
from wrong_inputs.mutate_config import SEED
from wrong_inputs.workplace import ROWS, Workplace, WrongInput

GOOD = json.dumps(ROWS[0])
#: Name -> broken JSON for the second of three lines. A valid JSON value that is not an object would only be dropped.
BROKEN_LINES = {
    "cut off": GOOD[:30], "no JSON": "hello", "single quotes": GOOD.replace('"', "'"), "an extra comma": GOOD + ",",
    "two objects": GOOD + GOOD,
    "a closing bracket": "]", "deeply nested": "[" * 100_000, "a number of 5000 digits": '{"text": ' + "7" * 5000 + "}",
    "no quotes": "{messages: []}", "a control character": '{"text": "\x01"}',
    "a comment": "// no", "an open string": '{"messages": "',
}  # fmt: skip
#: Name -> (file name, contents of the file, further strings that the message must contain).
TEXT_FILES: dict[str, tuple[str, bytes, tuple[str, ...]]] = {
    "json cut off": ("x.json", b'[{"text": "a"}, {"text"', ("line 1",)),
    "json that is no list": ("x.json", b'{"text": "a"}\n', ()),
    "json number": ("x.json", b"7", ()),
    "json text": ("x.json", b'"a"', ()),
    "json of numbers": ("x.json", b"[1, 2]", ("row 1",)),
    "json empty list": ("x.json", b"[]", ()),
    "json deeply nested": ("x.json", b"[" * 100_000, ()),
    "json number of 5000 digits": ("x.json", b'[{"text": ' + b"7" * 5000 + b"}]", ()),
    "jsonl that is a list": ("x.jsonl", b'[\n{"text": "a"}\n]\n', ("line 1",)),
    "csv with a cell too many": ("x.csv", b"prompt,completion\na,b\na,b,c\n", ("line 3",)),
    "csv with a cell too few": ("x.csv", b"prompt,completion\na,b\na\n", ("line 3",)),
    "csv with an open quote": ("x.csv", b'prompt,completion\na,"b\n', ("line",)),
    "csv with a bad quote": ("x.csv", b'prompt,completion\na,"b"c\n', ("line 2",)),
    "csv without rows": ("x.csv", b"prompt,completion\n", ()),
    "csv without columns that are known": ("x.csv", b"a,b\n1,2\n", ("row 1",)),
    "csv with a column twice": ("x.csv", b"prompt,completion,completion\na,b,c\n", ("completion",)),
    "txt of spaces": ("x.txt", b" \n \n", ()),
    "gzip that is none": ("x.jsonl.gz", b"not gzip", ()),
    "gzip cut off": ("x.jsonl.gz", gzip.compress(GOOD.encode() * 50, mtime=0)[:-20], ()),
    "gzip damaged": ("x.txt.gz", gzip.compress(bytes(range(200)) * 9, mtime=0)[:40] + b"\0" * 60, ()),
    "gzip of bytes": ("x.txt.gz", gzip.compress(b"caf\xe9", mtime=0), ()),
    "a sheet": ("x.xlsx", b"PK\x03\x04", (".xlsx",)),
    "a pickle": ("x.pkl", b"\x80\x04.", (".pkl",)),
    "yaml": ("x.yaml", b"- text: a\n", (".yaml",)),
    "a zip": ("x.zip", b"PK\x03\x04", (".zip",)),
    "no ending": ("rows", b'{"text": "a"}\n', ()),
    "zstd": ("x.jsonl.zst", b"\x28\xb5\x2f\xfd", (".zst",)),
}  # fmt: skip


def _file(name: str, content: bytes, *parts: str) -> Callable[[Workplace], Sequence[str]]:
    def spoil(work: Workplace) -> Sequence[str]:
        work.file(name, content)
        work.train_on(name)
        return name, *parts

    return spoil


def text_cases() -> Iterator[WrongInput]:
    for what, line in BROKEN_LINES.items():
        content = f"{GOOD}\n{line}\n{GOOD}\n".encode()
        yield _case(f"a line is {what}", "data: broken JSON", _file("x.jsonl", content, "x.jsonl line 2"))
    bad = GOOD.encode().replace(b"Ishmael", b"Ishma\xebl")
    content = b"\n".join((GOOD.encode(), GOOD.encode(), bad, b""))
    yield _case("a line is not UTF-8", "data: broken JSON", _file("x.jsonl", content, "x.jsonl line 3"))
    for ending in ("jsonl", "json", "csv", "tsv", "txt", "parquet", "arrow", "jsonl.gz"):
        empty = gzip.compress(b"", mtime=0) if ending == "jsonl.gz" else b""
        yield _case(f"empty .{ending}", "data: empty file", _file(f"x.{ending}", empty))
        yield _case(f"a picture as .{ending}", "data: other bytes", _file(f"x.{ending}", b"\x89PNG\r\n\x1a\n" * 9))
    for ending in ("jsonl", "json", "csv", "txt"):
        content = '{"text": "caf\u00e9"}\n'.encode("latin-1")
        yield _case(f"latin-1 .{ending}", "data: other bytes", _file(f"x.{ending}", content))
        yield _case(
            f"UTF-16 .{ending}", "data: other bytes", _file(f"x.{ending}", content.decode("latin-1").encode("utf-16"))
        )
    for what, (name, content, parts) in TEXT_FILES.items():
        yield _case(what, "data: bad file", _file(name, content, *parts))


def _table(ending: str, columns: dict[str, Any]) -> bytes:
    """Return the bytes of a Parquet or Arrow file."""
    import pyarrow
    import pyarrow.feather
    import pyarrow.parquet

    table, sink = pyarrow.table(columns), io.BytesIO()
    if ending == "parquet":
        pyarrow.parquet.write_table(table, sink)
    else:
        pyarrow.feather.write_feather(table, sink, compression="uncompressed")
    return sink.getvalue()


def table_cases() -> Iterator[WrongInput]:
    """Yield Parquet and Arrow files that are truncated, empty or not UTF-8, or have wrong columns or types."""
    columns: dict[str, dict[str, Any]] = {
        "unknown columns": {"a": ["x"], "b": ["y"]},
        "numbers for text": {"text": [1, 2]},
        "nulls for text": {"text": [None, None]},
        "bytes for text": {"text": [b"x", b"y"]},
        "structures for messages": {"messages": [{"role": "user", "content": "x"}]},
        "texts for tokens": {"input_ids": [["a"], ["b"]]},
        "no rows": {"text": []},
        "no columns": {},
    }

    def table(ending: str, values: dict[str, Any]) -> Callable[[Workplace], Sequence[str]]:
        def spoil(work: Workplace) -> Sequence[str]:
            work.config.put("data.bad_rows", '"error"')
            return _file(f"x.{ending}", _table(ending, values))(work)

        return spoil

    for ending in ("parquet", "arrow"):
        for what, values in columns.items():
            yield _case(f"{ending} with {what}", "data: bad table", table(ending, values))
        generator = random.Random(f"{SEED} {ending}")
        for share in sorted(generator.uniform(0.02, 0.98) for _ in range(6)):
            yield _case(f"{ending} cut off at {share:.0%}", "data: bad table", _cut(ending, share))
    yield _case("arrow text that is not UTF-8", "data: bad table", _not_utf8("arrow"))
    yield _case("parquet text that is not UTF-8", "data: bad table", _not_utf8("parquet"))


def _cut(ending: str, share: float) -> Callable[[Workplace], Sequence[str]]:
    def spoil(work: Workplace) -> Sequence[str]:
        content = _table(ending, {"text": [f"Call me {number}." for number in range(400)]})
        return _file(f"x.{ending}", content[: int(len(content) * share)])(work)

    return spoil


def _not_utf8(ending: str) -> Callable[[Workplace], Sequence[str]]:
    def spoil(work: Workplace) -> Sequence[str]:
        text = "Call me Ishmael"
        content = _table(ending, {"text": [text]}).replace(text.encode(), b"Call me Ishma\xff\xff")
        return _file(f"x.{ending}", content)(work)

    return spoil


def source_cases() -> Iterator[WrongInput]:
    """Yield ``[[data.train]]`` tables with wrong sources."""
    kind = "data: wrong source"

    def named(path: str, *parts: str, **keys: str) -> Callable[[Workplace], Sequence[str]]:
        def spoil(work: Workplace) -> Sequence[str]:
            (work.folder / "nothing").mkdir()
            (work.folder / "dangling.jsonl").symlink_to(work.folder / "nowhere.jsonl")
            work.file("notes/notes.md", "x")
            work.file("splits/test.jsonl", f"{GOOD}\n")
            work.file("splits/validation.jsonl", f"{GOOD}\n")
            work.train_on(path, **keys)
            return parts or (path,)

        return spoil

    sources: dict[str, tuple[Any, ...]] = {
        "missing file": ("date.jsonl",),
        "missing file of a folder": ("data/date.jsonl",),
        "a link to nothing": ("dangling.jsonl",),
        "a pattern that matches nothing": ("*.parquet",),
        "a pattern with a bracket": ("[x.jsonl",),
        "an empty folder": ("nothing",),
        "a folder without data": ("notes",),
        "a folder of other splits": ("splits", "splits", "split ="),
        "a hub name": ("nobody/nothing",),
        "a file below a file": ("rows.jsonl/x.jsonl",),
        "a web address": ("https://example.org/x.jsonl", "example.org/x.jsonl"),
        "a path with a zero byte": ("x\\u0000.jsonl", ".jsonl"),
    }
    for what, (path, *parts) in sources.items():
        yield _case(what, kind, named(path, *parts))
    yield _case("a split that is not there", kind, named("splits", "splits", '"train"', split='"train"'))
    yield _case("a split of a file", kind, named("rows.jsonl", "rows.jsonl", "split", split='"test"'))
    yield _case("a subset of a file", kind, named("rows.jsonl", "rows.jsonl", "subset", subset='"main"'))
    yield _case(
        "a column that is not there",
        kind,
        named("rows.jsonl", "rows.jsonl line 1", columns='{ prompt = "question" }', format='"prompt_completion"'),
    )
    yield _case(
        "a column of another type",
        kind,
        named("rows.jsonl", "rows.jsonl line 1", columns='{ text = "messages" }', format='"text"'),
    )
    yield _case("chats as text", kind, named("rows.jsonl", "rows.jsonl line 1", format='"text"'))
    yield _case("a txt file of messages", kind, named("x.txt", "x.txt", format='"messages"'))


def setting_cases() -> Iterator[WrongInput]:
    """Yield wrong settings for data. Most of them leave nothing to train on."""
    kind = "data: nothing trained"

    def put(*parts: str, **keys: str) -> Callable[[Workplace], Sequence[str]]:
        def spoil(work: Workplace) -> Sequence[str]:
            for key, value in keys.items():
                work.config.put(f"data.{key.replace('__', '.')}", value)
            return parts

        return spoil

    yield _case("shorter than every question", kind, put("data.train", "max_length", max_length="4"))
    yield _case("longer rows are errors", kind, put("rows.jsonl line 1", max_length="8", overlong='"error"'))
    yield _case("longer rows are dropped", kind, put("data.train", max_length="8", overlong='"drop"'))
    yield _case("a weight that leaves nothing", kind, put("data.train", "weight", train__weight="0.01"))
    yield _case("missing rows to evaluate on", kind, put("nowhere.jsonl", eval__path='"nowhere.jsonl"'))

    def chats_as_text(work: Workplace) -> Sequence[str]:
        work.config.put("task", '"pretrain"')
        return "rows.jsonl line 1", "sft"

    def mixed(work: Workplace) -> Sequence[str]:
        work.rows("rows.jsonl", [*SOUND.values(), {"body": "x"}])
        return (f"rows.jsonl line {len(SOUND) + 1}",)

    def put_cache_below_file(work: Workplace) -> Sequence[str]:
        work.config.put("data.cache_dir", '"rows.jsonl/cache"')
        return ("rows.jsonl/cache",)

    yield _case("chats for pretraining", kind, chats_as_text)
    yield _case("mixed formats, one unknown", kind, mixed)
    yield WrongInput("the cache is below a file", kind, CODE, put_cache_below_file, ("run",))


def cases() -> Iterator[WrongInput]:
    yield from text_cases()
    yield from table_cases()
    yield from source_cases()
    yield from setting_cases()
