"""``megatron-ckpt run``: runs a Megatron training script, unedited, with the extension installed."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ckpt_ext import launch
from megatron_ckpt_ext.cli.fit import gpus_refusal, nodes_refusal, parallelism_refusal, save_refusal
from megatron_ckpt_ext.cli.folders import events_refusal, unwritable_refusal
from megatron_ckpt_ext.cli.preflight import check_nvrx
from megatron_ckpt_ext.cli.recipe import read_recipe
from megatron_ckpt_ext.cli.words import last_value
from megatron_ckpt_ext.errors import ConfigurationError

__all__ = ["add_parser"]

TORCHRUN_OPTIONS = (
    ("nnodes", "nproc-per-node", "node-rank", "master-addr", "master-port", "local-addr")
    + ("rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "max-restarts", "monitor-interval")
    + ("start-method", "role", "log-dir", "redirects", "tee", "local-ranks-filter", "numa-binding")
)
RENDEZVOUS = ("--nnodes", "--node-rank", "--master-", "--rdzv-", "--standalone")
"""How torchrun options begin that say where ranks meet; without one of them the job is this machine's own."""
CPU_ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"}

DESCRIPTION = """\
Run a Megatron training script with the extension installed, without editing it.

The script's folder comes first on sys.path, so a Megatron-LM checkout beside it wins over the
installed package. With --nproc or any torchrun option the ranks are started here, through
torchrun; without them this process is one rank, with RANK and the rest taken from the environment
(as under torchrun or srun). The exit code is the script's.
"""
EXAMPLES = """\
examples:
  megatron-ckpt run --nproc 8 pretrain_gpt.py --async-save --use-persistent-ckpt-worker ...
  megatron-ckpt run --nnodes 2 --nproc 8 --rdzv-backend c10d --rdzv-endpoint node0:29500 pretrain_gpt.py ...
  megatron-ckpt run --cpu --nproc 2 --recipe recipes/cpu_laptop.yaml recipes/pretrain_gpt.py
  srun megatron-ckpt run pretrain_gpt.py ...
"""


class Forward(argparse.Action):
    """Collects a torchrun option to be passed on as it is."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Append the option, and its value if it takes one."""
        words = [str(option), *([values] if isinstance(values, str) else [])]
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), *words])


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "run",
        help="run a training script with the extension installed",
        usage="megatron-ckpt run [--cpu] [--dry-run] [--nproc N | torchrun options] [--recipe FILE [--resume]] "
        "SCRIPT [ARGS...]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--cpu", action="store_true", help="emulate CUDA on the CPU; refused where CUDA works")
    parser.add_argument(
        "--dry-run", action="store_true", help="make every check, say what would be started, and start nothing"
    )
    parser.add_argument("--nproc", type=_positive, metavar="N", help="start N ranks on this machine")
    parser.add_argument(
        "--recipe", type=Path, metavar="FILE", help="take arguments from MODEL_ARGS of a YAML file; ARGS win"
    )
    parser.add_argument("--resume", action="store_true", help="take them from the recipe's MODEL_ARGS_2, if it has any")
    torchrun = parser.add_argument_group("torchrun options", "passed on unchanged; see torchrun --help")
    for name in TORCHRUN_OPTIONS:
        torchrun.add_argument(*_spellings(name), action=Forward, dest="torchrun", default=[], metavar="VALUE")
    torchrun.add_argument("--standalone", action=Forward, nargs=0, dest="torchrun", default=[])
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Run the script as this process's rank, or start the ranks and wait for them."""
    if not options.script.is_file():
        raise ConfigurationError(
            f"the training script {options.script} is not a file: give the path of a Python script."
        )
    if options.nproc and any(word.replace("_", "-").startswith("--nproc-per-node") for word in options.torchrun):
        raise ConfigurationError("--nproc and --nproc-per-node say the same thing: give one of them.")
    check_nvrx(options.script.resolve().parent)
    arguments = [*_recipe_arguments(options), *options.arguments]
    _check_fit(options, arguments)
    if options.dry_run:
        print(_what_would_start(options, arguments))
        return 0
    if options.cpu:
        _prepare_cpu()
    if options.nproc or options.torchrun:
        return _start_ranks(options, arguments)
    launch.run_rank(options.script, arguments, cpu=options.cpu)
    return 0


