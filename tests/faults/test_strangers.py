"""Untrusted run folders, data and models, control characters in printed names, and secrets in the environment."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes.strange_values import VALUES, places_in
from megatrain.base.names import RANKS_NAME
from megatrain.checkpoint.document import Checkpoint, RankGeneration
from megatrain.checkpoint.inventory import find_checkpoint
from megatrain.checkpoint.listing import manifest_checksum, read_checkpoints, write_document
from megatrain.checkpoint.removal import forget_checkpoint
from megatrain.checkpoint.state import CheckpointError, RunState
from megatrain.data import files, images
from megatrain.data.files import read_file
from megatrain.data.rows_report import DataError, RowError
from megatrain.models.folder import ModelFolderError, TensorFile
from megatrain.run.folder import RunFolder
from megatrain_tier_cli.terminal import escape_controls
from processes.saved_run import NVME, ON_NVME, SavedRun, command_group, make_run
from tiered import GenerationError, checksum, list_generations
from tiered.errors import UnusableDirectoryError

TOKENS = {
    "HF_TOKEN": "hf_KeepThisOneToYourself",
    "WANDB_API_KEY": "wandb-KeepThisOneToYourself",
    "AWS_SECRET_ACCESS_KEY": "aws-KeepThisOneToYourself",
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    run = make_run(tmp_path_factory.mktemp("done"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in TOKENS.items():
            patch.setenv(name, value)
        result = run.run(more=NVME, placement=ON_NVME, steps=4)
    assert result.exit_code == 0, result.output
    return run


@pytest.fixture
def run(done: SavedRun, tmp_path: Path) -> SavedRun:
    return done.copy(tmp_path / "theirs")


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def test_no_secret_of_the_environment_is_written(done: SavedRun) -> None:
    written = [path for path in done.folder.rglob("*") if path.is_file()]
    assert len(written) > 20
    assert not [path for path in written if b"KeepThisOneToYourself" in path.read_bytes()]


def test_world_writable_folder_gives_a_warning(tmp_path: Path) -> None:
    """The run only warns, because the user may have set these permissions on purpose."""
    run = make_run(tmp_path)
    for folder, mode in ((run.out, 0o777), (run.out / "checkpoints", 0o1777), (run.folder / "drive", 0o757)):
        folder.mkdir()
        folder.chmod(mode)
    result = run.run(more=NVME, placement=ON_NVME, steps=1)
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.stdout.splitlines() if "every user" in line]
    assert line.startswith("warning: every user of this machine can write in ")
    assert line.endswith(f"chmod o-w {run.out} {run.folder / 'drive'}")
    (run.folder / "drive").chmod(0o755)
    run.out.chmod(0o755)
    assert "every user" not in run.run("--allow-config-change", more=NVME, placement=ON_NVME, steps=2).stdout


# -- checkpoints of several ranks ------------------------------------------------------------------------------------


def write_one(folder: Path, path: str, generation: int = 1, xxh3_64: str = "0" * 16, **meta: Any) -> None:
    """Write a document with one checkpoint of one rank. The checkpoint refers to a generation in ``path``."""
    ranks = (RankGeneration(path, generation, xxh3_64),)
    write_document(folder, [Checkpoint(folder, 9, ranks, meta)])


def listed(folder: Path) -> Checkpoint:
    return next(each for each in read_checkpoints(folder) if each.is_listed)


@pytest.mark.parametrize("path", ["../../mine/out/checkpoints", "ABSOLUTE", ".", "rank00001", "rank00000/../..", ""])
def test_rank_paths_outside_the_run_are_refused(path: str, run: SavedRun, done: SavedRun, tmp_path: Path) -> None:
    """Otherwise, `ckpt rm` on a stranger's folder could remove one of the user's own checkpoints."""
    mine = done.copy(tmp_path / "mine")
    before = contents(mine.folder)
    place = str(mine.out / "checkpoints") if path == "ABSOLUTE" else path
    write_one(run.out / "checkpoints", place, generation=2)
    for words in (["ls", run.out], ["verify", run.out], ["rm", run.out, "--step", "2"], ["rm", run.out, "--all"]):
        result = run.call("ckpt", *words)
        assert result.exit_code == 1 and "RANKS.json' is invalid" in result.output, result.output
    assert contents(mine.folder) == before


def test_removal_through_a_link_is_limited_to_sealed_files(run: SavedRun, done: SavedRun, tmp_path: Path) -> None:
    mine, folder = done.copy(tmp_path / "mine").out / "checkpoints", run.out / "checkpoints"
    generation = list_generations(mine)[0]
    (folder / "rank00000").symlink_to(mine, target_is_directory=True)
    write_one(folder, "rank00000", generation)
    forget_checkpoint(listed(folder))
    assert generation in list_generations(mine)
    with pytest.raises(StopIteration):
        listed(folder)
    # Users may link their own checkpoints from another drive. The document then has the checksum of the manifest.
    write_one(folder, "rank00000", generation, manifest_checksum(mine, generation))
    forget_checkpoint(listed(folder))
    assert generation not in list_generations(mine)


def state_of(run: SavedRun) -> dict[str, Any]:
    newest = max((run.out / "checkpoints/snap").glob("*/MANIFEST.json"))
    found: dict[str, Any] = json.loads(newest.read_text())["body"]["meta"]
    return found


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_state_is_read_or_refused(done: SavedRun, data: st.DataObject) -> None:
    meta = state_of(done)
    tree, key = data.draw(st.sampled_from(list(places_in(meta))))
    tree[key] = data.draw(VALUES)
    with contextlib.suppress(CheckpointError):
        state = RunState.from_meta(meta, where="here")
        assert isinstance(state.step, int)
        assert state.mean_losses is None or len(state.mean_losses) == 3


def test_complete_run_state_round_trips(done: SavedRun) -> None:
    meta = state_of(done)
    assert json.loads(json.dumps(RunState.from_meta(meta, where="here").to_meta())) == meta


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_document_of_ranks_is_read_or_refused(done: SavedRun, tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    write_one(folder, "rank00000", **state_of(done))
    document = json.loads((folder / RANKS_NAME).read_text())
    tree, key = data.draw(st.sampled_from(list(places_in(document["checkpoints"]))))
    tree[key] = data.draw(VALUES)
    document["xxh3_64"] = checksum(json.dumps(document["checkpoints"], sort_keys=True).encode())
    (folder / RANKS_NAME).write_text(json.dumps(document))
    with contextlib.suppress(CheckpointError, GenerationError):
        read_checkpoints(folder)
        find_checkpoint(folder)


# -- the folder of a run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["metrics.jsonl", "status.json", "status.tmp", "run.log", "config.resolved.toml"])
def test_a_run_writes_through_no_link(name: str, run: SavedRun, tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    (run.out / name).unlink(missing_ok=True)
    (run.out / name).symlink_to(mine)
    with pytest.raises(UnusableDirectoryError, match=rf"{re.escape(name)}' is a symbolic link"), RunFolder(run.out):
        pass
    result = run.run(more=NVME, placement=ON_NVME, steps=6)
    assert result.exit_code == 2 and "is a symbolic link" in result.output, result.output
    assert mine.read_text() == "mine"


# -- models ----------------------------------------------------------------------------------------------------------


def header(fields: Any, data: bytes = b"") -> bytes:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return len(text).to_bytes(8, "little") + text + data


HEADERS = {
    "overlapping": {"a": ["F32", [2], [0, 8]], "b": ["F32", [2], [4, 12]]},
    "behind the end": {"a": ["F32", [2], [0, 8]], "b": ["F32", [1 << 40], [8, 8 + (4 << 40)]]},
    "negative": {"a": ["F32", [2], [-8, 0]]},
    "negative sizes": {"a": ["F32", [-2, -1], [0, 8]]},
    "huge numbers": {"a": ["F32", [1 << 80], [0, 4 << 80]]},
    "infinite": {"a": ["F32", [2], [0, float("inf")]]},
    "no number": {"a": ["F32", [2], [0, float("nan")]]},
    "texts": {"a": ["F32", ["2"], ["0", "8"]]},
    "lists": {"a": [["F32"], [2], [0, 8]]},
    "one offset": {"a": ["F32", [2], [0]]},
    "a hole": {"a": ["F32", [1], [4, 8]]},
    "an unknown dtype": {"a": ["OBJECT", [2], [0, 8]]},
}


@pytest.mark.parametrize("name", HEADERS)
def test_malformed_safetensors_headers_are_refused(name: str, tmp_path: Path) -> None:
    names = ("dtype", "shape", "data_offsets")
    fields = {key: dict(zip(names, entry, strict=True)) for key, entry in HEADERS[name].items()}
    (tmp_path / "a.safetensors").write_bytes(header(fields, bytes(8)))
    if name == "texts":  # numbers in quotes are accepted
        assert TensorFile(tmp_path / "a.safetensors").records["a"].shape == (2,)
        return
    with pytest.raises(ModelFolderError):
        TensorFile(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        (99_999_999).to_bytes(8, "little") + b"{",
        header(b"[" * 50_000),
        header(b'{"a":' * 50_000),
        header(b"[]"),
        header(b"\xff\xfe"),
        header(b'{"a": 9' + b"9" * 5000 + b"}"),
    ],
)
def test_non_safetensors_files_are_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(data)
    with pytest.raises(ModelFolderError):
        TensorFile(tmp_path / "a.safetensors")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_header_of_safetensors_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    fields: dict[str, Any] = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    }
    tree, key = data.draw(st.sampled_from(list(places_in(fields))))
    tree[key] = data.draw(VALUES)
    (tmp_path / "a.safetensors").write_bytes(header(fields, bytes(32)))
    with contextlib.suppress(ModelFolderError):
        folder = TensorFile(tmp_path / "a.safetensors")
        for name in folder.records:
            folder.read(name)


# -- data ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_ROW_BYTES", 1 << 16)


def test_irregular_and_oversized_images_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", 1 << 16)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "small").write_bytes(bytes(1 << 16))
    (tmp_path / "large").write_bytes(bytes((1 << 16) + 1))
    (tmp_path / "link").symlink_to("/dev/zero")
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    for name, reason in (
        ("/dev/zero", "not a regular file"),
        ("link", "not a regular file"),
        ("pipe", "not a regular file"),
        (".", "not a regular file"),
        ("large", "more than 64.00 KiB"),
        ("sparse", "more than 64.00 KiB"),
        ("absent", "No such file or directory"),
    ):
        with pytest.raises(RowError, match=f"the image {tmp_path / name} cannot be read: {reason}. Paths are relative"):
            images.ImageRef.from_value(name, tmp_path, "rows line 1")
        with pytest.raises(DataError, match=f"the image cannot be read: {reason}. Restore it"):
            images.ImageRef(str(tmp_path / name), "0").read()
    ref = images.ImageRef.from_value("small", tmp_path, "rows line 1")
    assert ref.read() == bytes(1 << 16)


@pytest.mark.parametrize("name", ["bomb.jsonl.gz", "bomb.csv.gz", "bomb.parquet"])
def test_decompression_bomb_in_a_row_is_refused(name: str, tmp_path: Path, small_rows: None) -> None:
    path, text = tmp_path / name, "x" * (1 << 20)
    if name == "bomb.parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": [text] * 100}), path)
    else:
        packed = gzip.compress((json.dumps({"text": text}) if ".jsonl" in name else f'text\n"{text}"').encode())
        path.write_bytes(packed)
    assert path.stat().st_size < 1 << 17
    with pytest.raises(DataError, match=r"the row has more than 64|field larger than"):
        list(read_file(path))


def test_large_dictionary_column_is_read_row_by_row(tmp_path: Path, small_rows: None) -> None:
    import pyarrow
    import pyarrow.parquet

    texts = ["x" * 50_000] * 300 + ["y"]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "number": range(301)}), tmp_path / "rows.parquet")
    rows = [row for _, row in read_file(tmp_path / "rows.parquet")]
    assert [row["text"] for row in rows] == texts and [row["number"] for row in rows] == list(range(301))


@pytest.mark.parametrize("rows", ["texts", "messages", "a struct", "a map", "numbers", "plain texts"])
def test_decompression_bomb_in_a_list_column_is_refused(rows: str, tmp_path: Path, small_rows: None) -> None:
    """Two rows are read, and the third is refused before it is materialized."""
    import pyarrow
    import pyarrow.parquet

    def lists(count: int) -> Any:
        text = "x" * 100
        return {
            "texts": [text] * count,
            "plain texts": [text] * count,
            "messages": [{"role": "user", "content": text}] * count,
            "a struct": {"deep": [[text] * count]},
            "a map": dict.fromkeys(map(str, range(count)), text),
            "numbers": [1] * (12 * count),
        }[rows]

    kind = pyarrow.map_(pyarrow.string(), pyarrow.string()) if rows == "a map" else None
    column = pyarrow.array([lists(3), lists(300), lists(1000), lists(3)], kind)
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"rows": column}), path, use_dictionary=rows != "plain texts")
    assert path.stat().st_size < 1 << 15
    found: list[Any] = []
    with pytest.raises(DataError, match=r"rows.parquet row 3: the row has more than 64"):
        found += (row["rows"] for _, row in read_file(path))
    read = iter(read_file(path))
    assert [dict(row["rows"]) if kind else row["rows"] for _, row in (next(read), next(read))] == [lists(3), lists(300)]


def test_row_group_with_lists_larger_than_ram_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A billion equal numbers in a row need only a few bytes in a file. They are refused before decompression."""
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setattr(files, "_BYTES_PER_NESTED_VALUE", 1 << 30)
    pyarrow.parquet.write_table(pyarrow.table({"ids": [[1] * 1000] * 2}), tmp_path / "rows.parquet")
    with pytest.raises(
        DataError, match="row 1: the row group of 2 rows that starts here has 2,000 values in lists, too many"
    ):
        list(read_file(tmp_path / "rows.parquet"))


