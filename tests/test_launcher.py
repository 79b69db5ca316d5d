"""`megatron-ckpt run`: what reaches the script, what comes back, and Megatron's own loop on two CPU ranks.

The jobs are real: separate processes, Megatron's `pretrain` from the installed wheel, gloo, the NVRx worker.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron_ckpt_ext.cli.main import main
from megatron_ckpt_ext.cli.preflight import check_nvrx
from megatron_ckpt_ext.cli.run import TORCHRUN_OPTIONS
from megatron_ckpt_ext.compat.megatron_wheel import use_shipped_dataset_helpers
from megatron_ckpt_ext.errors import ConfigurationError

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "cpu_laptop.yaml"
SCRIPT = ROOT / "recipes" / "pretrain_gpt.py"
LAUNCH = ROOT / "megatron_ckpt_ext" / "launch.py"
DEADLINE = 100.0
"""Seconds that one command may take; a job takes about 25 on two idle cores."""

needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the emulation is refused where CUDA works")


def run(*words: object, folder: Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in `folder`, as an operator would; its output is kept apart by stream."""
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_ckpt_ext.cli.main", "run", *map(str, words)],
        cwd=folder,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT), **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        process.terminate()  # the launcher then stops its ranks
        output, errors = process.communicate(timeout=30)
        pytest.fail(f"no end after {DEADLINE} s:\n{output}\n{errors}")
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


PROBE = """
import json, multiprocessing, os, sys
import sibling

with open(f"runs.{os.environ['RANK']}", "a") as runs:
    runs.write("once ")

child = multiprocessing.get_context("spawn").Pool(1)
report = {
    "name": __name__,
    "file": __file__,
    "argv": sys.argv,
    "sibling": sibling.__file__,
    "made by": os.environ.get("MADE_BY"),
    "emulated": __import__("torch").cuda.is_available(),
    "child": child.apply(sibling.main_module),
}
child.terminate()
with open(f"report.{os.environ['RANK']}", "w") as out:
    json.dump(report, out)
sys.exit(int(os.environ["EXIT_CODES"].split()[int(os.environ["RANK"])]))
"""

SIBLING = """
def main_module():
    import sys
    heavy = [name for name in ("torch", "megatron.core", "nvidia_resiliency_ext") if name in sys.modules]
    emulated = "torch" in heavy and sys.modules["torch"].cuda.is_available()
    return {"main": sys.modules["__mp_main__"].__file__, "heavy": heavy, "emulated": emulated}
"""


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    """A script without a main guard that reports how it was run and exits as EXIT_CODES says."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "sibling.py").write_text(SIBLING)
    (folder / "probe.py").write_text(PROBE)
    (tmp_path / "sibling.py").write_text("raise SystemExit('the working directory came first')")
    return folder / "probe.py"


def test_one_rank_runs_as_if_started_directly(probe: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("TEST_TYPE: x\nENV_VARS: {MADE_BY: me}\nMODEL_ARGS: {--a: '${MADE_BY}'}")
    words = ["--recipe", "recipe.yaml", probe.relative_to(tmp_path), "--a", "1", "--cpu"]
    done = run(*words, folder=tmp_path, environment={"RANK": "0", "EXIT_CODES": "4"})
    assert done.returncode == 4, done.stderr
    assert done.stderr.count("not used from recipe.yaml: TEST_TYPE.") == 1
    report = json.loads((tmp_path / "report.0").read_text())
    assert report["name"] == "__main__"
    assert report["file"] == "checkout/probe.py"
    assert report["argv"] == ["checkout/probe.py", "--a", "me", "--a", "1", "--cpu"]
    assert report["made by"] == "me"
    assert report["sibling"] == str(probe.parent / "sibling.py")
    assert report["emulated"] is torch.cuda.is_available()
    assert (tmp_path / "runs.0").read_text() == "once "
    # A spawned child imports the launcher, not the script, and nothing heavy with it.
    assert report["child"] == {"main": str(LAUNCH), "heavy": [], "emulated": False}


@needs_no_cuda
def test_ranks_are_started_and_the_first_failure_is_the_exit_code(probe: Path, tmp_path: Path) -> None:
    done = run("--cpu", "--nproc", 2, "--role", "test", probe, folder=tmp_path, environment={"EXIT_CODES": "0 5"})
    assert done.returncode == 5, done.stderr
    assert "rank 1 failed first, with exit code 5." in done.stderr
    assert done.stderr.count("CPU emulation is on") == 1
    for rank in (0, 1):
        report = json.loads((tmp_path / f"report.{rank}").read_text())
        assert report["emulated"] is True
        # A spawned child emulates torch and leaves Megatron alone.
        assert report["child"] == {"main": str(LAUNCH), "heavy": ["torch"], "emulated": True}


GROUPS = """
import atexit, sys
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
atexit.register(lambda: print("groups at exit:", dist.is_initialized()))
destroy = dist.destroy_process_group
dist.destroy_process_group = lambda: (destroy(), print("groups are left"))
if sys.argv[1:] == ["refused"]:
    from megatron_ckpt_ext.errors import ConfigurationError
    raise ConfigurationError("no")
