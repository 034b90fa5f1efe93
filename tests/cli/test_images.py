"""`check`, `plan` and `data preview` support images. Invalid folders and rows give a message and an exit code."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from click.testing import Result

from oracles.image_models import make_folder, write_rows
from processes.saved_run import SavedRun, make_run

ROWS = [[(40, 60)], [], [(64, 64), (33, 70)]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    made = tmp_path_factory.mktemp("images")
    make_folder("llava", made)
    write_rows(made / "data", ROWS)
    torch.set_num_threads(before)
    return made


@pytest.fixture
def run(tmp_path: Path) -> SavedRun:
    return make_run(tmp_path / "w")


def call(run: SavedRun, *words: str, model: Path, rows: Path, images: str = "frozen", packing: str = "") -> Result:
    path = run.folder / "images.toml"
    path.write_text(
        f"""
task = "sft"
output_dir = "{run.folder / "with_images"}"
device = "cpu"
[model]
model_name_or_path = "{model}"
images = "{images}"
[data]
max_length = 96
cache_dir = "none"
{packing}
[[data.train]]
path = "{rows}"
[training]
max_steps = 2
"""
    )
    result = run.call(words[0], *words[1:], path)
    assert "Traceback" not in result.output
    return result


def test_check_plan_and_preview_support_images(run: SavedRun, folder: Path) -> None:
    given = {"model": folder / "llava", "rows": folder / "data/rows.jsonl"}
    checked = call(run, "check", **given)
    assert checked.exit_code == 0, checked.output
    assert "3 rows, 3 documents" in checked.stdout
    said = " ".join(checked.stdout.split())
    assert "data.packing, on by default, is off" in said and "rows with images have special positions and masks" in said
    assert "kept as they are" not in said, "the tower is streamed"
    planned = call(run, "plan", **given)
    assert planned.exit_code == 0, planned.output
    assert "images: their number per step is unknown before the run" in " ".join(planned.stdout.split())
    shown = call(run, "data", "preview", **given)
    assert shown.exit_code == 0 and shown.stdout.count("<image>") >= 3, shown.output
    assert "[[it is the whale of row 0" in shown.stdout


def test_invalid_image_models_and_rows_have_specific_exit_codes(run: SavedRun, folder: Path, tmp_path: Path) -> None:
    model, rows = folder / "llava", folder / "data/rows.jsonl"
    text = call(run, "run", model=run.folder / "model", rows=rows)
    assert text.exit_code == 2 and "it does not read images" in text.output, text.output
    packed = call(run, "run", model=model, rows=rows, packing="packing = true")
    assert packed.exit_code == 2 and "Write data.packing = false" in packed.output, packed.output
    scratch = call(run, "run", "--set", "model.train_from_scratch=true", model=model, rows=rows)
    assert scratch.exit_code == 2 and "needs the weights of the image encoder" in scratch.output, scratch.output
    bare = shutil.copytree(model, tmp_path / "bare")
    for name in ("processor_config.json", "preprocessor_config.json"):
        (bare / name).unlink()
    without = call(run, "run", model=bare, rows=rows)
    assert without.exit_code == 4 and "image processor" in without.output, without.output
    broken = shutil.copytree(folder / "data", tmp_path / "data")
    (broken / "0-0.png").unlink()
    (broken / "2-1.png").write_bytes(b"no image")
    missing = call(run, "run", "--set", "data.max_dropped=0", model=model, rows=broken / "rows.jsonl")
    assert missing.exit_code == 4, missing.output
    said = " ".join(missing.output.split())
    assert "an image cannot be read: No such file or directory" in said and "an image cannot be decoded" in said
    off = call(run, "run", "--set", "data.max_dropped=0", model=model, rows=rows, images="off")
    assert off.exit_code == 4 and 'model.images = "off"' in off.output, off.output
