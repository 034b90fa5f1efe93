"""kvikio without a GPU: its engine runs in processes with a stand-in for the NVIDIA driver, or with no driver."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tiered import MiB, NvmeTier, RamTier, TieredError
from tiered.links import probe as probe_module
from tiered.links import route
from tiered.links.files import PosixMover
from tiered.links.probe import KvikioProbe, probe_kvikio
from tiered.links.route import default_links, make_mover
from tiered.tiers.layout import files_of
from tiered.tiers.nvme import Engine

ROOT = Path(__file__).parents[2]
STAND_IN = Path(__file__).parent / "stand_in"
HAS_KVIKIO = importlib.util.find_spec("kvikio") is not None
needs_kvikio = pytest.mark.skipif(not HAS_KVIKIO, reason="kvikio is not installed (requirements-kvikio.txt)")


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the stand-in for libcuda.so.1, and return its folder. This process never loads the library."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in of libcuda.so.1")
    folder = tmp_path_factory.mktemp("stand_in")
    library = folder / "libcuda.so.1"
    command = [
        compiler,
        "-O1",
        "-shared",
        "-fPIC",
        f"-Wl,-soname,{library.name}",
        "-o",
        library,
        STAND_IN / "libcuda.c",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return folder


def tier(folder: Path, engine: Engine) -> NvmeTier:
    return NvmeTier([folder], 4 * MiB, engine=engine)


@needs_kvikio
def test_kvikio_engine_checks_pass_in_a_separate_process(stand_in: Path, tmp_path: Path) -> None:
    """A separate process runs all tests of ``stand_in/checks.py``. If one fails, this test prints the output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "CUFILE"))}
    if not has_driver():
        environment["STAND_IN_LIBCUDA"] = str(stand_in / "libcuda.so.1")
    options = ["-q", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--basetemp", tmp_path / "checks", STAND_IN / "checks.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    summary = result.stdout.splitlines()[-1]
    assert re.search(r"\b[1-9]\d* passed", summary) and "skipped" not in summary, summary
    assert [path.name for path in tmp_path.iterdir()] == ["checks"], "no cufile.log is dropped into the current folder"


@pytest.mark.skipif(has_driver(), reason="this machine has an NVIDIA driver")
@needs_kvikio
def test_kvikio_without_a_driver_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(TieredError, match=r"needs the NVIDIA driver.*libcuda\.so\.1.*engine 'posix'"):
        default_links([RamTier(MiB), tier(tmp_path, "kvikio")])


def test_missing_kvikio_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(TieredError, match=r"not installed: pip install -e .\.\[gds\]..*engine 'posix'"):
        default_links([RamTier(MiB), tier(tmp_path, "kvikio")])


@pytest.mark.parametrize("engine", ["posix", "auto"])
def test_posix_mover_is_used_without_gds(tmp_path: Path, engine: Engine) -> None:
    nvme = tier(tmp_path, engine)
    if not probe_kvikio(tmp_path).has_gds:
        assert isinstance(make_mover(nvme), PosixMover)
    nvme.close()


def test_auto_uses_kvikio_only_if_every_path_has_gds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "slow"
    made: list[bool] = []
    monkeypatch.setattr(route, "may_open_driver", lambda: True)
    monkeypatch.setattr(route, "probe_kvikio", lambda path: KvikioProbe(gds_bytes=0 if path == str(slow) else 1))
    monkeypatch.setattr(route, "KvikioMover", lambda tier, has_gds: made.append(has_gds))
    for paths in ([tmp_path / "a"], [tmp_path / "a", slow]):
        nvme = NvmeTier(paths, 4 * MiB, engine="auto")
        assert isinstance(make_mover(nvme), PosixMover) == (slow in paths)
        nvme.close()
    assert made == [True]


def test_a_snapshot_is_never_opened_for_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts of a transfer open the same frozen file. The second replaces it while the first checks it."""
    nvme = tier(tmp_path, "posix")
    slot = nvme.allocate(4096, name="block", home=True)
    assert slot is not None
    (file,) = files_of(slot).files
    nvme.describe(slot, (4096,), torch.uint8)
    nvme.snapshots.take(slot, "1")
    frozen = file.path.stat().st_ino
    opened: list[int] = []
    other = threading.Thread(target=lambda: opened.append(nvme.open_for_write(file)))
    real = os.fstat

    def fstat_after_concurrent_open(fd: int) -> os.stat_result:
        if other.ident is None:
            other.start()
            other.join(0.2)
        return real(fd)

    monkeypatch.setattr(os, "fstat", fstat_after_concurrent_open)
    opened.append(nvme.open_for_write(file))
    other.join(30)
    inodes = {real(fd).st_ino for fd in opened}
    assert len(opened) == 2 and inodes == {file.path.stat().st_ino} and frozen not in inodes
    for fd in opened:
        os.close(fd)
    nvme.close()


# -- the probe ---------------------------------------------------------------------------------------------------------


@needs_kvikio
def test_probe_detects_the_stand_in_capabilities(
    stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stand_in))  # affects only the probe's process, started below
    modules = set(sys.modules)
    found = probe_kvikio(tmp_path)
    assert found.installed and found.version and found.libcuda
    assert found.host_bytes == found.gpu_bytes == MiB, found
    assert not found.has_gds and found.reason, found
    assert not list(tmp_path.iterdir())
    assert set(sys.modules) == modules, "kvikio is imported in the probe's process only"


@needs_kvikio
@pytest.mark.skipif(probe_module.may_open_driver(), reason="libcufile's driver would be opened first")
def test_a_driver_without_a_device_is_reported(stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stand_in))
    monkeypatch.setenv("STAND_IN_CUDA", "no-device")
    assert "cuInit returned CUDA error 100" in probe_kvikio(tmp_path).reason


@needs_kvikio
@pytest.mark.skipif(probe_module.may_open_driver(), reason="libcufile's driver would be opened first")
def test_probe_rejects_wrong_bytes(stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stand_in))
    monkeypatch.setenv("STAND_IN_CUDA", "wrong-bytes")
    found = probe_kvikio(tmp_path)
    assert found.host_bytes == MiB and found.gpu_bytes == found.gds_bytes == 0
    assert found.reason == "kvikio read wrong bytes into GPU memory"


@needs_kvikio
def test_hanging_driver_times_out(stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stand_in))
    monkeypatch.setenv("STAND_IN_CUDA", "hang")
    found = probe_kvikio(tmp_path, timeout_s=3)
    assert found.gds_bytes == 0 and "did not answer within 3 s" in found.reason, found
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(has_driver(), reason="this machine has an NVIDIA driver")
@needs_kvikio
def test_probe_reports_a_missing_driver(tmp_path: Path) -> None:
    found = probe_kvikio(tmp_path)
    assert found.installed and not found.libcuda and "the NVIDIA driver is missing" in found.reason
    assert not list(tmp_path.iterdir())


def test_probe_reports_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "first" / "kvikio").mkdir(parents=True)
    (tmp_path / "first" / "kvikio" / "__init__.py").write_text("import nowhere_to_be_found\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "first"))
    found = probe_kvikio(tmp_path)
    assert found == KvikioProbe(reason="the package nowhere_to_be_found is not installed")


def test_a_probe_that_dies_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "first" / "kvikio").mkdir(parents=True)
    (tmp_path / "first" / "kvikio" / "__init__.py").write_text("import os\nos.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "first"))
    reason = probe_kvikio(tmp_path).reason
    assert reason.startswith("it ended with code -6 (step: import kvikio)"), reason


def test_probe_reports_an_unusable_folder(tmp_path: Path) -> None:
    found = probe_kvikio(tmp_path / "missing")
    assert "No such file or directory" in found.reason
    assert dataclasses.replace(found, reason="") == KvikioProbe()


def test_probe_process_ends_if_its_parent_dies(tmp_path: Path) -> None:
    """The parent enforces the timeout but may be killed, so the probe also sets an alarm for itself."""
    (tmp_path / "first" / "kvikio").mkdir(parents=True)
    (tmp_path / "first" / "kvikio" / "__init__.py").write_text("while True: pass\n")
    process = subprocess.Popen(
        [sys.executable, "-P", probe_module.__file__, tmp_path / "file", "0.2"],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "first")},
        stdout=subprocess.DEVNULL,
    )
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    code = process.wait()
    watchdog.cancel()
    assert code == -14, "SIGALRM"


def test_driver_may_be_opened_only_if_every_path_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for paths, expected in (((tmp_path, tmp_path), True), ((tmp_path, tmp_path / "missing"), False)):
        monkeypatch.setattr(probe_module, "_DRIVER_PATHS", paths)
        assert probe_module.may_open_driver() == expected
