"""The links between neighbouring tiers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tiered.links.base import Link, LinkedTier
from tiered.links.cuda import CudaLink
from tiered.links.files import FileEngine, FileReadLink, FileWriteLink, PartMover
from tiered.links.host import HostLink
from tiered.links.kvikio import KvikioMover
from tiered.links.posix import PosixMover
from tiered.links.probe import may_open_driver, probe_kvikio
from tiered.tiers.base import Tier
from tiered.tiers.gpu import GpuTier
from tiered.tiers.nvme import NvmeTier
from tiered.tiers.ram import RamTier


def default_links(tiers: Sequence[Tier]) -> list[Link]:
    """Return both directions between each two neighbours of ``tiers`` (fast to slow).

    A tier with a method ``links_with`` is asked first, the slower of two before the faster.

    Starts no thread and touches no device, unless an ``NvmeTier`` is to use kvikio, which does both.

    Raises:
        ValueError: two neighbours that nothing connects, or a tier whose ``links_with`` returns something else than
            one link each way.
        TieredError: an ``NvmeTier`` is to use kvikio, which is missing or does not work here.
    """
    return [link for fast, slow in pairwise(tiers) for link in _links_between(fast, slow)]


def _links_between(fast: Tier, slow: Tier) -> Sequence[Link]:
    for tier, neighbour in ((slow, fast), (fast, slow)):
        if isinstance(tier, LinkedTier) and (links := tier.links_with(neighbour)) is not None:
            _check_directions(tier, neighbour, links)
            return links
    if isinstance(slow, NvmeTier) and isinstance(fast, RamTier):
        engine = FileEngine(slow, make_mover(slow))
        return FileReadLink(slow, fast, engine), FileWriteLink(fast, slow, engine)
    if isinstance(fast, GpuTier) and isinstance(slow, RamTier) and not _is_host_memory(fast):
        return CudaLink(slow, fast), CudaLink(fast, slow)
    if _is_host_memory(fast) and _is_host_memory(slow):
        return HostLink(slow, fast), HostLink(fast, slow)
    raise ValueError(
        f"no link connects tier '{fast.name}' ({type(fast).__name__}) with the next slower one '{slow.name}' "
        f"({type(slow).__name__}): put a RamTier between them, list tiers from fast to slow, or pass your own links"
    )


def _check_directions(tier: Tier, neighbour: Tier, links: Sequence[Link]) -> None:
    found = sorted((link.src, link.dst) for link in links)
    wanted = sorted([(tier.name, neighbour.name), (neighbour.name, tier.name)])
    if found != wanted:
        raise ValueError(
            f"{type(tier).__name__}.links_with must return one link each way between '{tier.name}' and "
            f"'{neighbour.name}', or None; it returned {[f'{src}->{dst}' for src, dst in found]}"
        )


def make_mover(tier: NvmeTier) -> PartMover:
    """Return what moves the bytes of a tier's files, as its ``engine`` says.

    Raises:
        TieredError: ``engine`` is ``kvikio``, which is missing or does not work here.
    """
    if tier.engine == "posix":
        return PosixMover(tier)
    has_gds = may_open_driver() and all(probe_kvikio(path).carries_gds for path in tier.paths)
    if tier.engine == "auto" and not has_gds:
        return PosixMover(tier)
    return KvikioMover(tier, has_gds=has_gds)


def _is_host_memory(tier: Tier) -> bool:
    return tier.device is not None and tier.device.type == "cpu"
