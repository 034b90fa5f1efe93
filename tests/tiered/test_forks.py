"""Use of a store in a forked child, and the cost of forking a process that has pinned memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import megatrain
from tiered import KiB, MiB, NvmeTier, RamTier, TieredStore
from tiered.ext import HostSlab

ROOT = Path(__file__).parents[2]


def in_child(work: Callable[[], str]) -> str:
    """Run ``work`` in a forked child. Return its result, or its error as text."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = work()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    return text or f"ended with status {status}"


def mapping_of(address: int) -> str:
    """Return the entry of /proc/self/smaps for the mapping that contains an address."""
    entries = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    bounds = [(entry, *(int(end, 16) for end in entry.split(" ", 1)[0].split("-"))) for entry in entries if entry]
    return next(entry for entry, start, end in bounds if start <= address < end)


def make_store_with_block(folder: Path) -> TieredStore:
    store = TieredStore([RamTier(8 * MiB), NvmeTier([folder / "drive"], 64 * MiB)], path=str(folder / "store"))
    store.put("a", torch.ones(1 * MiB))
    return store


@pytest.mark.parametrize("nbytes", [4096, 3 * MiB])
def test_slabs_are_excluded_from_forks(nbytes: int) -> None:
    slab = HostSlab(nbytes)
    (flags,) = re.findall(r"^VmFlags:(.*)$", mapping_of(slab.address), re.MULTILINE)
    assert "dc" in flags.split()


def test_a_child_refuses_every_use_of_its_parents_store(tmp_path: Path) -> None:
    with make_store_with_block(tmp_path) as store:
        lease = store.acquire("a", "ram")
        uses: dict[str, Callable[[], object]] = {
            "acquire": lambda: store.acquire("a", "ram"),
            "acquire_many": lambda: store.acquire_many([("a", "ram", "r")]),
            "put": lambda: store.put("b", torch.ones(4)),
            "get": lambda: store["a"],
            "read_rows": lambda: store.read_rows("a", 0, 4),
            "write_rows": lambda: store.write_rows("a", 0, torch.ones(4)),
            "stream": lambda: list(store.stream(["a"], "ram")),
            "prefetch": lambda: store.prefetch("a", "ram"),
            "evict": lambda: store.evict("a", "ram"),
            "register": lambda: store.register("c", (4,), torch.float32, home="ram"),
            "discard": lambda: store.discard("a"),
            "unregister": lambda: store.unregister("a"),
            "release": lease.release,
            "commit": store.commit,
            "load": store.load,
            "verify": store.verify,
            "reserve": lambda: store.reserve("ram", 4096),
            "wait_idle": store.wait_idle,
            "stats": store.stats,
        }
        for name, use in uses.items():
            found = in_child(lambda use=use: str(use()))  # type: ignore[misc]
            assert re.match(rf"TieredError: process \d+ was forked from process {os.getpid()}", found), (name, found)
            assert "'spawn'" in found
        lease.release()


def test_forked_child_raises_despite_locks_held_by_the_parent(tmp_path: Path) -> None:
    with make_store_with_block(tmp_path) as store, store._changed, store._leasing._acquire_many_lock:
        for keys in (["a"], []):
            requests = [(key, "ram", "r") for key in keys]
            assert "was forked" in in_child(lambda requests=requests: str(store.acquire_many(requests)))  # type: ignore


def check_in_own_process(check: Callable[[Path], None], folder: Path) -> None:
    """Call a function of this file in a new interpreter, which then forks.

    A child of pytest's process might wait forever for torch's threads, which a fork does not copy.
    """
    command = [sys.executable, __file__, check.__name__, str(folder)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=80)
    assert done.returncode == 0, done.stderr


def test_forked_child_does_not_use_the_parents_spare_pages(tmp_path: Path) -> None:
    check_in_own_process(check_slab_of_child, tmp_path)


def check_slab_of_child(folder: Path) -> None:
    tier = RamTier(100 * MiB, pin_memory=False)
    for nbytes in (96 * MiB, 40 * MiB):
        slot = tier.allocate(nbytes, name="block", home=False)
        assert slot is not None
        if nbytes == 96 * MiB:
            tier.free(slot)
    assert 32 * MiB <= tier._spare_pages.nbytes <= 60 * MiB

    def work() -> str:
        own = tier.allocate(32 * MiB, name="own", home=False)
        assert own is not None
        return str(int(tier.tensor(own, (32 * MiB,), torch.uint8).fill_(1).sum()))

    assert in_child(work) == str(32 * MiB)


def test_forked_child_leaves_the_parent_store_open_and_opens_its_own(tmp_path: Path) -> None:
    check_in_own_process(check_store_of_child, tmp_path)