def test_list_larger_than_ram_when_decompressed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_BYTES_PER_LIST_CHARACTER", 1 << 20)
    (tmp_path / "bomb.json.gz").write_bytes(gzip.compress(json.dumps([{"text": "x" * (1 << 20)}]).encode()))
    with pytest.raises(DataError, match="too large for this machine's RAM"):
        list(read_file(tmp_path / "bomb.json.gz"))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=60), suffix=st.sampled_from([".jsonl", ".json", ".csv", ".parquet", ".arrow"]))
def test_arbitrary_bytes_parse_or_raise_data_error(tmp_path: Path, data: bytes, suffix: str) -> None:
    (tmp_path / f"rows{suffix}").write_bytes(data)
    with contextlib.suppress(DataError):
        list(read_file(tmp_path / f"rows{suffix}"))


# -- screens ---------------------------------------------------------------------------------------------------------

CLEAR, TITLE, CLIPBOARD = "\x1b[2J\x1b[H", "\x1b]0;owned\x07", "\x1b]52;c;ZWNobyBvd25lZA==\x07"
EVIL = f"evil{CLEAR}{TITLE}{CLIPBOARD}\x9b2J\x08\r\u202e"


@given(st.text(alphabet=st.sampled_from([*"a[]2Jm;8H\\", "\x1b", "\r", "\n", "\x07", "\x9b", "\u202e"]), max_size=40))
def test_shown_text_has_no_control_sequences(text: str) -> None:
    harmless = re.sub(r"\x1b\[(?:[0-9;]*m|\?25[lh])|\x1b\]8;[^\x00-\x1f]*\x1b\\", "", escape_controls(f"a{text}"))
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e]|\r(?!\n)", harmless)


