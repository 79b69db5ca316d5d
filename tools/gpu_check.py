"""``make gpu-check``: what only a machine with a GPU can show, in under four minutes.

1. The tests that are marked ``cuda``.
2. Pinned staging on one GPU: how long a state takes to the host, against its bytes over the measured bandwidth of
   copies into page-locked memory; how long ``save`` and the fence keep the trainer; and the time of training steps
   without a save, at a save and behind it, with synchronous and with asynchronous saves.

torch has to be there. What else is needed (megatron-core, nvidia-resiliency-ext, rich, packaging, pyyaml, pytest and
what they need) may be brought along as wheels: ``python tools/gpu_check.py --wheels FOLDER`` unpacks them into a
temporary folder. Without a GPU it says so and ends with exit code 0.

Never run so far: there was no GPU where this was written. Neither part has been run once on a GPU, so a failure may be
the check's own, and there are no numbers to compare with.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from megatron_ckpt_ext import CheckpointManager

ROOT = Path(__file__).resolve().parent.parent
TEST_SECONDS, BENCHMARK_SECONDS, ROUNDS_SECONDS = 140.0, 85.0, 45.0
PYTEST = ("-m", "pytest", "-q", "-rs", "-m", "cuda", "-p", "no:cacheprovider", "-o", "addopts=")
"""Without the strictness of every day, for which plugins would be needed."""
MIB, GB = 1 << 20, 1e9
TENSOR = 64 * MIB
STEP_SECONDS = 0.1
QUIET_STEPS, MOST_ROUNDS = 4, 6


def main() -> int:
    """Run the tests, then the benchmark in a process of its own; return 1 if one of them fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="of wheels that are brought along")
    parser.add_argument("--mebibytes", type=int, default=1024, help="of the state that is saved (%(default)s)")
    parser.add_argument("--directory", help="where to save; by default the system's temporary one")
    parser.add_argument("--measure", action="store_true", help="the benchmark only, in this process")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print(
            "There is no GPU here, so nothing was checked: the tests marked cuda and the benchmark of pinned staging "
            "have never been run."
        )
        return 0
    with tempfile.TemporaryDirectory(prefix="gpu-check-", dir=options.directory) as folder:
        if options.measure:
            measure(options.mebibytes * MIB, Path(folder))
            return 0
        print("This check was written where there was no GPU: it had never been run on one.", flush=True)
        path = [str(ROOT), *unpacked(options.wheels, Path(folder, "packages"))]
        tests = sorted(str(file) for file in (ROOT / "tests").glob("test_*.py") if "mark.cuda" in file.read_text())
        words = ["--measure", "--mebibytes", str(options.mebibytes), "--directory", folder]
        failed = [
            run([*PYTEST, *tests], path, TEST_SECONDS),
            run([__file__, *words], path, BENCHMARK_SECONDS),
        ]
    return int(any(failed))


def unpacked(wheels: Path | None, target: Path) -> list[str]:
    """Unpack all wheels of a folder; return what to put on the path. A wheel is an archive, no installer is needed."""
    if wheels is None:
        return []
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
    return [str(target)]


