"""``megatrain-tier export``: its options, its messages and the files that it writes."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from processes import warm
from processes.saved_run import ROOT, SavedRun, cli_module, command_words, make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    """Return a finished bf16 run with checkpoints of steps 2 and 4. Tests only read it."""
    made = make_run(tmp_path_factory.mktemp("trained") / "w")
    result = made.run(steps=4, dtype="bfloat16")
    assert result.exit_code == 0, result.output
    return made


def test_export_writes_the_newest_checkpoint_by_default(run: SavedRun, tmp_path: Path) -> None:
    result = run.call("export", run.out, tmp_path / "out")
    assert result.exit_code == 0, result.output
    first, *others = result.output.splitlines()
    before, folder, option = others[0].rsplit(maxsplit=2)
    assert first == f"model  {tmp_path / 'out'}" and before.endswith("megatrain-tier generate")
    assert option == "--interactive"
    assert Path(folder).resolve() == (tmp_path / "out").resolve()  # may be relative to the working directory
    said = "\n".join(others)
    for tool in ("vllm serve", "lm_eval --model hf --model_args pretrained=", "convert_hf_to_gguf.py"):
        assert f"{tool}" in said
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (run.out / "final" / name).read_bytes(), name


def test_next_commands_name_the_folder_and_the_base_of_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    next_lines = cli_module("export").next_lines
    assert next_lines(folder) == [
        "next   megatrain-tier generate 'a b' --interactive",
        "   or  vllm serve 'a b'",
        "   or  lm_eval --model hf --model_args pretrained='a b' --tasks hellaswag",
        "   or  python llama.cpp/convert_hf_to_gguf.py 'a b'",
    ]
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base model"}')
    assert next_lines(folder) == [
        "next   megatrain-tier generate 'a b' --interactive",
        "   or  vllm serve 'org/base model' --enable-lora --lora-modules tuned='a b'",
        "   or  lm_eval --model hf --model_args pretrained='org/base model',peft='a b' --tasks hellaswag",
        "   or  python llama.cpp/convert_lora_to_gguf.py --base 'org/base model' 'a b'",
    ]
    monkeypatch.chdir("/usr/lib")
    assert next_lines(Path("/x"))[0] == "next   megatrain-tier generate /x --interactive", "shorter than ../../x"


def test_export_options_select_dtype_shard_size_and_step(run: SavedRun, tmp_path: Path) -> None:
    folder = run.out / "checkpoints/snap/00000001"
    result = run.call(
        "export", folder, tmp_path / "out", "--dtype", "float32", "--max-shard-size", "100kB", "--step", 2, "--json"
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"model": str(tmp_path / "out")}
    shards = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(shards) == 4
    assert {value.dtype for shard in shards for value in load_file(shard).values()} == {torch.float32}
    assert json.loads((tmp_path / "out/export.json").read_text())["step"] == 2


def test_an_earlier_export_is_kept(run: SavedRun, tmp_path: Path) -> None:
    """Only --overwrite replaces an earlier export. If the source is `final`, the checkpoint of its step is exported."""
    assert run.call("export", run.out, tmp_path / "out", "--step", 2).exit_code == 0
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    refused = run.call("export", run.out / "final", tmp_path / "out")
    assert refused.exit_code == 2
    assert "contains a model of step 2 from an earlier export; nothing was written" in refused.stderr
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    result = run.call("export", run.out / "final", tmp_path / "out", "--overwrite")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "out/export.json").read_text())["step"] == 4


def test_export_accepts_a_moved_model_folder(run: SavedRun, tmp_path: Path) -> None:
    (run.folder / "model").rename(run.folder / "moved")
    try:
        result = run.call("export", run.out, tmp_path / "out")
        assert result.exit_code == 1 and "--model FOLDER" in result.stderr
        shutil.copytree(run.folder / "moved", tmp_path / "copy")
        result = run.call("export", run.out, tmp_path / "out", "--model", tmp_path / "copy")
        assert result.exit_code == 0, result.output
    finally:
        (run.folder / "moved").rename(run.folder / "model")


def read_terminal(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    except OSError:  # EIO: the other end is closed
        return b""


def test_progress_on_a_terminal_only(run: SavedRun, tmp_path: Path) -> None:
    main, end = pty.openpty()
    words = [*command_words(), "export", str(run.out), str(tmp_path / "out")]
    with warm.Popen(words, stdout=subprocess.PIPE, stderr=end, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        os.close(end)
        shown = b"".join(iter(lambda: read_terminal(main), b"")).decode()
        assert process.stdout.read().startswith(f"model  {tmp_path / 'out'}\nnext   megatrain-tier generate ")
    os.close(main)
    assert process.returncode == 0
    assert " of 497.25 KiB  model.embed_tokens" in shown and "497.25 KiB of 497.25 KiB  reading it back" in shown


def test_export_of_a_final_model_is_refused_as_already_exported(run: SavedRun, tmp_path: Path) -> None:
    run = run.copy(tmp_path / "w")
    assert run.call("ckpt", "rm", run.out, "--all", "--yes").exit_code == 0
    final = run.out / "final"
    result = run.call("export", final, tmp_path / "model")
    assert result.exit_code == 1, result.output
    copy = f"'{final}' is already the exported model of step 4: cp -r {final} {tmp_path / 'model'}"
    assert copy in " ".join(result.output.split()), result.output


def test_usage(run: SavedRun, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").touch()
    out = tmp_path / "out"
    for words, code, message in (
        ([run.out], 2, "Missing argument 'OUT'"),
        ([tmp_path / "nowhere", out], 2, "does not exist"),
        ([tmp_path, out], 1, "holds no checkpoint"),
        ([run.out, out, "--step", 3], 1, "no checkpoint of step 3. Saved steps: 2, 4"),
        ([run.out, out, "--dtype", "int8"], 2, "'int8' is not one of"),
        ([run.out, out, "--max-shard-size", "5"], 2, '--max-shard-size: 5 has no unit. Write "5GiB" or "5GB"'),
        ([run.out, out, "--max-shard-size", "0GB"], 2, "must be at least 1 byte"),
        ([run.out, out, "--model", tmp_path / "nowhere"], 2, "does not exist"),
        ([run.out, tmp_path / "mine"], 2, "is neither empty nor"),
        ([run.out, out, "--ema"], 1, "no average of the weights"),
    ):
        result = run.call("export", *words)
        assert result.exit_code == code and message in result.stderr, (words, result.output)
        assert "Traceback" not in result.output and not out.exists()
