"""Setup for all tests: no Hugging Face Hub, one thread, reproducible Hypothesis examples, GPU tests only with a GPU."""

from __future__ import annotations

import atexit
import datetime
import gc
import itertools
import os
import shutil
import signal
import tempfile

os.environ.pop("COLUMNS", None)  # xdist sets this in its workers; without it, output is formatted as for a file
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Rates that `doctor` measured on this machine affect placements, so tests start with an empty cache. XDG requires an
# absolute path.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="megatrain-tier-tests-")

# All processes of a test run share one folder of cached traces. The first process creates it and later removes it.
if "KEPT_TRACES" not in os.environ:
    os.environ["KEPT_TRACES"] = tempfile.mkdtemp(prefix="megatrain-tier-traces-")
    atexit.register(shutil.rmtree, os.environ["KEPT_TRACES"], ignore_errors=True)

# The day selects the rows of tests/pairs and, with `--today`, the costly tests that run. It is set once, so that all
# processes agree even after midnight.
os.environ.setdefault("TEST_DAY", str(datetime.datetime.now(datetime.UTC).date().toordinal()))

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
import torch

from megatrain.machine.file_systems import file_system_of

if TYPE_CHECKING:
    from processes.saved_run import SavedRun

# A run refuses a drive on tmpfs, and on many systems the default folder for temporary files is on tmpfs.
if file_system_of(Path(tempfile.gettempdir())).medium == "memory" and os.access("/var/tmp", os.W_OK):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/var/tmp")

# In background jobs and under nohup, these signals are ignored, and child processes inherit this setting. Some tests
# send the signals.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
gc.disable()  # until pytest has found all tests, because garbage collection during imports takes ten seconds
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


#: Folders, files and tests that take minutes because of their many cases. Without `-m slow`, one in `SHARE` cases of a
#: test runs, plus cases that cover the missing pairs of options, except in `WHOLE_RUNS`. A test with fewer than
#: `FEWEST` cases runs them all.
LONG_MATRICES = (
    "tests/parity/",
    "tests/gpu/",
    "tests/megatrain/engine/",
    "tests/megatrain/embed/",
    "tests/megatrain/converters/test_liger_interpreted.py",
    "tests/megatrain/models/test_quantized.py",
    "tests/megatrain/optim/test_triton_elementwise.py::test_interpreted",
    "tests/megatrain/optim/test_triton_elementwise.py::test_machine_code_rounds_every_operation_to_nearest",
    "tests/megatrain/ranks/test_failures.py",
    "tests/megatrain/test_lora.py",
    "tests/megatrain/models/test_small.py",
    "tests/cli/test_doctor.py",
    "tests/examples/test_embed_examples.py",
    "tests/cli/test_ranks.py",
    "tests/cli/test_hub.py",
    "tests/docs/test_sizing.py",
    "tests/examples/test_popular_examples.py::test_example_plan_matches_its_comment",
    "tests/faults/test_flipped_bytes.py",
    "tests/faults/test_live_copies.py",
    "tests/faults/test_power_cut.py",
    "tests/megatrain/checkpoint/test_golden.py",
    "tests/megatrain/converters/test_masks.py",
    "tests/megatrain/data/test_fields.py",
    "tests/megatrain/data/test_templates.py",
    "tests/megatrain/models/test_export.py::test_transformers_loads_bit_identical_weights",
    "tests/megatrain/optim/test_kernels.py::test_no_product_and_sum_are_fused",
    "tests/megatrain/test_flops.py",
    "tests/megatrain/trace/test_repeated_layers.py::test_trace_of_repeated_layers_matches_all_layers",
    "tests/test_readme.py::test_python_runs",
    "tests/tiered/test_load.py",
    "tests/tiered/test_lost_work.py::test_damaged_generations_are_reported_and_passed_over",
    "tests/tiered/test_posix_link.py::test_blocks_come_back_and_zarr_reads_the_same_bytes",
    "tests/tiered/test_pruning.py",
)
#: Folders whose cases are whole runs: one in `SHARE_OF_RUNS` runs. `tests/pairs` covers the pairs of their options.
WHOLE_RUNS = ("tests/parity/", "tests/gpu/")
SHARE, SHARE_OF_RUNS, FEWEST = 17, 29, 2  # primes, so that the kept cases have different values of each parameter
#: Exceptions that run all their cases: fast tests with dissimilar cases, and tests unlike any other test.
SHORT = (
    "tests/megatrain/embed/test_model_methods.py",
    "tests/megatrain/embed/test_optimizer.py::test_averages_match_torch",
    "tests/megatrain/embed/test_optimizer.py::test_cleared_gradients_are_not_used",
    "tests/megatrain/embed/test_optimizer.py::test_groups_of_parameters",
    "tests/megatrain/embed/test_optimizer.py::test_schedulers",
    "tests/megatrain/embed/test_optimizer_refusals.py",
    "tests/gpu/test_freed_memory.py",
    "tests/megatrain/engine/test_attention.py",
    "tests/megatrain/engine/test_device_errors.py",
    "tests/megatrain/engine/test_device_kernels.py::test_rows_added_on_the_host_match_one_index_add_bitwise",
    "tests/megatrain/engine/test_device_kernels.py::test_interpreted_groups_are_a_stable_sort",
    "tests/megatrain/engine/test_flash.py",
    "tests/megatrain/engine/test_mirror.py",
    "tests/megatrain/engine/test_tape.py",
    "tests/megatrain/engine/test_updates.py",
    "tests/megatrain/engine/test_unneeded.py::test_use_of_a_result_decides_if_its_product_is_skipped",
    "tests/megatrain/engine/test_weight_gradients.py",
    "tests/megatrain/engine/test_work.py",
    "tests/megatrain/engine/test_kept_graphs.py::test_kept_and_recomputed_results_are_bit_identical[zamba2]",
    "tests/megatrain/optim/test_triton_elementwise.py::test_interpreted_kernels_apply_the_clip_decision",
    "tests/megatrain/models/test_quantized.py::test_any_part_of_a_quantized_weight_is_dequantized",
    "tests/parity/test_distill.py::test_chunked_logits_match_plain_torch_loss_and_gradient",
    "tests/parity/test_parts.py",
    "tests/parity/test_past_ram.py::TestProbe",
    "tests/parity/test_preferences.py::test_losses_and_gradients_match_whole_logits",
    "tests/parity/test_ranks.py::test_settings_unsupported_on_several_ranks_are_refused",
    "tests/parity/test_router_loss.py",
    "tests/parity/test_scores.py::test_unsupported_scoring_is_refused_with_a_reason",
    "tests/parity/test_tiled.py::test_mlps_are_found_by_behavior",
    "tests/parity/test_vocabulary_parts.py::test_non_elementwise_logit_hooks_disable_chunking",
    "tests/parity/test_vocabulary_parts.py::test_frozen_parameters",
    "tests/parity/test_vocabulary_parts.py::test_partwise_softmax_matches_the_whole",
)
#: Benches that `test_rows` marks as slow. Other tests in test_benches.py also run them or their parts.
LONG_BENCHES = (
    "process_memory",
    "optimizer",
    "large",
    "plan_accuracy",
    "activations",
    "ranks",
    "nvme_step",
    "overlap",
    "recompute",
    "compare/deepspeed",
    "gpu",
)


