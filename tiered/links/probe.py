"""Probe of what kvikio can do on this machine. It runs in a subprocess, because cuFile can hang.

The subprocess runs this file as a script. To start quickly, the file imports no other module of this package.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_PROBE_BYTES = 1 << 20
#: Paths that libcufile reads when its driver is opened. If the first path is missing, the call never returns.
_DRIVER_PATHS = ("/proc/modules", "/run/udev")


@dataclasses.dataclass(frozen=True, slots=True)
class KvikioProbe:
    """Result of a probe. Fields are in the order of the probe's steps. After a failed step, later fields keep defaults.

    Attributes:
        libcuda: whether the NVIDIA driver's library can be loaded.
        host_bytes: bytes moved correctly between the file and host memory.
        gpu_bytes: bytes moved correctly from the file to GPU memory and back, by any method.
        gds_bytes: bytes that GPUDirect Storage moved between the file and GPU memory, from kvikio's counters. 0 if
            ``gpu_bytes`` is 0, because incorrect bytes prove nothing.
        reason: clause that states why GPUDirect Storage moved no bytes. Empty if ``gds_bytes`` > 0.
    """

    installed: bool = False
    version: str = ""
    libcuda: bool = False
    host_bytes: int = 0
    gpu_bytes: int = 0
    gds_bytes: int = 0
    reason: str = ""

    @property
    def has_gds(self) -> bool:
        """Whether GPUDirect Storage moved bytes."""
        return self.gds_bytes > 0


def may_open_driver() -> bool:
    """Return whether it is safe to open libcufile's driver. If not, kvikio's compat mode must be on."""
    return all(os.path.exists(path) for path in _DRIVER_PATHS)


def probe_kvikio(folder: str | os.PathLike[str], timeout_s: float = 20.0) -> KvikioProbe:
    """Try kvikio on a 1 MiB file in ``folder``, in a subprocess. Leaves no file behind and raises no errors.

    Args:
        folder: directory on the drive to probe.
        timeout_s: seconds after which the subprocess is killed. The result then has the facts found so far.
    """
    try:
        fd, name = tempfile.mkstemp(prefix=".kvikio-probe-", dir=folder)
    except OSError as error:
        return KvikioProbe(reason=f"no file can be made in '{os.fspath(folder)}': {error.strerror}")
    os.close(fd)
    try:
        with tempfile.TemporaryDirectory(prefix="kvikio-probe-") as log_folder:
            return _run_probe(name, timeout_s, os.path.join(log_folder, "cufile.log"))
    finally:
        Path(name).unlink(missing_ok=True)


def _run_probe(file: str, timeout_s: float, log: str) -> KvikioProbe:
    # Option -P removes this script's folder from the search path, because the folder has a module named kvikio.
    command = [sys.executable, "-P", __file__, file, str(timeout_s)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"CUFILE_LOGFILE_PATH": log, **os.environ},
    )
    with process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
            outcome = f"it ended with code {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
            outcome = f"it did not answer within {timeout_s:g} s"
    facts: dict[str, Any] = {}
    for line in output.splitlines():  # Each step has printed a line with all facts found so far.
        if line.startswith("{") and line.endswith("}"):
            facts = json.loads(line)
    step = facts.pop("step", "start")
    if step != "end":
        error_lines = errors.strip().splitlines()[-1:]
        facts["reason"] = ": ".join([f"{outcome} (step: {step})", *error_lines])
    return KvikioProbe(**facts)


# -- the subprocess --------------------------------------------------------------------------------------------------


class _Findings:
    """Facts found so far. Each step prints all facts, because the next step may never return."""

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {}

    def report(self, step: str, **facts: Any) -> None:
        self._facts.update(facts)
        print(json.dumps({**self._facts, "step": step}), flush=True)


class _DeviceMemory:
    """Memory of the first GPU in a form that kvikio accepts. It is freed when the process ends."""

    def __init__(self, cuda: ctypes.CDLL, nbytes: int) -> None:
        self._cuda, self._nbytes = cuda, nbytes
        device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_ulonglong()
        calls = (
            ("cuInit", (0,)),
            ("cuDeviceGet", (ctypes.byref(device), 0)),
            ("cuDevicePrimaryCtxRetain", (ctypes.byref(context), device)),
            ("cuCtxPushCurrent_v2", (context,)),
            ("cuMemAlloc_v2", (ctypes.byref(address), ctypes.c_size_t(nbytes))),
        )
        for name, arguments in calls:
            self._call(name, *arguments)
        self._address = address
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address.value, False),
            "version": 3,
        }

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._cuda, name)(*arguments)
        if error:
            raise OSError(f"no GPU memory: {name} returned CUDA error {error}")

    def read(self) -> bytes:
        """Copy the contents to the host."""
        host = ctypes.create_string_buffer(self._nbytes)
        self._call("cuMemcpyDtoH_v2", host, self._address, ctypes.c_size_t(self._nbytes))
        return host.raw

    def write(self, contents: bytes) -> None:
        """Replace the contents."""
        self._call("cuMemcpyHtoD_v2", self._address, contents, ctypes.c_size_t(self._nbytes))


def _gpu_round_trip(handle: Any, cuda: ctypes.CDLL, pattern: bytes) -> str:
    """Read a file into GPU memory, then write different bytes from there to the file. Return the problem, or "".

    Raises:
        OSError: GPU memory cannot be allocated.
        RuntimeError: kvikio returned an error.
    """
    memory = _DeviceMemory(cuda, len(pattern))
    handle.pread(memory).get()
    if memory.read() != pattern:
        return "kvikio read wrong bytes into GPU memory"
    memory.write(pattern[::-1])
    handle.pwrite(memory).get()
    contents = bytearray(len(pattern))
    handle.pread(contents).get()
    return "" if bytes(contents) == pattern[::-1] else "kvikio wrote wrong bytes from GPU memory"


def _probe(file: str, findings: _Findings) -> None:
    findings.report("import kvikio")
    try:
        import kvikio
        import kvikio.cufile_driver
        import kvikio.defaults
        import kvikio.statistics
    except ModuleNotFoundError as error:
        return findings.report("end", reason=f"the package {error.name} is not installed")
    except Exception as error:
        return findings.report("end", reason=f"kvikio does not load: {error}")
    findings.report("load libcuda.so.1", installed=True, version=str(kvikio.__version__))
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return findings.report("end", reason=f"the NVIDIA driver is missing ({error})")
    reason = ""
    findings.report("open the driver of cuFile", libcuda=True)
    is_open = False
    if not may_open_driver():
        reason = f"cuFile needs {' and '.join(_DRIVER_PATHS)}, but they do not both exist"
    else:
        try:
            kvikio.cufile_driver.driver_open()
            is_open = True
        except Exception as error:
            reason = f"the driver of cuFile does not open: {error}"
    kvikio.defaults.set({"compat_mode": kvikio.CompatMode.AUTO if is_open else kvikio.CompatMode.ON})
    findings.report("host memory")
    pattern = bytes(range(256)) * (_PROBE_BYTES // 256)
    contents = bytearray(_PROBE_BYTES)
    with kvikio.statistics.SummaryMonitor() as monitor, kvikio.CuFile(file, "r+") as handle:
        os.unlink(file)
        handle.pwrite(pattern).get()
        handle.pread(contents).get()
        if bytes(contents) != pattern:
            return findings.report("end", reason="kvikio read back different bytes than it wrote")
        findings.report("GPU memory", host_bytes=_PROBE_BYTES)
        try:
            problem = _gpu_round_trip(handle, cuda, pattern)
        except (OSError, RuntimeError) as error:
            return findings.report("end", reason=str(error))
        if problem:
            return findings.report("end", reason=problem)
        findings.report("counters", gpu_bytes=_PROBE_BYTES)
        gds_bytes = int(monitor.get().by_backend["GDS"]["bytes_transferred"])
    if not gds_bytes:
        reason = reason or "kvikio moved the bytes through host memory"
    findings.report("end", gds_bytes=gds_bytes, reason=reason if not gds_bytes else "")


if __name__ == "__main__":
    # If the parent dies, the default action of SIGALRM ends this process, even inside a C loop.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, float(sys.argv[2]) + 1.0)
    _probe(sys.argv[1], _Findings())
