"""How fast a checkpoint loads, beside a plain sequential read of the same files, and where the time goes.

    python -m experiments.load_speed FOLDER                      # on JAX's default device, INT4 stays packed
    python -m experiments.load_speed FOLDER --backend triton     # with the layout of the INT4 kernels
    python -m experiments.load_speed FOLDER --mesh configs/meshes/h200x8.toml

`kdjax synth configs/models/kimi-k2.6.toml --only target --layers N --out DIR` writes such a folder. The files are
dropped from the page cache before either pass (POSIX_FADV_DONTNEED), so both read from the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import get_args

import jax

from kdjax.checkpoint import Monitor, load_target
from kdjax.checkpoint.files import shards
from kdjax.config import ONE_DEVICE, Cluster, load
from kdjax.model.runtime import Backend, Runtime

BLOCK = 16 << 20


def drop_from_page_cache(files: list[Path]) -> None:
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_plainly(files: list[Path]) -> int:
    """One thread, one buffer, front to back. Returns the bytes read."""
    buffer, total = memoryview(bytearray(BLOCK)), 0
    for file in files:
        with file.open("rb", buffering=0) as source:
            while count := source.readinto(buffer):
                total += count
    return total


def resident(field: str) -> int:
    """Bytes of host memory of this process: VmRSS now, VmHWM at most since `reset_peak`."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure(folder: Path, runtime: Runtime) -> dict[str, float | str]:
    files, _ = shards(folder)
    drop_from_page_cache(files)
    started, cpu = time.perf_counter(), time.process_time()
    total = read_plainly(files)
    plain, plain_cpu = time.perf_counter() - started, time.process_time() - cpu

    drop_from_page_cache(files)
    jax.block_until_ready(jax.device_put(0))
    reset_peak()
    before = resident("VmRSS")
    monitor = Monitor()
    started, cpu = time.perf_counter(), time.process_time()
    params = load_target(folder, runtime, monitor=monitor).params
    jax.block_until_ready(params)
    seconds, load_cpu = time.perf_counter() - started, time.process_time() - cpu
    kept = sum(array.nbytes for array in jax.tree.leaves(params))
    device = jax.tree.leaves(params)[0].devices().pop()
    return {
        "device": f"{device.platform}: {device.device_kind}",
        "gigabytes": total / 1e9,
        "plain_read_s": plain,
        "plain_read_gb_per_s": total / 1e9 / plain,
        "plain_read_cpu_s": plain_cpu,
        "load_s": seconds,
        "load_gb_per_s": total / 1e9 / seconds,
        "load_cpu_s": load_cpu,
        "load_over_plain_read": plain / seconds,
        "verify_s": seconds - monitor.read_s - monitor.transfer_s - monitor.layout_s,
        "waiting_for_reads_s": monitor.read_s,
        "host_to_device_s": monitor.transfer_s,
        "layout_s": monitor.layout_s,
        "host_peak_gigabytes": (resident("VmHWM") - before) / 1e9,
        "host_peak_over_kept": (resident("VmHWM") - before) / kept,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", choices=get_args(Backend), default="xla")
    parser.add_argument("--mesh", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    mesh = load(Cluster, args.mesh).mesh if args.mesh else ONE_DEVICE
    runtime = Runtime(compute_dtype="bfloat16", cache_dtype="bfloat16", backend=args.backend, mesh=mesh)
    found = measure(args.folder, runtime)
    if args.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:24} {value if isinstance(value, str) else f'{value:10.3f}'}")


if __name__ == "__main__":
    main()
