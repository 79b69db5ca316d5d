"""One rank of a training job: runs a training script, unedited, with the extension installed in its Megatron.

Started by ``megatron-ckpt run``, alone or through torchrun. This module is also what the script's spawned
processes (the checkpoint worker, for one) re-import as their main module in place of the script: it imports
nothing heavy and never runs the script there.
"""

import argparse
import atexit
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Final

from megatron_ckpt_ext.errors import ConfigurationError, PreparedFileError

__all__ = ["MODULE", "main", "run_rank", "say"]

MODULE: Final = "megatron_ckpt_ext.launch"
EMULATING: Final = "MEGATRON_CKPT_EXT_CPU"


def main(argv: Sequence[str]) -> int:
    """Run ``[--cpu] SCRIPT ARGS...`` as this rank; returns the exit code, 2 for what the operator has to correct."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__, allow_abbrev=False)
    parser.add_argument("--cpu", action="store_true", help="emulate CUDA on the CPU")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    try:
        run_rank(options.script, options.arguments, cpu=options.cpu)
    except (ConfigurationError, PreparedFileError) as error:
        print(f"megatron-ckpt: rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr)
        return 2
    return 0


def run_rank(script: Path, arguments: Sequence[str], *, cpu: bool) -> None:
    """Run ``script`` as ``__main__`` of this process; what it raises, ``SystemExit`` included, passes through.

    A script that succeeds, or is refused, and still has process groups leaves them. Called on all ranks; no
    collectives of its own. Raises ``CudaWorksError`` for ``cpu`` on a machine with CUDA.
    """
    sys.path.insert(0, str(script.resolve().parent))  # its own modules win, as they do under `python SCRIPT`
    with ExitStack() as stack:
        if cpu:
            from megatron_ckpt_ext.emulation import CpuEmulation

            stack.enter_context(CpuEmulation())
            os.environ[EMULATING] = "1"
            say("CPU emulation is on: CUDA names act on CPU tensors, for tests and laptops only.")
        _install()
        failed = threading.Event()
        atexit.register(_leave_groups, failed)  # first, so that what the script registers still has its groups
        try:
            _run_as_main(script, arguments)
        except BaseException as end:
            if not _ends_on_all_ranks(end):
                failed.set()
            raise


def _ends_on_all_ranks(end: BaseException) -> bool:
    """Whether the other ranks end as this one does: after success, and after what all of them refuse."""
    return isinstance(end, ConfigurationError | PreparedFileError) or (isinstance(end, SystemExit) and not end.code)


def _leave_groups(failed: threading.Event) -> None:
    """End torch's process groups, which Megatron never does.

    A thread of gloo that still holds a Python tensor when the interpreter ends aborts the process (PyTorch issue
    190489): a job that had saved everything ended with SIGABRT, and one that refused its arguments with SIGSEGV. Not
    after a failure: peers may be in a collective.
    """
    distributed = sys.modules.get("torch.distributed")
    if not failed.is_set() and distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


def _install() -> None:
    """Install the extension into the Megatron that is importable now, which may be one that cannot compile."""
    from megatron_ckpt_ext.compat.megatron_wheel import use_shipped_dataset_helpers
    from megatron_ckpt_ext.integrations.megatron_lm import install

    use_shipped_dataset_helpers()
    install()


def _run_as_main(script: Path, arguments: Sequence[str]) -> None:
    """Execute the script's source as ``__main__``.

    Not ``runpy.run_path``: it leaves ``__main__.__spec__`` empty, and a spawned child would then run the
    script's file again. With the spec of this module the child imports this module.
    """
    module = ModuleType("__main__")
    module.__file__ = str(script)
    module.__spec__ = find_spec(MODULE)
    sys.modules["__main__"] = module
    sys.argv = [str(script), *arguments]
    exec(compile(script.read_bytes(), str(script), "exec"), module.__dict__)


def say(line: str) -> None:
    """Tell the operator, once for the job."""
    if os.environ.get("RANK", "0") == "0":
        print(f"megatron-ckpt: {line}", file=sys.stderr, flush=True)


def _emulate_in_child() -> None:
    """Emulate torch in a spawned child of an emulated rank, for its whole life: a checkpoint worker has no model."""
    from megatron_ckpt_ext.emulation import CpuEmulation

    CpuEmulation(megatron=False).__enter__()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
elif __name__ == "__mp_main__" and os.environ.get(EMULATING):
    _emulate_in_child()
