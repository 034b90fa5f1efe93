"""Default links between tiers."""

from __future__ import annotations

from collections.abc import Sequence

from tiered.errors import TieredError
from tiered.links.base import HostLink, Link, LinkedTier
from tiered.links.cuda import CudaLink
from tiered.links.files import FileEngine, FileReadLink, FileWriteLink, PartMover, PosixMover
from tiered.links.kvikio import KvikioMover
from tiered.links.probe import may_open_driver, probe_kvikio
from tiered.tiers.base import ReadOnlyTier, Tier
from tiered.tiers.gpu import GpuTier
from tiered.tiers.nvme import NvmeTier
from tiered.tiers.ram import RamTier
from tiered.units import PAGE_BYTES


def default_links(tiers: Sequence[Tier]) -> list[Link]:
    """Link each tier with the next faster tier that it can reach, and return the links.

    Also links each ``NvmeTier`` that has ``past_ram`` with each ``GpuTier``. Two tiers have one link per direction; a
    ``ReadOnlyTier`` has only an outgoing link. If a tier has a method ``links_with``, that method creates the links;
    the slower tier's method is tried first. This function starts no threads and uses no device, except for an
    ``NvmeTier`` that uses kvikio.

    Args:
        tiers: tiers from fast to slow.

    Raises:
        ValueError: a tier cannot be linked with a faster tier, or a ``links_with`` returns wrong links.
        TieredError: an ``NvmeTier`` needs kvikio or GPUDirect Storage, which is missing or does not work here.
    """
    has_device = any(isinstance(tier, GpuTier) and not _is_host_memory(tier) for tier in tiers)
    links = [link for index in range(1, len(tiers)) for link in _links_to_faster(tiers[: index + 1], has_device)]
    linked_pairs = {(link.src, link.dst) for link in links}
    for nvme in tiers:
        if isinstance(nvme, NvmeTier) and nvme.past_ram:
            engine = next(link.engine for link in links if isinstance(link, FileReadLink) and link.src == nvme.name)
            for gpu in tiers:
                if isinstance(gpu, GpuTier) and (nvme.name, gpu.name) not in linked_pairs:
                    links += direct_links(gpu, nvme, engine)
    return links


def direct_links(gpu: GpuTier, nvme: NvmeTier, engine: FileEngine) -> list[Link]:
    """Return the read link and the write link between files and a GpuTier, bypassing RAM.

    Args:
        engine: threads that move the bytes. The NvmeTier's other links use the same threads.

    Raises:
        ValueError: the GPU tier's alignment is not a multiple of 4096 bytes, which file reads require.
    """
    if gpu.alignment_bytes % PAGE_BYTES:
        raise ValueError(
            f"tier '{nvme.name}' cannot read files directly into tier '{gpu.name}', whose slots are multiples of "
            f"{gpu.alignment_bytes} bytes: create it with alignment_bytes={PAGE_BYTES}"
        )
    return [FileReadLink(nvme, gpu, engine), FileWriteLink(gpu, nvme, engine)]


def _links_to_faster(tiers: Sequence[Tier], has_device: bool) -> Sequence[Link]:
    """Return the links between the last tier and the nearest faster tier that it can reach."""
    *faster_tiers, slow_tier = tiers
    for fast_tier in reversed(faster_tiers):
        if links := links_between(fast_tier, slow_tier, has_device=has_device):
            return links
    raise ValueError(
        f"no link connects tier '{slow_tier.name}' ({type(slow_tier).__name__}) with a faster tier, such as "
        f"'{fast_tier.name}' ({type(fast_tier).__name__}): put a RamTier between them, list tiers from fast to slow, "
        "or pass custom links"
    )


def links_between(fast_tier: Tier, slow_tier: Tier, *, has_device: bool = False) -> Sequence[Link]:
    """Return the links between two tiers, or an empty sequence if they cannot be linked.

    Args:
        has_device: whether the store has a tier in device memory. If so, ``past_ram`` requires GPUDirect Storage.

    Raises:
        ValueError: a ``links_with`` returns wrong links.
        TieredError: see ``default_links``.
    """
    for tier, neighbour in ((slow_tier, fast_tier), (fast_tier, slow_tier)):
        if isinstance(tier, LinkedTier) and (links := tier.links_with(neighbour)) is not None:
            _check_directions(tier, neighbour, slow_tier, links)
            return links
    if isinstance(slow_tier, NvmeTier) and isinstance(fast_tier, RamTier):
        engine = FileEngine(slow_tier, make_mover(slow_tier, needs_gds=has_device and slow_tier.past_ram))
        return FileReadLink(slow_tier, fast_tier, engine), FileWriteLink(fast_tier, slow_tier, engine)
    if isinstance(fast_tier, GpuTier) and isinstance(slow_tier, RamTier) and not _is_host_memory(fast_tier):
        return CudaLink(slow_tier, fast_tier), CudaLink(fast_tier, slow_tier)
    if _is_host_memory(fast_tier) and _is_host_memory(slow_tier):
        return HostLink(slow_tier, fast_tier), HostLink(fast_tier, slow_tier)
    return ()


def _check_directions(tier: Tier, neighbour: Tier, slow_tier: Tier, links: Sequence[Link]) -> None:
    pairs = sorted((link.src, link.dst) for link in links)
    expected = {(tier.name, neighbour.name), (neighbour.name, tier.name)}
    text = "one link each way"
    if isinstance(slow_tier, ReadOnlyTier) and slow_tier.is_read_only:
        expected = {(src, dst) for src, dst in expected if src == slow_tier.name}
        text = f"one link out of the read-only '{slow_tier.name}'"
    if pairs != sorted(expected):
        raise ValueError(
            f"{type(tier).__name__}.links_with must return {text} between '{tier.name}' and '{neighbour.name}', or "
            f"None; it returned {[f'{src}->{dst}' for src, dst in pairs]}"
        )


def make_mover(tier: NvmeTier, *, needs_gds: bool = False) -> PartMover:
    """Return the file mover that a tier's ``engine`` selects. If ``needs_gds`` is True, this is always kvikio.

    Raises:
        TieredError: ``engine`` is ``kvikio`` but kvikio is missing or does not work, or GPUDirect Storage fails.
    """
    if needs_gds:
        for path in tier.paths:
            if reason := probe_kvikio(path).reason:
                raise TieredError(f"GPUDirect Storage does not work between '{path}' and GPU memory: {reason}")
        return KvikioMover(tier, has_gds=True)
    if tier.engine == "posix":
        return PosixMover(tier)
    has_gds = may_open_driver() and all(probe_kvikio(path).has_gds for path in tier.paths)
    if tier.engine == "auto" and not has_gds:
        return PosixMover(tier)
    return KvikioMover(tier, has_gds=has_gds)


def _is_host_memory(tier: Tier) -> bool:
    return tier.device is not None and tier.device.type == "cpu"