#: Tests that take 0.8 s or more on a slow processor, one per line, found with `--durations=0 --durations-min=0.8`.
#: With `--today`, each of them runs on one day of `DAYS`. Neighboring lines are of the same folder, so that each day
#: has tests of every folder with at least `DAYS` of them. Left out are a few tests of basic laws, which run every day:
#: one run in each placement, a run next to plain PyTorch, and the direction of imports.
COSTLY, DAYS = Path(__file__).with_name("costly_tests.txt"), 7

#: Files with tests that take half a minute or more. If they ran last, the other workers would be idle.
FIRST = (
    "tests/faults/test_kills.py",
    "tests/megatrain/plan/test_headline_plans.py",
    "tests/megatrain/test_memory.py",
    "tests/parity/test_ranks.py",
    "tests/test_benches.py",
    "tests/test_wheel.py",
)

#: Tests of the trace itself, and tests that plan nothing. They do not use the cache of traces, except in
#: `oracles.tiered_run.plan_of`.
TRACED_ANEW = (
    "tests/megatrain/engine/",
    "tests/megatrain/converters/",
    "tests/megatrain/plan/test_planned_gpu.py",
    "tests/megatrain/test_flops.py",
    "tests/null_gpu/",
    "tests/tiered/",
)


#: File of the test that ran last.
_FILE = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--today", action="store_true", help="leave out the costly tests of other days")


def pytest_configure() -> None:
    if not os.environ["TEST_DAY"].isdecimal():
        raise pytest.UsageError(f"TEST_DAY must be the number of a day, such as 739951, not {os.environ['TEST_DAY']!r}")


