"""Rates of the doctor's measurements, computed from scripted times, so that each formula has one exact result."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fakes.virtual_cuda import VirtualCuda
from megatrain.extras.doctor import drives, examine, layers, processors
from megatrain.extras.doctor.drives import DriveEffort, DriveResult, Rates, SustainedWrite, TierProbe, measure_drive
from megatrain.extras.doctor.layers import LayerRates, LayerShape
from megatrain.extras.doctor.processors import GpuResult, ProcessorResult
from megatrain.machine.file_systems import file_system_of
from megatrain.optim.threads import KernelThreads
from tiered import KiB, MiB


class Clock:
    """A clock that advances by one second at each reading, or returns scripted times."""

    def __init__(self, times: Sequence[float] | None = None) -> None:
        self._times: Iterator[float] = itertools.count(0.0, 1.0) if times is None else iter(times)

    def perf_counter(self) -> float:
        return next(self._times)

    thread_time = perf_counter


def test_best_time_of_at_least_three_runs_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now, taken = 0.0, iter([9.0, 3.0, 2.0, 4.0, 9.0, 3.0, 2.0, 4.0, 1.0, 0.5])

    def work() -> None:
        nonlocal now
        now += next(taken)

    monkeypatch.setattr(processors, "time", SimpleNamespace(perf_counter=lambda: now))
    assert processors._best_s(work, 0.0) == 2.0 and now == 18.0
    assert processors._best_s(work, 9.5) == 1.0 and next(taken) == 0.5, "a fourth run, because only 9 s were over"


def test_rates_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update of a parameter takes 4 arrays of 4 bytes. An addition reads two elements and writes one."""
    seen: list[tuple[float, Any]] = []

    def time_work(work: Callable[[], object], seconds: float) -> float:
        seen.append((seconds, work()))
        return (2.0, 4.0, 8.0)[len(seen) - 1]

    arrays: list[torch.Tensor] = []
    make_updates = processors._make_updates

    def make(*tensors: Any) -> Any:
        arrays.extend(tensor.clone() for tensor in tensors[:4])
        return make_updates(*tensors)

    monkeypatch.setattr(processors, "_best_s", time_work)
    monkeypatch.setattr(processors, "_make_updates", make)
    monkeypatch.setattr(processors, "available_ram_bytes", lambda: 64 * MiB)
    found = processors.measure_processor(span_bytes=4 * MiB, seconds=0.5, threads=KernelThreads(3))
    count = 4 * MiB // 16
    assert found == ProcessorResult(3, 3 * 4 * count / 2.0, {"float32": count / 4.0, "bfloat16": count / 8.0})
    assert seen == [(0.5, None)] * 3
    weight, m, v, gradient = arrays
    assert [array.numel() for array in arrays] == [count] * 4
    for array, low, high in ((weight, -2, 2), (m, -1, 1), (v, 0, 1), (gradient, -1, 1)):
        assert low <= array.min() < low / 2 + 0.01 and 0.99 * high / 2 < array.max() <= high
    del seen[:]
    monkeypatch.setattr(processors, "available_ram_bytes", lambda: 8 * MiB)
    assert processors.measure_processor(span_bytes=4 * MiB, seconds=0.0).ram_update == 3 * MiB / 4 / 2.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_measured_updates_are_steps_of_adamw(dtype: str) -> None:
    weight, m, v, gradient = torch.empty(4, 4096).uniform_(0.5, 1.0).unbind()
    before, old_m, old_v = weight.clone(), m.clone(), v.clone()
    processors._make_updates(weight, m, v, gradient, KernelThreads(2))[dtype]()
    torch.testing.assert_close(m, 0.9 * old_m + 0.1 * gradient)
    torch.testing.assert_close(v, 0.95 * old_v + 0.05 * gradient**2)
    if dtype == "float32":
        step = (m / 0.1) / (v / 0.05).sqrt()
        torch.testing.assert_close(weight, before * (1 - 1e-6) - 1e-5 * step, rtol=1e-6, atol=0)
    else:
        assert not torch.equal(weight, before)