def test_text_without_control_sequences_is_unchanged() -> None:
    text = "plain, \u00fcml\u00e4ut, \u65e5\u672c\u8a9e, \U0001f600\tand\n\x1b[31mred\x1b[0m"
    assert escape_controls(text) == text
    assert escape_controls("\r\x1b[Kreading block") == "\r\x1b[Kreading block"  # redraws a line


def assert_shown(output: str) -> None:
    for sign in ("\x1b[2J", "\x1b]", "\x07", "\x9b", "\x08", "\u202e"):
        assert sign not in output, output
    assert "evil" in output


def test_control_sequences_in_names_and_rows_are_escaped(tmp_path: Path, done: SavedRun) -> None:
    data = tmp_path / f"{EVIL.replace('/', '')}.jsonl"
    data.write_text(json.dumps({"text": f"evil {EVIL}"}) + "\n" + json.dumps({"nothing": EVIL}) + "\n")
    config = done.write_config()
    (tmp_path / "run.toml").write_text(config.read_text().replace('"data.txt"', json.dumps(str(data))))
    shutil.copytree(done.folder / "model", tmp_path / "model")
    runner = CliRunner()
    for words in (["check"], ["data", "preview"], ["data", "stats"], ["run"]):
        result = runner.invoke(command_group(), [*words, str(tmp_path / "run.toml")])
        assert_shown(result.output)