if sys.argv[1:]:
    sys.exit(int(sys.argv[1]))
"""


@needs_no_cuda
@pytest.mark.parametrize(("words", "code", "left"), [((), 0, True), (("refused",), 2, True), (("3",), 3, False)])
def test_a_script_that_succeeded_or_was_refused_leaves_its_groups(
    words: tuple[str, ...], code: int, left: bool, tmp_path: Path
) -> None:
    (tmp_path / "groups.py").write_text(GROUPS)

    done = run("--cpu", tmp_path / "groups.py", *words, folder=tmp_path)

    assert done.returncode == code
    assert done.stdout.splitlines() == ["groups at exit: True", *(["groups are left"] if left else [])]


@needs_no_cuda
def test_what_the_operator_has_to_correct_is_one_line_a_rank(tmp_path: Path) -> None:
    job = ["--cpu", "--nproc", 2, "--recipe", RECIPE, SCRIPT, "--ckpt-metadata", tmp_path]
    done = run(*job, folder=tmp_path, environment={"OUTPUT": str(tmp_path / "output")})
    assert done.returncode == 2, done.stderr
    lines = re.findall(r"megatron-ckpt: rank ([01]): (.*--ckpt-metadata.*)", done.stderr)
    assert {rank for rank, _ in lines} == {"0", "1"} and len({sentence for _, sentence in lines}) == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "output").exists()


def test_help_is_light_and_complete() -> None:
    code = (
        "import sys\nfrom megatron_ckpt_ext.cli.main import main\n"
        "try:\n    main(['run', '--help'])\nfinally:\n"
        "    heavy = {'torch', 'megatron', 'nvidia_resiliency_ext'} & set(sys.modules)\n    print('heavy:', heavy)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "heavy: set()" in done.stdout
    for word in ("--cpu", "--nproc", "--recipe", "--resume", "--rdzv-endpoint", "SCRIPT", "srun"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["run"], "the following arguments are required: SCRIPT"),
        (["run", "nowhere.py"], "the training script nowhere.py is not a file"),
        (["run", "--nproc", "0", str(SCRIPT)], "'0' is not a positive number of ranks"),
        (["run", "--nproc", "two", str(SCRIPT)], "'two' is not a positive number of ranks"),
        (["run", "--nproc", "2", "--nproc_per_node=2", str(SCRIPT)], "--nproc and --nproc-per-node say the same"),
        (["run", "--resume", str(SCRIPT)], "it needs --recipe FILE"),
        (["run", "--recipe", "nowhere.yaml", str(SCRIPT)], "recipe nowhere.yaml: cannot be read"),
        (["run", "--nodes", "2", str(SCRIPT)], "unrecognized arguments: --nodes"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: Sequence[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(words)
    except SystemExit as stop:
        code = stop.code
    output = capsys.readouterr()
    assert code == 2
    assert complaint in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""


@pytest.mark.parametrize("ranks", [[], ["--nproc", "2"]])
def test_emulation_is_refused_where_cuda_works(
    ranks: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main(["run", "--cpu", *ranks, str(SCRIPT)]) == 2
    assert re.fullmatch(r"megatron-ckpt run: CPU emulation was asked for, but torch .+\n", capsys.readouterr().err)


def test_every_forwarded_option_is_torchruns() -> None:
    from torch.distributed.run import get_args_parser

    known = {option for action in get_args_parser()._actions for option in action.option_strings}
    assert {f"--{name}" for name in TORCHRUN_OPTIONS} <= known


def install(folder: Path, distribution: str, version: str) -> None:
    """Make `distribution` look installed in `folder`."""
    metadata = folder / f"{distribution.replace('-', '_')}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")


def test_an_old_nvrx_is_said_before_megatron_is_imported(tmp_path: Path) -> None:
    install(tmp_path / "old", "nvidia-resiliency-ext", "0.4.1")
    (tmp_path / "script.py").write_text("open('ran', 'w')")
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "old"), str(ROOT)])}
    for options in ([], ["--nproc", 2]):
        done = run(*options, "script.py", folder=tmp_path, environment=environment)
        assert done.returncode == 2
        assert re.fullmatch(r"megatron-ckpt run: nvidia-resiliency-ext 0\.4\.1 is installed, but .+\n", done.stderr)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("nvrx", "megatron", "checkout", "refused"),
    [
        ("0.5.0", "0.17.1", None, True),
        ("0.6.0", "0.17.1", None, False),
        ("0.5.0", "0.17.0", None, False),
        (None, "0.19.2", None, False),
        ("0.5.0", None, None, False),
        ("0.5.0", "0.19.2", "0.16.0", False),
        ("0.5.0", "0.16.0", "0.20.0", True),
    ],
)
def test_which_nvrx_is_refused(
    nvrx: str | None,
    megatron: str | None,
    checkout: str | None,
    refused: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for distribution, version in (("nvidia-resiliency-ext", nvrx), ("megatron-core", megatron)):
        if version:
            install(tmp_path / "site", distribution, version)
    if checkout:
        (tmp_path / "megatron" / "core").mkdir(parents=True)
        (tmp_path / "megatron" / "core" / "package_info.py").write_text(f"__version__ = '{checkout}'")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    if refused:
        with pytest.raises(ConfigurationError, match="install nvidia-resiliency-ext>=0.6"):
            check_nvrx(tmp_path)
    else:
        check_nvrx(tmp_path)


def test_helpers_of_the_wheel_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.datasets import utils

    monkeypatch.setattr(utils, "compile_helpers", utils.compile_helpers)  # put back at the end
    with pytest.raises((SystemExit, FileNotFoundError)):  # no Makefile, or no make either
        utils.compile_helpers()
    assert use_shipped_dataset_helpers()
    utils.compile_helpers()


def losses(done: subprocess.CompletedProcess[str]) -> dict[int, str]:
    """The loss Megatron printed, by iteration; the second one of a job is the mean of its first two."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"iteration +(\d+)/.*? lm loss: (\S+)", done.stdout)
    return {int(iteration): loss for iteration, loss in lines}