def test_sums_are_added_in_place() -> None:
    total, addend = torch.arange(100_000.0), torch.arange(100_000.0) / 4
    processors._add(total, addend, KernelThreads(2))
    assert torch.equal(total, torch.arange(100_000.0) * 1.25)
    assert torch.equal(addend, torch.arange(100_000.0) / 4)


def test_products_grow_until_they_take_a_tenth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight repetitions of a product may take at most a tenth of the time, so the third size is the last one."""
    asked: list[float] = []

    def time_work(work: Callable[[], object], seconds: float) -> float:
        asked.append(seconds)
        return (0.001, 0.025, 0.026)[len(asked) - 1]

    monkeypatch.setattr(processors, "_best_s", time_work)
    rate = processors.product_flops_per_s(torch.device("cpu"), torch.float32, 2.0)
    assert rate == 3 * 2 * 2048 * 1024 * (1024 + 3 * 1024) / 0.026
    assert asked == [2 / 3] * 3


def test_devices_are_synchronized_after_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "_PRODUCT_TOKENS", (64,))
    monkeypatch.setattr(processors, "_ROW_TOKENS", 64)
    monkeypatch.setattr(processors, "_TOKENS", 64)
    monkeypatch.setattr(processors, "_best_s", lambda work, seconds: work() or 1.0)
    waits: list[None] = []
    processors.product_flops_per_s(torch.device("cpu"), torch.float32, 0.0, lambda: waits.append(None))
    assert len(waits) == 1
    processors.layer_rates(torch.device("cpu"), torch.float32, 0.0, lambda: waits.append(None))
    assert len(waits) == 1 + 2 * 2, "once to count the work and once to time it, for attention and for the rest"


def test_rates_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the buffer is added to the other half. Sums of products are added at the rate of other operators."""
    asked: list[Any] = []

    def time_layers(device: torch.device, dtype: torch.dtype, seconds: float, synchronize: Any) -> tuple[float, float]:
        synchronize()
        asked.append((device.type, dtype, seconds))
        return (11.0, 12.0) if dtype == torch.float32 else (13.0, 14.0)

    def time_products(
        device: torch.device, dtype: torch.dtype, seconds: float, synchronize: Any, *, sums_bytes_per_s: float
    ) -> float:
        synchronize()
        asked.append((device.type, dtype, seconds))
        return 2 * sums_bytes_per_s

    monkeypatch.setattr(processors, "layer_rates", time_layers)
    monkeypatch.setattr(processors, "product_flops_per_s", time_products)
    monkeypatch.setattr(processors, "_COPY_BYTES", 8 * KiB)
    monkeypatch.setattr(processors, "_median_s", lambda work: 0.5 if work() is None else 0.25)
    with VirtualCuda(1 << 30).in_place():
        found = processors.measure_gpu(seconds=3.0)
        name = torch.cuda.get_device_name(0)
    assert found == GpuResult(
        name, 1 << 30, True, 32 * KiB, 32 * KiB, {"float32": 24.0, "bfloat16": 28.0}, 3 * 4 * KiB / 0.25,
        {"float32": 11.0, "bfloat16": 13.0}, {"float32": 12.0, "bfloat16": 14.0},
    )  # fmt: skip
    assert asked == [("cuda", dtype, 3.0) for dtype in (torch.float32, torch.bfloat16)] * 2