def pytest_report_header() -> str:
    """Return the day, which selects the rows of ``tests/pairs`` and the costly tests."""
    return f"TEST_DAY={os.environ['TEST_DAY']}"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Limit torch to one thread. With tiny shapes, more threads would only change the order of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _traces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Share one trace among plans of the same model on the same rows, except in the tests of ``TRACED_ANEW``."""
    if request.node.nodeid.startswith(TRACED_ANEW):
        monkeypatch.delenv("KEPT_TRACES")
        yield
        return
    from oracles.traces import cached_traces

    with cached_traces():
        yield


@pytest.fixture(scope="session")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    """Create a run folder with a model of 0.1 M parameters and some text. Tests either copy it or only read it."""
    from processes.saved_run import make_run

    return make_run(tmp_path_factory.mktemp("untrained") / "w")


@pytest.fixture(scope="session")
def unbroken(untrained: SavedRun, tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    """Train a copy of ``untrained`` in RAM for 6 uninterrupted steps, saving at steps 2, 4 and 6. Tests copy it."""
    run = untrained.copy(tmp_path_factory.mktemp("unbroken") / "w")
    result = run.run(steps=6)
    assert result.exit_code == 0, result.output
    return run


@pytest.hookimpl(tryfirst=True)  # before the fixtures of the next file are created
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Exclude the permanent objects of earlier files, such as modules and caches, from garbage collection.

    Closing a software device triggers a garbage collection, which would take seconds if it scanned all objects.
    """
    if item.config.stash.get(_FILE, None) != item.path:
        item.config.stash[_FILE] = item.path
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before pytest deselects tests by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_long_matrices(items)
    if config.getoption("--today"):
        mark_costly_tests(items, int(os.environ["TEST_DAY"]))
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))  # a stable sort keeps files together
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    gc.enable()


def mark_costly_tests(items: list[pytest.Item], day: int) -> None:
    """Mark the costly tests of other days as slow."""
    costly = COSTLY.read_text(encoding="utf-8").splitlines()
    others = {name for number, name in enumerate(costly) if (number - day) % DAYS}
    for item in items:
        if item.nodeid in others:
            item.add_marker(pytest.mark.slow)


def mark_long_matrices(items: list[pytest.Item]) -> None:
    """Mark the cases of long test matrices as slow, except for a sample of each test."""
    cases: dict[tuple[str, bool], list[pytest.Item]] = {}
    for item in items:
        name = item.nodeid.partition("[")[0]
        is_slow = item.get_closest_marker("slow") is not None  # its file marks it as slow, so it is never sampled
        if item.nodeid.startswith(LONG_MATRICES) and not is_slow:
            # Sample GPU cases separately. Otherwise, all sampled cases of a test might use a software device.
            cases.setdefault((name, item.get_closest_marker("gpu") is not None), []).append(item)
        if name == "tests/test_benches.py::test_rows" and item.nodeid.partition("[")[2].rstrip("]") in LONG_BENCHES:
            item.add_marker(pytest.mark.slow)
    for group in cases.values():
        are_runs = group[0].nodeid.startswith(WHOLE_RUNS)
        share = SHARE_OF_RUNS if are_runs else SHARE
        kept = [item for number, item in enumerate(group) if number % share == 0 or item.nodeid.startswith(SHORT)]
        if len(group) >= FEWEST:
            kept += [] if are_runs else cases_for_uncovered_pairs(group, kept)
            for item in group:
                if item not in kept:
                    item.add_marker(pytest.mark.slow)


def cases_for_uncovered_pairs(group: list[pytest.Item], kept: list[pytest.Item]) -> list[pytest.Item]:
    """Return additional cases of a test, so that all cases that run cover every pair of option values that occurs.

    An option is a parameter with two values. Parameters with more values, such as model families, are only sampled.
    """
    values: dict[str, set[str]] = {}
    for item in group:
        for name, value in _parameters_of(item).items():
            values.setdefault(name, set()).add(value)
    options = [name for name, each in values.items() if len(each) == 2]

    def pairs_of(item: pytest.Item) -> set[tuple[tuple[str, str], ...]]:
        held = _parameters_of(item)
        return set(itertools.combinations(((name, held[name]) for name in options if name in held), 2))

    covered = set().union(*map(pairs_of, kept))
    left_out = []
    while True:
        best = max(group, key=lambda item: len(pairs_of(item) - covered))
        if pairs_of(best) <= covered:
            return left_out
        covered |= pairs_of(best)
        left_out.append(best)


def _parameters_of(item: pytest.Item) -> dict[str, str]:
    """Return the parameter values of a case as strings. ``callspec.indices`` would number the cases, not the values."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return {name: str(value) for name, value in parameters.items()}