@pytest.mark.slow  # the everyday jobs of test_flags_unset.py and test_megatron_jobs.py run this recipe and script too
@needs_no_cuda
def test_megatron_trains_and_saves_asynchronously_on_two_ranks(tmp_path: Path) -> None:
    job = ["--cpu", "--nproc", 2, "--recipe", RECIPE, SCRIPT, "--train-iters", 4]
    done = run(*job, folder=tmp_path, environment={"OUTPUT": str(tmp_path)})
    first, *_, last = map(float, losses(done).values())
    assert len(losses(done)) == 4 and last < first
    assert "scheduled an async checkpoint save at iteration       4" in done.stdout
    checkpoint = tmp_path / "checkpoints" / "iter_0000004"
    assert {".metadata", "metadata.json", "__0_0.distcp", "__1_0.distcp"} <= {f.name for f in checkpoint.iterdir()}
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "4"


@pytest.mark.slow
@pytest.mark.timeout(4 * DEADLINE)
@needs_no_cuda
def test_a_resumed_job_has_the_losses_of_an_uninterrupted_one(tmp_path: Path) -> None:
    environment = {"OUTPUT": str(tmp_path)}
    job = ["--cpu", "--nproc", 2, "--recipe", RECIPE]
    whole = losses(run(*job, SCRIPT, folder=tmp_path, environment=environment))
    resume = [*job, "--resume", SCRIPT, "--ckpt-step", 4, "--save", tmp_path / "other"]
    resumed = losses(run(*resume, folder=tmp_path, environment=environment))
    control = losses(run(*resume, "--no-load-optim", folder=tmp_path, environment=environment))

    assert list(whole) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert list(resumed) == list(control) == [5, 6, 7, 8]
    for iteration in (5, 7, 8):
        assert resumed[iteration] == whole[iteration]
    assert float(resumed[6]) == pytest.approx((float(whole[5]) + float(whole[6])) / 2, abs=2e-6)
    assert control[5] == whole[5]  # the weights were loaded
    assert control[7] != whole[7] and control[8] != whole[8]
