"""``open_store`` opens a store in one call, and refuses invalid options."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import megatrain
from megatrain.embed.block_homes import home_order, shared_state
from megatrain.embed.partition import OffloadError
from megatrain.embed.stores import _example_size, _free_bytes
from megatrain.machine.cgroups import total_ram_bytes
from tiered import CapacityError, GiB, LockedError, MiB, format_size


def test_sizes(tmp_path: Path) -> None:
    total = total_ram_bytes()
    for size, expected in ((5 * MiB, 5 * MiB), ("3MiB", 3 * MiB), ("1%", total // 100), (" 2.5 MiB", int(2.5 * MiB))):
        with megatrain.open_store(ram=size) as store:
            assert store.stats().tiers["ram"].capacity_bytes == pytest.approx(expected, abs=1)
            assert store.path is None
    with megatrain.open_store(nvme=tmp_path / "a") as store:
        tiers = store.stats().tiers
        assert (
            MiB <= tiers["ram"].capacity_bytes < total
            and MiB <= tiers["nvme"].capacity_bytes <= shutil.disk_usage(tmp_path).total
        )
        assert store.path == str(tmp_path / "a")


EXAMPLES = 'Write for example ram="4GiB", "90%" or "auto"'
NO_SIZE = f"is not a size, which is text or a whole number of bytes. {EXAMPLES}"
ALSO = 'A share such as "90%" and "auto" are also possible'
TOTAL_BYTES = total_ram_bytes()
TOO_LARGE = f"exceeds the {format_size(TOTAL_BYTES)} of this machine. Pass less, or add a drive with nvme="
#: Options that are refused, and the message. The folder of drives is "DIR".
INVALID: tuple[tuple[dict[str, Any], str], ...] = (
    ({"ram": "many"}, f'ram: "many" is not a size. Write for example "110GiB" or "110GB". {ALSO}'),
    ({"ram": "x%"}, f'ram: "x%" is not a size. Write for example "110GiB" or "110GB". {ALSO}'),
    ({"ram": 0}, f"ram=0 is not a size. {EXAMPLES}"),
    ({"ram": -5}, f"ram=-5 is not a size. {EXAMPLES}"),
    ({"ram": 1}, 'ram=1 means 1 bytes. Write the unit: ram="1GiB"'),
    ({"ram": 65_535}, 'ram=65535 means 65535 bytes. Write the unit: ram="65535GiB"'),
    ({"ram": "4"}, f'ram: 4 has no unit. Write "4GiB" or "4GB". {ALSO}'),
    ({"ram": 0.9}, f"ram=0.9 {NO_SIZE}"),
    ({"ram": True}, f"ram=True {NO_SIZE}"),
    ({"ram": None}, f"ram=None {NO_SIZE}"),
    ({"nvme": "DIR", "nvme_size": 40}, 'nvme_size=40 means 40 bytes. Write the unit: nvme_size="40GiB"'),
    ({"nvme_size": "40GiB"}, """nvme_size='40GiB' needs a folder on a drive: nvme="state/store\""""),
    (
        {"nvme": "DIR", "nvme_size": "12 bananas"},
        f'nvme_size: "bananas" is not a unit of size. Use B, KiB, MiB, GiB, TiB, KB, MB, GB or TB. {ALSO}',
    ),
    ({"nvme": "DIR", "on_full": "explode"}, 'on_full="explode" is invalid. Pass "pause" or "error"'),
    ({"ram": "999TiB"}, f"ram='999TiB' {TOO_LARGE}"),
    ({"ram": TOTAL_BYTES + 1}, f"ram={TOTAL_BYTES + 1} {TOO_LARGE}"),
    ({"ram": TOTAL_BYTES + 1, "nvme": "DIR"}, f"ram={TOTAL_BYTES + 1} {TOO_LARGE}"),
)


def test_invalid_store_options_are_refused(tmp_path: Path) -> None:
    for options, message in INVALID:
        folders = {"nvme": tmp_path / "drive"} if "nvme" in options else {}
        with pytest.raises(ValueError) as caught:
            megatrain.open_store(**{"ram": "8MiB", **options, **folders})
        assert str(caught.value) == message


def test_largest_and_smallest_sizes_are_accepted() -> None:
    for size in (TOTAL_BYTES, 65_536):
        with megatrain.open_store(ram=size) as store:
            assert store.stats().tiers["ram"].capacity_bytes == size


def test_drive_without_a_size_reports_its_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with megatrain.open_store(ram="8MiB", nvme=tmp_path / "told") as store:
        size = format_size(store.stats().tiers["nvme"].capacity_bytes)
    (record,) = caplog.records
    bound = re.search(r'nvme_size="(\w+)"', record.message)
    assert bound is not None and record.levelname == "WARNING"
    assert record.message == (
        f"nvme_size is not set, so the store may use up to {size} of {tmp_path / 'told'}, nine tenths of the free "
        f'space. For less: nvme_size="{bound[1]}"'
    )
    caplog.clear()
    for number, nvme_size in enumerate((bound[1], "auto", 64 * MiB, numpy.int64(64 * MiB))):
        with megatrain.open_store(ram="8MiB", nvme=tmp_path / f"{number}", nvme_size=nvme_size):
            assert not caplog.records


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(9 * GiB, "4GiB"), (2 * GiB, "1GiB"), (2 * GiB - 1, "1023MiB"), (5 * MiB, "2MiB"), (MiB, "1MiB"), (1, "1MiB")],
)
def test_example_of_a_size_is_half_of_the_space(nbytes: int, text: str) -> None:
    assert _example_size(nbytes) == text