@pytest.mark.parametrize("command", ["status", "report", "plan"])
def test_control_sequences_in_run_names_are_escaped(command: str, run: SavedRun, tmp_path: Path) -> None:
    folder = tmp_path / f"evil{CLEAR}{TITLE}"
    os.rename(run.folder, folder)
    renamed = SavedRun(folder)
    name = 'run_name = "evil\\u001b[2J"'
    config = renamed.write_config(more=NVME, placement=ON_NVME, top=name)
    place = config if command == "plan" else renamed.out
    result = renamed.call(command, place)
    for sign in ("\x1b[2J", "\x1b]", "\x07"):
        assert sign not in result.output, result.output


def test_html_report_escapes_names(run: SavedRun, tmp_path: Path) -> None:
    script = "<script>alert(1)</script>"
    for path in (run.out / "status.json", run.out / "metrics.jsonl", run.out / "config.resolved.toml"):
        text = path.read_text()
        for word in ("test", "constant", "pretrain"):
            text = text.replace(word, script)
        path.write_text(text)
    result = run.call("report", run.out, "--html", tmp_path / "page.html")
    if result.exit_code == 0:
        page = (tmp_path / "page.html").read_text()
        assert script not in page
    else:
        assert "Traceback" not in result.output and result.exit_code in (1, 2), result.output