def test_rates_of_layers_are_reciprocal_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind of work without cost in a dtype has no rate there. Launches have the rate of the first dtype."""
    costs = {"float32": [0.5, 0.25, 0.125, 0.0625], "bfloat16": [2.0, 0.0, 4.0, 8.0]}
    shapes = layers.SHAPES[:2]

    def phases(shape: LayerShape, dtype: str, seconds: float) -> Iterator[tuple[float, Sequence[float]]]:
        assert seconds == 7.0
        for kind in range(2) if shape is shapes[0] else range(2, 4):
            work = [0.0] * 4
            work[kind] = 3.0
            yield max(3 * costs[dtype][kind], 1e-9), work if costs[dtype][kind] else [0.0] * 4

    monkeypatch.setattr(layers, "_measure_phases", phases)
    found = layers.measure_layers(seconds=7.0, shapes=shapes)
    assert (found.matmul_flops, found.attention_flops) == (
        pytest.approx({"float32": 2.0, "bfloat16": 0.5}), pytest.approx({"float32": 4.0}),
    )  # fmt: skip
    assert found.elementwise == pytest.approx({"float32": 8.0, "bfloat16": 0.25})
    assert found.launches_per_s == pytest.approx(16.0)


@pytest.mark.parametrize(("hidden", "heads"), [(32, 1), (64, 1), (768, 12)])
def test_model_of_a_layer_shape(hidden: int, heads: int) -> None:
    assert layers._model_config(LayerShape(hidden, 96, 3, 77, 5, 24)) == {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": 77,
        "max_position_embeddings": 24, "tie_word_embeddings": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("nbytes", "block_bytes", "count", "total"),
    [(64 * MiB, None, 8, 64 * MiB), (20 * MiB, None, 2, 16 * MiB), (100 * MiB + 4095 * 8, None, 8, 100 * MiB),
     (192 * KiB, 64 * KiB, 3, 192 * KiB), (KiB, 64 * KiB, 1, 64 * KiB)],
)  # fmt: skip
def test_blocks_of_a_probe(tmp_path: Path, nbytes: int, block_bytes: int | None, count: int, total: int) -> None:
    with TierProbe(tmp_path / "tier", nbytes, block_bytes) as probe:
        assert (len(probe._keys), probe.nbytes) == (count, total)


def test_rates_of_a_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripted clock advances by a second at each reading: two readings for each rate, or three with a limit."""
    monkeypatch.setattr(drives, "time", Clock())
    with TierProbe(tmp_path / "tier", 512 * KiB, 64 * KiB) as probe:
        nbytes = probe.nbytes
        assert (probe.read(), probe.write()) == (nbytes, nbytes)
        assert probe.read_and_write(0.0) == 2 * nbytes / 2
        assert probe.read_and_write(3.5) == 2 * (nbytes + 3 * 64 * KiB) / 5, "three more blocks within 3.5 s"
        assert probe.seconds_per_copy() == 1 / (2 * 8)
        written = probe.sustained_write(0.0, 1)
        assert written == SustainedWrite(nbytes, nbytes, nbytes, 4.0 - 0.0)


def test_long_write_compares_its_first_and_last_quarter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TierProbe(tmp_path / "tier", 128 * KiB, 64 * KiB) as probe:
        monkeypatch.setattr(drives, "time", Clock())
        for seconds, nbytes, rounds in ((100.0, 9 * probe.nbytes, 9), (100.0, 9 * probe.nbytes - 1, 9), (3.5, 1e9, 4)):
            rates = iter([9.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0])
            monkeypatch.setattr(TierProbe, "_evict_all", lambda self, rates=rates: next(rates))
            found = probe.sustained_write(seconds, int(nbytes))
            first, last = (8.0, 0.5) if rounds == 9 else (9.0, 5.0)
            assert found == SustainedWrite(first, last, rounds * probe.nbytes, rounds + 1.0)


@pytest.mark.parametrize("is_full", [False, True])
def test_every_figure_of_a_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool) -> None:
    """Reads and writes alternate for three rounds of the scripted clock. The first copies only warm up."""
    rates = {"read": iter([3.0, 1.0, 2.0]), "write": iter([1e12, 30.0, 10.0, 20.0])}
    monkeypatch.setattr(TierProbe, "read", lambda self: next(rates["read"]))
    monkeypatch.setattr(TierProbe, "write", lambda self: next(rates["write"]))
    monkeypatch.setattr(TierProbe, "read_and_write", lambda self, seconds: 5 * seconds)
    monkeypatch.setattr(TierProbe, "sustained_write", lambda self, seconds, nbytes: (seconds, nbytes))
    copies = iter([9.0, 0.25])
    monkeypatch.setattr(TierProbe, "seconds_per_copy", lambda self: next(copies))
    monkeypatch.setattr(drives, "compute_slowdown", lambda tier, seconds: 6 * seconds)
    monkeypatch.setattr(drives, "check_path", lambda path: 400 * MiB)
    monkeypatch.setattr(drives, "time", Clock())
    effort = DriveEffort(72 * MiB, 2.5, 2.0, *((4.0, 8, 3.0) if is_full else ()))
    system = file_system_of(tmp_path)
    with TierProbe(tmp_path / "probe", 64 * KiB, 64 * KiB) as probe:
        is_direct = probe.is_direct
    assert measure_drive(tmp_path, effort) == DriveResult(
        tmp_path, system, 400 * MiB, is_direct, drives.is_rotational(system.device), 72 * MiB, Rates(2.0, 20.0, 10.0),
        (4.0, 8) if is_full else None, 18.0 if is_full else None, 0.25,  # type: ignore[arg-type]
    )  # fmt: skip