def test_free_space_of_one_file_system_counts_once(tmp_path: Path) -> None:
    found = _free_bytes([tmp_path, tmp_path / "a" / "b", tmp_path / "c"])
    free = os.statvfs(tmp_path)
    assert found == pytest.approx(free.f_bavail * free.f_frsize, rel=0.1)


def test_several_folders_paths_and_homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with megatrain.open_store(ram="8MiB", nvme=["~/a", tmp_path / "b"], nvme_size="32MiB", path="~/c") as store:
        assert (tmp_path / "a").is_dir() and (tmp_path / "b").is_dir() and store.path == str(tmp_path / "c")
        assert home_order(store, "auto") == ("ram", "nvme") and home_order(store, "nvme") == ("nvme",)
        assert home_order(store, ("nvme", "ram")) == ("nvme", "ram")
        with pytest.raises(ValueError, match="ram, nvme"):
            home_order(store, "gpu")


def test_second_store_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    with megatrain.open_store(ram="8MiB", nvme=tmp_path, nvme_size="8MiB"), pytest.raises(LockedError):
        megatrain.open_store(ram="8MiB", nvme=tmp_path, nvme_size="8MiB")
    with megatrain.open_store(ram="8MiB", nvme=tmp_path, nvme_size="8MiB") as store:
        assert not store.is_closed
    assert store.is_closed


def test_cached_copies_do_not_affect_home_placement(tmp_path: Path) -> None:
    """The homes of blocks depend on the requested sizes, not on the current contents of RAM."""
    places = []
    for touches in (False, True):
        with megatrain.open_store(ram=8 * MiB, nvme=tmp_path / str(touches), nvme_size="64MiB") as store:
            shared = shared_state(store)
            for number in range(4):
                shared.register(f"a{number}", MiB // 4, torch.float32, ["nvme"], durable=True)
                if touches:
                    with store.acquire(f"a{number}", "ram", "w") as lease:
                        lease.tensor.zero_()
            for number in range(6):
                shared.register(f"b{number}", MiB // 4, torch.float32, ["ram", "nvme"], durable=False)
            places.append([spec.home for spec in store.blocks()])
    assert places[0] == places[1] == ["nvme"] * 4 + ["ram"] * 6


def test_failed_calls_leave_no_blocks(tmp_path: Path) -> None:
    with megatrain.open_store(ram=2 * MiB, nvme=tmp_path, nvme_size="16MiB") as store:
        shared = shared_state(store)
        free = store.stats().tiers["nvme"].used_bytes

        def register() -> None:
            with shared.rollback_on_error():
                shared.register("a", MiB // 4, torch.float32, ["nvme"], durable=True)
                shared.register("b", 100 * MiB, torch.float32, ["ram", "nvme"], durable=True)

        with pytest.raises(CapacityError) as caught:
            register()
        assert not list(store.blocks()) and store.stats().tiers["nvme"].used_bytes == free
        assert caught.value.tier == "nvme" and "'b'" in str(caught.value) and "nvme=" in str(caught.value)


def test_unwritable_folder_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(Exception, match="file") as caught:
        megatrain.open_store(ram="8MiB", nvme=file / "inside", nvme_size="8MiB")
    assert isinstance(caught.value, OSError | ValueError) or "tiered" in type(caught.value).__module__
    assert os.path.isfile(file)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_missing_gpu_is_reported() -> None:
    with pytest.raises(ValueError, match=r"torch finds no CUDA device\. Leave gpu out"):
        megatrain.open_store(ram="8MiB", gpu="1GiB")
    with megatrain.open_store(ram="8MiB") as store:
        module = megatrain.offload(torch.nn.Linear(4, 4), store)
        with pytest.raises(OffloadError, match="cannot be moved there: "):
            module.to("cuda")
        assert module(torch.ones(1, 4)).shape == (1, 4)


def test_misplaced_arguments_are_refused() -> None:
    module: Any = torch.nn.Linear(4, 4)
    with pytest.raises(TypeError, match=r'offload takes the store that megatrain\.open_store\(ram="16MiB"\) returns'):
        megatrain.offload(module, "16MiB")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Trainer\(megatrain\.load_config\('x\.toml'\)\)"):
        megatrain.Trainer("x.toml")  # type: ignore[arg-type]
    with megatrain.open_store(ram="8MiB") as store:
        with pytest.raises(TypeError, match=r"offload takes a torch\.nn\.Module, not 5"):
            megatrain.offload(5, store)  # type: ignore[type-var]
        with pytest.raises(TypeError, match=r"not the module Linear. Pass model\.parameters\(\)"):
            megatrain.TieredAdamW(module, store=store)
        with pytest.raises(TypeError, match="TieredAdamW takes the store that"):
            megatrain.TieredAdamW(module.parameters(), store="8MiB")  # type: ignore[arg-type]
        for name in ("fused", "foreach", "amsgrad", "capturable", "maximize", "differentiable"):
            with pytest.raises(TypeError, match=f"TieredAdamW has no option '{name}': "):
                megatrain.TieredAdamW(module.parameters(), store=store, **{name: True})
        with pytest.raises(TypeError, match="TieredSGD has no option 'colour'"):
            megatrain.TieredSGD(module.parameters(), store=store, colour=1)
        megatrain.TieredAdamW(module.parameters(), store=store, fused=None, amsgrad=False)