def check_store_of_child(folder: Path) -> None:
    def work() -> str:
        with store:
            store.close()
        with make_store_with_block(folder / "of_child") as own:
            return f"{float(own['a'].sum())} {in_child(lambda: str(own['a']))}"

    with make_store_with_block(folder) as store:
        store.commit().wait()
        found = in_child(work)
        assert found.startswith(f"{float(MiB)} TieredError: process"), found
        assert float(store["a"].sum()) == MiB, "the parent's store continues to work"


def test_child_memory_never_overlaps_a_parent_slab(tmp_path: Path) -> None:
    check_in_own_process(check_addresses_of_child, tmp_path)


def check_addresses_of_child(folder: Path) -> None:
    slabs = [HostSlab(nbytes) for nbytes in (4096, 64 * KiB, 3 * MiB)]
    addresses = [slab.address for slab in slabs]

    def work() -> str:
        inside = [mapping_of(address).split()[1] for address in addresses]
        own = [HostSlab(slab.nbytes) for slab in slabs]  # closing the inherited slabs must not unmap these
        for slab in slabs:
            slab.close()
        for slab in own:
            slab.tensor.fill_(7)
        return " ".join([*inside, str({int(slab.tensor.sum()) // slab.nbytes for slab in own})])

    assert in_child(work) == "---p ---p ---p {7}"


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, store: TieredStore | None = None) -> None:
        self.store = store

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.full((16,), float(number)) if self.store is None else self.store.read_rows("a", number, number + 1)


def losses_of_offloaded_module(folder: Path, **loading: object) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(16, 16)) for _ in range(3)))
    losses = []
    with megatrain.open_store(ram="4MiB", nvme=str(folder), nvme_size="64MiB") as store:
        megatrain.offload(model, store)
        optimizer = megatrain.TieredAdamW(model.parameters(), lr=1e-2, store=store)
        for batch in chain.from_iterable(DataLoader(Rows(), batch_size=4, **loading) for _ in range(2)):  # type: ignore[arg-type]
            loss = model(batch).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_workers_of_a_loader_feed_an_offloaded_module(tmp_path: Path) -> None:
    forked = losses_of_offloaded_module(tmp_path / "forked", num_workers=2, multiprocessing_context="fork")
    assert forked == losses_of_offloaded_module(tmp_path / "alone") and len(set(forked)) == 4
    with make_store_with_block(tmp_path) as store, pytest.raises(Exception, match="was forked from process"):
        next(iter(DataLoader(Rows(store), num_workers=1, multiprocessing_context="fork")))


#: Script that pins a slab as drivers do, by registering it as an io_uring buffer. It then forks, and the child prints
#: the size of its private memory in bytes.
_COST = """
import ctypes, os, re, resource, sys, time
from pathlib import Path
from tiered.ext import HostSlab

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
class Range(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]
_, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
slab = HostSlab(int(sys.argv[1]))
ring = libc.syscall(425, 4, ctypes.create_string_buffer(120))
if ring < 0 or libc.syscall(427, ring, 0, ctypes.byref(Range(slab.address, slab.nbytes)), 1) < 0:
    sys.exit(os.strerror(ctypes.get_errno()))
if sys.argv[2] == "undone":
    assert libc.madvise(ctypes.c_void_p(slab.address), ctypes.c_size_t(slab.nbytes), 11) == 0
start = time.perf_counter()
pid = os.fork()
if pid == 0:
    text = Path("/proc/self/smaps_rollup").read_text()
    print(1024 * sum(map(int, re.findall(r"^Private_(?:Clean|Dirty):\\s+(\\d+)", text, re.MULTILINE))), flush=True)
    os._exit(0)
print(f"fork: {1e3 * (time.perf_counter() - start):.0f} ms", file=sys.stderr)
os.waitpid(pid, 0)
"""


@pytest.mark.parametrize(
    ("what", "nbytes"), [("as it is", 512 * MiB), pytest.param("undone", 512 * MiB, marks=pytest.mark.slow)]
)
def test_a_fork_copies_no_pinned_slab(what: str, nbytes: int) -> None:
    """``undone`` is the control: the child inherits the slab, and the kernel copies the pinned pages in ``fork``."""
    command = [sys.executable, "-c", _COST, str(nbytes), what]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if done.returncode and re.search("not permitted|not implemented|allocate memory", done.stderr):
        pytest.skip(f"io_uring pins nothing here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    print(done.stderr.strip(), f"{int(done.stdout) / MiB:.0f} MiB in the child")
    if what == "undone":
        assert int(done.stdout) > nbytes // 2
    else:
        assert int(done.stdout) < nbytes // 4


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