def test_slowdown_is_the_lost_share_of_the_computation_per_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two products take 4 s while the drive is idle, and three take 12 s while it moves 100 bytes per second."""

    class Pool:
        def __init__(self, num_threads: int) -> None:
            assert num_threads == 1

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *error: object) -> None: ...

        def submit(self, work: Callable[[float], float], seconds: float) -> SimpleNamespace:
            result, is_done = work(seconds), iter([False, False, False, True])
            return SimpleNamespace(done=lambda: next(is_done), result=lambda: result)

    tier: Any = SimpleNamespace(read_and_write=lambda seconds: 100.0 if seconds == 3.0 else 0.0)
    monkeypatch.setattr(drives, "_PRODUCT_SIZE", 8)
    monkeypatch.setattr(drives, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(drives, "time", Clock([0, 1, 2, 3, 4, 10, 22]))
    assert drives.compute_slowdown(tier, 3.0) == (1 - 2 / 4) / 100
    monkeypatch.setattr(drives, "time", Clock([0, 1, 2, 3, 4, 10, 12]))
    assert drives.compute_slowdown(tier, 3.0) == 0, "faster than without transfers"


@pytest.mark.parametrize(("quick", "span", "seconds"), [(True, 256 * MiB, 0.3), (False, 2048 * MiB, 1.5)])
def test_order_and_effort_of_an_examination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: bool, span: int, seconds: float
) -> None:
    events: list[Any] = []
    rates = LayerRates({}, {}, {}, 0.0)
    processor = ProcessorResult(1, 2.0, {})

    def answer(name: str, result: Any) -> Any:
        return lambda *args, **options: events.append((name, *args, options)) or result

    monkeypatch.setattr(examine, "measure_processor", answer("processor", processor))
    monkeypatch.setattr(examine, "measure_gpu", answer("gpu", None))
    monkeypatch.setattr(examine, "measure_layers", answer("layers", rates))
    monkeypatch.setattr(examine, "measure_drive", answer("drive", "a drive"))
    other = tmp_path / "other"
    other.mkdir()
    results = examine.examine([tmp_path, other], quick=quick, on_progress=events.append)
    effort = drives.QUICK if quick else drives.FULL
    assert events == [
        "the optimizer", ("processor", {"span_bytes": span, "seconds": seconds}), "GPU", ("gpu", {"seconds": seconds}),
        "layers on the CPU", ("layers", {"seconds": seconds}), str(tmp_path), ("drive", tmp_path, effort, {}),
        str(other), ("drive", other, effort, {}),
    ]  # fmt: skip
    assert (results.is_quick, results.processor, results.layers, results.gpu) == (quick, processor, rates, None)
    assert results.drives == ("a drive", "a drive") and results.gds == processors.check_gds()
    age = datetime.now(UTC) - results.measured_at
    assert results.measured_at.microsecond == 0 and 0 <= age.total_seconds() < 60


def test_the_time_of_gpu_work_is_read_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    times_ms = iter([2.0, 8.0] * 50)

    class Event:
        is_awaited = False

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            pass

        def synchronize(self) -> None:
            self.is_awaited = True

        def elapsed_time(self, end: Event) -> float:
            assert end.is_awaited
            return next(times_ms)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(processors, "_NUM_COPIES", 3)
    assert processors._median_s(lambda: None) == 0.002
