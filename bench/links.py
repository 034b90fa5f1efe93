"""Rate at which the tier moves bytes between a drive and tensors in RAM, compared with fio and the usual libraries.

    python bench/links.py --json --scratch /mnt/drive
    python bench/links.py --quick             # a minute, 1 GiB of disk instead of 4

Claim: in reads, writes, and concurrent reads and writes, the tier reaches 0.95 of fio's best rate without checksums,
and 0.90 with checksums. All sides alternate in one process on one drive, and every round measures each side once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import Report
from bench.peers.base import MIXED, READ, WRITE, Samples, Side, SkippedError, Work, make_random_file
from bench.peers.fio import NUM_QUICK_VARIANTS, VARIANTS, FioSide, Variant
from bench.peers.libraries import DeepSpeedSide, KvikioSide, SafetensorsSide, ZarrSide
from bench.peers.tier import VERIFY_MODES, TierSide
from tiered.units import MiB

#: Checksum mode -> share of fio's best rate that the tier must reach.
TARGETS = {"off": 0.95, "resume": 0.90, "always": 0.90}
BLOCKS_MIB = (16, 64, 256, 512)
QUICK_BLOCKS_MIB = (16, 64)
#: Limited because zarr and safetensors need separate files, and all files must fit in 4 GiB of disk.
LARGEST_LIBRARY_TOTAL_MIB = 512

Measured = Mapping[tuple[str, str], Samples]
Rates = Mapping[str, Sequence[float]]


def main() -> int:
    """Run the bench. Return 1 if a row fails, except for timing rows."""
    arguments = parse_arguments()
    report = Report("links", as_json=arguments.json, tokens_per_step=None)
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        for block_mib in arguments.blocks or (QUICK_BLOCKS_MIB if arguments.quick else BLOCKS_MIB):
            folder = Path(scratch) / f"{block_mib}MiB"
            folder.mkdir()
            work = Work(block_mib * MiB, num_blocks(arguments, block_mib), folder)
            variants = VARIANTS[:NUM_QUICK_VARIANTS] if arguments.quick else VARIANTS
            BlockSize(work, variants, report, arguments.rounds or (2 if arguments.quick else 3)).run()
            remove_files(folder)
    return 0 if report.all_ok else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--quick", action="store_true", help="two block sizes, 256 MiB a measurement, two rounds")
    parser.add_argument("--blocks", type=_sizes, help="block sizes in MiB, e.g. 16,64")
    parser.add_argument("--total", type=int, help="MiB that one measurement moves, at least two blocks")
    parser.add_argument("--rounds", type=int, help="measured rounds, after one warm-up round")
    parser.add_argument("--scratch", type=Path, help="folder on the drive to measure; default: the temporary folder")
    return parser.parse_args()


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def num_blocks(arguments: argparse.Namespace, block_mib: int) -> int:
    """Return the number of blocks in a measurement. It is even, because "mixed" needs two equal halves."""
    total_mib = arguments.total or (256 if arguments.quick else 512)
    return max(2, total_mib // block_mib // 2 * 2)


def remove_files(folder: Path) -> None:
    """Delete the files that one block size used, because the next block size needs the disk space."""
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


class BlockSize:
    """Measurement of all sides at one block size: a warm-up round, the measured rounds, and the printed rows."""

    def __init__(self, work: Work, variants: Sequence[Variant], report: Report, num_rounds: int) -> None:
        self._work, self._variants, self._report, self._num_rounds = work, variants, report, num_rounds
        self._size = f"{work.block_nbytes // MiB}MiB"
        self._skipped: dict[str, str] = {}

    def run(self) -> None:
        """Measure all sides and print the rows."""
        with ExitStack() as stack:
            sides = self._open_sides(stack)
            measured = self._measure(sides)
            self._print_tiers([side for side in sides if isinstance(side, TierSide)])
        self._report.row(f"{self._size}.bytes_per_measurement", self._work.nbytes, "bytes")
        self._report.row(f"{self._size}.load_average", round(os.getloadavg()[0], 2), "threads, 1 minute")
        for (operation, side), samples in measured.items():
            self._print_side(f"{operation}.{self._size}.{side}", samples)
        for operation in (READ, WRITE, MIXED):
            self._print_ratios(operation, measured)
        for name, reason in self._skipped.items():
            self._report.row(f"{self._size}.{name}.skipped", reason, "reason")

    # -- sides -------------------------------------------------------------------------------------------------

    def _open_sides(self, stack: ExitStack) -> list[Side]:
        raw = self._work.folder / "raw"
        make_random_file(raw, self._work.nbytes)
        sides: list[Side] = []
        for name, make in self._makers(raw).items():
            try:
                with redirect_stdout(sys.stderr):  # DeepSpeed prints, but standard output is only for rows
                    side = make()
            except (SkippedError, ImportError) as error:
                self._skipped[name] = str(error)
                continue
            stack.callback(side.close)
            sides.append(side)
        return sides

    def _makers(self, raw: Path) -> dict[str, Callable[[], Side]]:
        work = self._work
        makers: dict[str, Callable[[], Side]] = {f"tier_{mode}": partial(TierSide, work, mode) for mode in VERIFY_MODES}
        makers |= {variant.name: partial(FioSide, work, variant, raw) for variant in self._variants}
        makers["kvikio"] = partial(KvikioSide, work, raw)
        for request_mib, num_threads in ((1, 1), (8, 2)):
            name = f"deepspeed_aio_{request_mib}M_qd32_x{num_threads}"
            makers[name] = partial(DeepSpeedSide, work, raw, request_mib=request_mib, depth=32, num_threads=num_threads)
        for name, library in (("zarr", ZarrSide), ("safetensors", SafetensorsSide)):
            if work.nbytes <= LARGEST_LIBRARY_TOTAL_MIB * MiB:
                makers[name] = partial(library, work)
            else:
                self._skipped[name] = f"{work.nbytes // MiB} MiB more would take the bench beyond 4 GiB of disk"
        return makers

    def _measure(self, sides: Sequence[Side]) -> Measured:
        """Run all rounds, and return the samples by operation and side. Each round begins with a different side."""
        measured: dict[tuple[str, str], Samples] = {}
        for number in range(1 + self._num_rounds):
            first = number % len(sides)
            for operation in (READ, WRITE, MIXED):
                for side in [*sides[first:], *sides[:first]]:
                    if operation not in side.operations or side.name in self._skipped:
                        continue
                    try:
                        sample = side.measure(operation)
                    except SkippedError as error:
                        self._skipped[side.name] = str(error)
                        continue
                    if number:
                        key = (operation, side.name)
                        measured.setdefault(key, Samples(self._work.nbytes)).each.append(sample)
        return {key: samples for key, samples in measured.items() if key[1] not in self._skipped}

    # -- rows --------------------------------------------------------------------------------------------------

    def _print_tiers(self, tiers: Sequence[TierSide]) -> None:
        for side in tiers:
            name = f"{self._size}.{side.name}"
            self._report.row(f"{name}.wrong_blocks", side.num_wrong, "blocks", target=0, ok=side.num_wrong == 0)
            self._report.row(f"{name}.path", side.io_path, "way")
            self._report.row(f"{name}.huge_pages", side.huge_page_bytes, "bytes")

    def _print_side(self, name: str, samples: Samples) -> None:
        self._report.row(f"{name}.rate", statistics.median(samples.rates), "GB/s")
        self._report.row(f"{name}.rates", [round(rate, 4) for rate in samples.rates], "GB/s")
        self._report.row(f"{name}.cpu", statistics.median(samples.cpu_s_per_gb), "CPU-s/GB")

    def _print_ratios(self, operation: str, measured: Measured) -> None:
        rates = {side: samples.rates for (kind, side), samples in measured.items() if kind == operation}
        fio = {side: each for side, each in rates.items() if side.startswith("fio_")}
        small_pages = {side: each for side, each in fio.items() if not side.endswith("_huge")}
        self._print_ratios_to("fio", fio, operation, rates, is_claimed=True)
        self._print_ratios_to("fio_small_pages", small_pages, operation, rates, is_claimed=False)

    def _print_ratios_to(self, group: str, fio: Rates, operation: str, rates: Rates, *, is_claimed: bool) -> None:
        """Print the ratio of the tier's rate to the rate of the fio variant with the highest median."""
        if not fio:
            return
        best = max(fio, key=lambda side: statistics.median(fio[side]))
        self._report.row(f"{operation}.{self._size}.best_{group}", best, "side")
        for mode in VERIFY_MODES:
            if f"tier_{mode}" not in rates:
                continue
            ratios = [ours / its for ours, its in zip(rates[f"tier_{mode}"], fio[best], strict=True)]
            ratio = statistics.median(ratios)
            target = TARGETS[mode] if is_claimed else None
            ok = None if target is None else ratio >= target
            name = f"{operation}.{self._size}.ratio.tier_{mode}/{group}"
            self._report.row(name, ratio, "x", target=target, ok=ok, timing=True)
            self._report.row(f"{name}.each", [round(each, 4) for each in ratios], "x")


if __name__ == "__main__":
    sys.exit(main())
