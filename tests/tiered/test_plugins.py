"""Finding tiers by name: tiers from installed packages, and errors about broken packages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tiered
from tiered import Tier, TieredError
from tiered.ext import Link
from tiered.links.base import HostLink
from tiered.links.route import default_links
from tiered.testing.manual import MemoryTier

ROOT = Path(__file__).parents[2]
MODULE = """
from tiered.testing.manual import MemoryTier


class ShelfTier(MemoryTier):
    def __init__(self, capacity_bytes, *, name="shelf"):
        super().__init__(name, capacity_bytes)


NOT_A_CLASS = "text"
"""


def install(folder: Path, package: str, *entries: str) -> None:
    """Install a package that consists only of metadata with entry points."""
    info = folder / f"{package.replace('-', '_')}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text("[tiered.tiers]\n" + "\n".join(entries) + "\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder for packages. Modules that a test imports from it are removed from ``sys.modules`` at the end."""
    (tmp_path / "shelf_of_others.py").write_text(MODULE)
    (tmp_path / "broken_tier.py").write_text("import a_library_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for module in ("shelf_of_others", "broken_tier"):
        sys.modules.pop(module, None)


def test_plugin_tiers_have_names() -> None:
    assert tiered.available_tiers()[:3] == ("gpu", "ram", "nvme")
    assert tiered.tier_class("gpu") is tiered.GpuTier
    assert tiered.tier_class("ram") is tiered.RamTier
    assert tiered.tier_class("nvme") is tiered.NvmeTier


def test_plugin_tier_is_found_by_name_and_works(site: Path) -> None:
    install(site, "shelf-of-others", "shelf = shelf_of_others:ShelfTier", "ram = shelf_of_others:ShelfTier")
    assert tiered.available_tiers() == ("gpu", "ram", "nvme", "shelf")
    assert "shelf_of_others" not in sys.modules, "a list of names imports nothing"
    tier = tiered.tier_class("shelf")(tiered.MiB)
    assert type(tier).__name__ == "ShelfTier" and isinstance(tier, Tier)
    assert tiered.tier_class("ram") is tiered.RamTier, "no package replaces a built-in tier"
    with tiered.TieredStore([tiered.RamTier(tiered.MiB), tier]) as store:
        store.register("block", (1000,), torch.float32, home="shelf")
        with store.acquire("block", "ram", "w") as lease:
            lease.tensor.fill_(3)
        store.evict("block", "ram").wait(60)
        with store.acquire("block", "ram") as lease:
            assert float(lease.tensor.sum()) == 3000


def test_unknown_name_error_lists_the_names() -> None:
    with pytest.raises(TieredError, match=r"no tier is called 'tape'; available tiers: gpu, ram, nvme.*'tiered.tiers'"):
        tiered.tier_class("tape")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            "bad = broken_tier:Tier",
            r"'bad' of package 'bad-one' 1.5 \(broken_tier:Tier\) cannot be imported: .*not_there",
        ),
        ("bad = shelf_of_others:Missing", "cannot be imported: AttributeError: .*Missing"),
        ("bad = shelf_of_others:NOT_A_CLASS", "names a str, not a class or function"),
    ],
)
def test_broken_plugin_error_names_the_package(site: Path, entry: str, message: str) -> None:
    install(site, "bad-one", entry)
    assert "bad" in tiered.available_tiers()
    with pytest.raises(TieredError, match=message):
        tiered.tier_class("bad")


def test_plugin_name_in_two_packages_is_refused(site: Path) -> None:
    install(site, "first", "shelf = shelf_of_others:ShelfTier")
    install(site, "second", "shelf = broken_tier:Tier")
    with pytest.raises(TieredError, match=r"package 'first' 1.5 .*and package 'second' 1.5 .*uninstall one"):
        tiered.tier_class("shelf")


class Linked(MemoryTier):
    """Tier that provides its own links, and records the neighbours for which they were requested."""

    def __init__(self, name: str, links: list[Link] | None) -> None:
        super().__init__(name, tiered.MiB)
        self.links = links
        self.asked: list[str] = []

    def links_with(self, neighbour: Tier) -> list[Link] | None:
        self.asked.append(neighbour.name)
        return self.links


def test_tier_provides_its_links() -> None:
    ram = tiered.RamTier(tiered.MiB)
    ends = MemoryTier("ram", tiered.MiB), MemoryTier("own", tiered.MiB)
    links: list[Link] = [HostLink(*ends), HostLink(*reversed(ends))]
    for order in ([ram, Linked("own", links)], [Linked("own", links), ram]):
        assert default_links(order) == links
    silent = Linked("own", None)
    assert [type(link) for link in default_links([ram, silent])] == [HostLink, HostLink]
    assert silent.asked == ["ram"]
    with pytest.raises(ValueError, match=r"Linked\.links_with must return one link each way between 'own' and 'ram'"):
        default_links([ram, Linked("own", links[:1])])


def test_the_suites_need_no_pytest() -> None:
    code = "import sys, tiered, tiered.testing; print('pytest' in sys.modules, 'hypothesis' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout.split() == ["False", "False"]


class RefusesLastPage(tiered.RamTier):
    """Tier that never allocates its last page, but reports it as free."""

    def allocate(self, nbytes: int, *, name: str, home: bool) -> tiered.ext.Slot | None:
        is_last = self.usage().free_bytes <= self.slot_bytes(nbytes)
        return None if is_last else super().allocate(nbytes, name=name, home=home)


def test_inconsistent_tier_raises_instead_of_hanging() -> None:
    page = 4 * tiered.KiB
    with tiered.TieredStore(
        [RefusesLastPage(2 * page, name="fast", pin_memory=False), tiered.RamTier(8 * page)]
    ) as store:
        for key in ("a", "b"):
            store.register(key, (page,), torch.uint8, home="ram")
        message = "tier 'fast' reports 4096 free bytes but allocates no slot of 4096 bytes: .*TierSuite"
        with store.acquire("a", "fast", "w", timeout_s=20), pytest.raises(TieredError, match=message):
            store.acquire("b", "fast", "w", timeout_s=20)
        with pytest.raises(TieredError, match=message):
            store.acquire_many([("a", "fast", "r"), ("b", "fast", "w")], timeout_s=20)
        store.discard("a")
        store.register("home", (page,), torch.uint8, home="fast")
        with pytest.raises(TieredError, match=message):
            store.register("more", (page,), torch.uint8, home="fast")