def _check_fit(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Refuse ranks that do not fit, and checkpoints without a directory."""
    refusal = (
        save_refusal(arguments)
        or nodes_refusal(_nodes(options), os.environ)
        or _ranks_refusal(options, arguments)
        or unwritable_refusal(arguments)
        or events_refusal(arguments)
    )
    if refusal:
        raise ConfigurationError(refusal)


def _ranks_refusal(options: argparse.Namespace, arguments: Sequence[str]) -> str | None:
    """Refuse ranks that fit neither this node nor the job; the other nodes are taken to have as many."""
    nodes, ranks = _nodes(options), _ranks_per_node(options)
    if ranks is None:
        return None
    refusal = None if options.cpu else gpus_refusal(arguments, ranks, _gpus_here())
    if refusal or not nodes.isdecimal():
        return refusal
    return parallelism_refusal(arguments, int(nodes) * ranks)


def _nodes(options: argparse.Namespace) -> str:
    """What torchrun is told about the number of nodes, by an option or by its variable."""
    return last_value(options.torchrun, "--nnodes") or os.environ.get("PET_NNODES") or "1"


def _ranks_per_node(options: argparse.Namespace) -> int | None:
    """How many ranks are started here; ``None`` for none, and for a number that torchrun finds out itself."""
    named = last_value(options.torchrun, "--nproc-per-node") or last_value(options.torchrun, "--nproc_per_node") or ""
    return options.nproc or (int(named) if named.isdecimal() else None)


def _gpus_here() -> int:
    """How many GPUs this node has; asks without making a CUDA context."""
    import torch

    return torch.cuda.device_count()


def _what_would_start(options: argparse.Namespace, arguments: Sequence[str]) -> str:
    """Describe the job in a few lines."""
    unsaid = "as torchrun finds out" if options.torchrun else "1, this process"
    return "\n".join(
        [
            f"nodes: {_nodes(options)}",
            f"ranks a node: {_ranks_per_node(options) or unsaid}",
            f"script: {options.script}",
            f"recipe: {options.recipe or 'none'}",
            f"arguments: {shlex.join(arguments)}",
        ]
    )


def _recipe_arguments(options: argparse.Namespace) -> Sequence[str]:
    """The recipe's arguments; its environment is set on the way."""
    if options.recipe is None:
        if options.resume:
            raise ConfigurationError("--resume chooses the recipe's MODEL_ARGS_2, so it needs --recipe FILE.")
        return ()
    recipe = read_recipe(options.recipe, resume=options.resume, environment=os.environ)
    os.environ.update(recipe.environment)
    if recipe.ignored:
        launch.say(f"not used from {options.recipe}: {', '.join(recipe.ignored)}.")
    return recipe.arguments


def _prepare_cpu() -> None:
    """Refuse CPU emulation where CUDA works, once for all ranks; set what torch and Megatron read when imported."""
    from megatron_ckpt_ext.emulation import refuse_where_cuda_works

    refuse_where_cuda_works()
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    for name, value in CPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def _start_ranks(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Start the ranks of this node through torchrun; returns the exit code of the first that failed, or 0."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    words = list(options.torchrun)
    if not any(word.replace("_", "-").startswith(RENDEZVOUS) for word in words):
        words.append("--standalone")
    if options.nproc:
        words += ["--nproc-per-node", str(options.nproc)]
    rank_command = ["-m", launch.MODULE, *(["--cpu"] if options.cpu else []), str(options.script), *arguments]
    try:
        torchrun.run(torchrun.parse_args([*words, *rank_command]))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"megatron-ckpt run: rank {rank} failed first, with exit code {failure.exitcode}.", file=sys.stderr)
        return _shell_code(failure.exitcode)
    except SignalException as error:
        return _shell_code(-int(error.sigval))
    return 0


def _shell_code(exit_code: int) -> int:
    """An exit code as a shell gives it: 128 and the signal number for a process that a signal ended."""
    return exit_code if exit_code >= 0 else 128 - exit_code


def _spellings(name: str) -> list[str]:
    """Both forms torchrun takes."""
    return list(dict.fromkeys([f"--{name}", f"--{name.replace('-', '_')}"]))


def _positive(text: str) -> int:
    """A number of ranks."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of ranks")
    return int(text)