def run(words: Sequence[str], path: Sequence[str], timeout: float) -> bool:
    """Run this interpreter in the checkout; return whether it failed."""
    inherited = os.environ.get("PYTHONPATH", "")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, *filter(None, [inherited])])}
    try:
        code = subprocess.run(
            [sys.executable, *words], cwd=ROOT, env=environment, timeout=timeout, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        print(f"GAVE UP after {timeout:g} s: {' '.join(words)}", flush=True)
        return True
    print(f"{'ok' if code == 0 else f'FAILED with exit code {code}'}: {' '.join(words[:3])}", flush=True)
    return code != 0


def measure(nbytes: int, folder: Path) -> None:
    """Print what staging and saves of ``nbytes`` on the GPU cost."""
    import torch

    torch.cuda.set_device(0)
    state = {f"{i:04d}": torch.rand(TENSOR // 4, device="cuda") for i in range(max(1, nbytes // TENSOR))}
    total = sum(tensor.nbytes for tensor in state.values())
    bandwidth = pinned_bandwidth()
    print(f"{torch.cuda.get_device_name()}; torch {torch.__version__}; state of {total / MIB:.0f} MiB")
    print(f"bandwidth into page-locked memory: {bandwidth / GB:.1f} GB/s; the state needs {_ms(total / bandwidth)}")
    staging(state, total / bandwidth)
    for name, async_save in (("synchronous", False), ("asynchronous", True)):
        saves(name, state, folder / name, async_save=async_save)


def pinned_bandwidth() -> float:
    """Return bytes a second of a copy from the GPU into memory that torch has page-locked, the best of some."""
    import torch

    source = torch.rand(TENSOR, device="cuda")
    target = torch.empty(source.shape, pin_memory=True)
    return source.nbytes / min(timed(lambda: target.copy_(source, non_blocking=True)) for _ in range(6))


def staging(state: "dict[str, torch.Tensor]", expected: float) -> None:
    """Print how long the first staging and warm ones take, in the call and until the bytes are there."""
    from megatron_ckpt_ext.staging.stage import HostStager

    stager = HostStager()
    found = []
    for _ in range(MOST_ROUNDS):
        began = time.perf_counter()
        staged = stager.stage(state)
        called = time.perf_counter() - began
        staged.wait()
        found.append((called, time.perf_counter() - began))
        staged.release()
    stager.close()
    called, arrived = (statistics.median(each) for each in zip(*found[1:], strict=True))
    print(f"staging, first: call {_ms(found[0][0])}, on the host after {_ms(found[0][1])}")
    print(
        f"staging, warm: call {_ms(called)}, on the host after {_ms(arrived)}, "
        f"{arrived / expected:.2f} times bytes / bandwidth"
    )


def saves(name: str, state: "dict[str, torch.Tensor]", folder: Path, *, async_save: bool) -> None:
    """Print steps without a save, at a save and behind it, and how long ``save`` and the fence keep the host."""
    from megatron_ckpt_ext import CheckpointManager

    found: dict[str, list[float]] = {what: [] for what in ("step", "at", "after", "save()", "fence", "durable within")}
    with CheckpointManager(folder, async_save=async_save, keep_last=1, progress=False) as manager:
        fences: list[float] = []
        step = training_step(state, manager, fences)
        deadline = time.perf_counter() + ROUNDS_SECONDS / 2
        for number in range(1, MOST_ROUNDS + 2):
            found["step"] += [timed(step) for _ in range(QUIET_STEPS)]
            began = time.perf_counter()
            at = timed(step)
            called = time.perf_counter()
            manager.save(number, state)
            found["save()"].append(time.perf_counter() - called)
            found["at"].append(at + found["save()"][-1])
            found["after"].append(timed(step))
            found["fence"].append(fences[-1])
            found["durable within"].append(_waited(manager) - called)
            if number > 1 and time.perf_counter() + 2 * (time.perf_counter() - began) > deadline:
                break
    first = found["save()"][0]
    print(f"{name}: {len(found['at']) - 1} warm saves; first save() {_ms(first)}; medians of the warm ones:")
    for what, seconds in found.items():
        print(f"    {what:14} {_ms(statistics.median(seconds if what == 'step' else seconds[1:]))}")


def training_step(
    state: "dict[str, torch.Tensor]", manager: "CheckpointManager", fences: list[float]
) -> Callable[[], None]:
    """Return a step: products on the GPU, the fence, then every tensor of the state is changed in place."""
    import torch

    left, right = (torch.rand(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    once = min(timed(lambda: left @ right) for _ in range(20))

    def step() -> None:
        for _ in range(max(1, int(STEP_SECONDS / once))):
            left @ right
        began = time.perf_counter()
        manager.wait_for_staging()
        fences.append(time.perf_counter() - began)
        for tensor in state.values():
            tensor.mul_(0.999)

    return step


def timed(action: Callable[[], object]) -> float:
    """Return the seconds until the GPU has done what an action gives it."""
    import torch

    torch.cuda.current_stream().synchronize()
    began = time.perf_counter()
    action()
    torch.cuda.current_stream().synchronize()
    return time.perf_counter() - began


def _waited(manager: "CheckpointManager") -> float:
    manager.wait()
    return time.perf_counter()


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3f} ms"


if __name__ == "__main__":
    sys.exit(main())
