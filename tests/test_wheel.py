"""The sdist and the wheel are complete: both work in an environment without this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EVERYWHERE = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
PIP = (sys.executable, "-m", "pip")


def call(words: Sequence[object], folder: Path, **environment: str) -> str:
    result = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env=EVERYWHERE | environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build an sdist from the files in git, and a wheel from the sdist. Return their folder."""
    folder = tmp_path_factory.mktemp("built")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "source" / name).write_bytes((ROOT / name).read_bytes())
    maker = str(folder / "maker")
    call([*PIP, "install", "-q", "--target", maker, "setuptools>=77", "wheel"], folder)
    make = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    call([sys.executable, "-c", make, folder], folder / "source", PYTHONPATH=maker)
    (sdist,) = folder.glob("*.tar.gz")
    wheel = [*PIP, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, sdist]
    call(wheel, folder, PYTHONPATH=maker)
    return folder


def installed(built: Path, folder: Path, *, is_empty: bool) -> Path:
    """Install the wheel or the sdist in a new environment, and return its bin folder.

    If ``is_empty``, pip installs the wheel with its dependencies, and then replaces it by the sdist. Otherwise, the
    environment uses the packages of this interpreter.
    """
    venv.create(folder / "env")
    install = [*PIP, "--python", folder / "env/bin/python", "install", "-q"]
    (wheel,) = built.glob("*.whl")
    if is_empty:
        call([*install, "-c", ROOT / "constraints.txt", wheel], folder)
        (sdist,) = built.glob("*.tar.gz")
        call([*install, "--no-deps", "--force-reinstall", sdist], folder)
        return folder / "env/bin"
    call([*install, "--no-deps", wheel], folder)
    (site,) = (folder / "env/lib").glob("python*/site-packages")
    # Python ignores .pth files in folders that a .pth file adds. This hides the editable install of this checkout.
    places = {path for path in sys.path if path.endswith("site-packages")} | {sysconfig.get_path("purelib")}
    (site / "dependencies.pth").write_text("\n".join(sorted(places)) + "\n")
    return folder / "env/bin"


@pytest.mark.timeout(1500)  # with is_empty, pip downloads all dependencies
@pytest.mark.parametrize("is_empty", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_packaged_example_runs(built: Path, tmp_path: Path, is_empty: bool) -> None:
    program = installed(built, tmp_path, is_empty=is_empty) / "megatrain-tier"
    place = call([program.parent / "python", "-c", "import tiered; print(tiered.__file__)"], tmp_path)
    assert Path(place.strip()).is_relative_to(tmp_path), "not the checkout's"
    assert "next   megatrain-tier run" in call([program, "init", "--example"], tmp_path)
    config = tmp_path / "megatrain-example/first.toml"
    with without_tools(program):
        code = "import megatrain.api as api; print(all(hasattr(api, name) for name in api.__all__))"
        assert call([program.parent / "python", "-c", code], tmp_path).strip() == "True"
        said = call([program, "run", config, "--max-steps", "2", "--set", "compute_dtype=float32"], tmp_path)
    assert "done   2 steps" in said
    assert (tmp_path / "megatrain-example/outputs/first/final/model.safetensors").is_file()
    # The report needs a data file from the package.
    page = tmp_path / "page.html"
    call([program, "report", config.parent / "outputs/first", "--html", page], tmp_path)
    assert "<svg" in page.read_text(encoding="utf-8")
    again = subprocess.run([program, "init", "--example"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert again.returncode == 2 and "already exists" in again.stderr


@contextmanager
def without_tools(program: Path) -> Iterator[None]:
    """Remove ``embed`` and ``extras`` from the installed package for a while: it trains without them."""
    (package,) = (program.parent.parent / "lib").glob("python*/site-packages/megatrain")
    for name in ("embed", "extras"):
        (package / name).rename(package.parent / name)
    yield
    for name in ("embed", "extras"):
        (package.parent / name).rename(package / name)
