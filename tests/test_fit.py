"""What is refused before anything starts: ranks that do not fit, checkpoints without a directory. And ``--dry-run``."""

from pathlib import Path

import pytest

from megatron_ckpt_ext.cli.fit import gpus_refusal, nodes_refusal, parallelism_refusal, save_refusal
from megatron_ckpt_ext.cli.main import main
from megatron_ckpt_ext.cli.words import has_flag, last_value, whole_number

MEGATRON = ["--micro-batch-size", "2"]
RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "gpt_torch_dist_create.yaml"


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], None),
        (["--save", "a"], "a"),
        (["--save=a"], "a"),
        (["--save", "a", "--save=b", "--save", "c"], "c"),
        (["--save"], ""),
        (["--save", "--load", "a"], ""),
        (["--save", ""], ""),
        (["--save="], ""),
        (["--save-interval", "4"], None),
        (["--save", "-1"], "-1"),
    ],
)
def test_the_last_value_of_a_flag(words: list[str], value: str | None) -> None:
    assert last_value(words, "--save") == value
    assert has_flag(words, "--save") is (value is not None)


@pytest.mark.parametrize(
    ("words", "number"), [([], 1), (["--n", "3"], 3), (["--n=x"], None), (["--n", "0"], None), (["--n"], None)]
)
def test_the_number_of_a_flag(words: list[str], number: int | None) -> None:
    assert whole_number(words, "--n", 1) == number


@pytest.mark.parametrize(
    ("words", "ranks", "gpus", "fits"),
    [
        (MEGATRON, 8, 8, True),
        (MEGATRON, 4, 8, True),
        (MEGATRON, 9, 8, False),
        (MEGATRON, 9, 0, True),
        ([], 9, 8, True),  # not Megatron's script: it may train on the CPU
    ],
)
def test_ranks_fit_the_gpus_of_the_node(words: list[str], ranks: int, gpus: int, fits: bool) -> None:
    refusal = gpus_refusal(words, ranks, gpus)

    assert (refusal is None) is fits
    assert fits or "9 ranks were asked for on this node, which has 8 GPUs" in str(refusal)


def test_a_heterogeneous_slurm_job_may_have_more_nodes_than_it_says() -> None:
    assert nodes_refusal("3", {"SLURM_JOB_NUM_NODES": "2", "SLURM_HET_SIZE": "2"}) is None


@pytest.mark.parametrize(
    ("nodes", "allocated", "fits"),
    [("2", None, True), ("2", "2", True), ("1", "2", True), ("3", "2", False), ("1:4", "2", True)],
)
def test_nodes_fit_the_slurm_job(nodes: str, allocated: str | None, fits: bool) -> None:
    environment = {} if allocated is None else {"SLURM_JOB_NUM_NODES": allocated}

    refusal = nodes_refusal(nodes, environment)

    assert (refusal is None) is fits
    assert fits or "submit it with --nodes=3" in str(refusal)


@pytest.mark.parametrize(
    ("words", "world", "complaint"),
    [
        ([], 7, None),
        (["--tensor-model-parallel-size", "2"], 8, None),
        (["--tensor-model-parallel-size", "2"], 7, "one copy of the model takes 2 ranks"),
        (["--tensor-model-parallel-size=4", "--pipeline-model-parallel-size", "2"], 12, "takes 8 ranks"),
        (["--context-parallel-size", "2", "--context-parallel-size", "3"], 6, None),
        (["--context-parallel-size", "3"], 8, r"\(--context-parallel-size 3\), and 8 ranks"),
        (["--tensor-model-parallel-size", "two"], 7, None),
        ([*MEGATRON, "--global-batch-size", "8"], 4, None),
        ([*MEGATRON, "--global-batch-size", "8"], 8, "--global-batch-size 8 is no multiple of 16"),
        ([*MEGATRON, "--global-batch-size", "8", "--tensor-model-parallel-size", "2"], 8, None),
        ([*MEGATRON, "--global-batch-size", "8", "--rampup-batch-size", "8", "8", "64"], 8, None),
        (["--global-batch-size", "8"], 3, None),
        ([*MEGATRON, "--global-batch-size", "8", "--decrease-batch-size-if-needed"], 8, None),
        ([*MEGATRON, "--global-batch-size", "8", "--step-batch-size-schedule", "0:8 1K:16"], 8, None),
        (["--tensor-model-parallel-size", "2", "--tensor-parallel-num-weight-shards", "4"], 7, None),
        (["--tensor-model-parallel-size", "2", "--use-checkpoint-args"], 7, None),
        (["--tensor-model-parallel-size", "2", "--yaml-cfg", "f"], 7, None),
        (
            ["--expert-model-parallel-size", "8"],
            4,
            r"copy of the experts takes 8 ranks .--expert-model-parallel-size 8.",
        ),
        (["--tensor-model-parallel-size", "2", "--expert-model-parallel-size", "4"], 4, "experts takes 8 ranks"),
        (
            ["--expert-tensor-parallel-size", "1", "--tensor-model-parallel-size=2", "--expert-model-parallel-size=4"],
            4,
            None,
        ),
        (["--expert-model-parallel-size", "many"], 4, None),
    ],
)
def test_ranks_hold_whole_copies_of_the_model(words: list[str], world: int, complaint: str | None) -> None:
    refusal = parallelism_refusal(words, world)

    if complaint is None:
        assert refusal is None
    else:
        with pytest.raises(AssertionError, match=complaint):
            raise AssertionError(refusal)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([*MEGATRON, "--save", "a", "--save-interval", "5"], None),
        (["--save-interval", "5"], None),  # not Megatron's script
        (MEGATRON, None),
        ([*MEGATRON, "--save-interval", "5"], "--save-interval was given without --save"),
        ([*MEGATRON, "--async-save"], "--async-save was given without --save"),
        ([*MEGATRON, "--ckpt-metadata", "f"], "--ckpt-metadata was given without --save"),
        ([*MEGATRON, "--save", "a", "--save", ""], "--save has no directory behind it"),
        (["--save", "--load", "a"], "--save has no directory behind it"),
    ],
)
def test_checkpoints_have_a_directory(words: list[str], complaint: str | None) -> None:
    refusal = save_refusal(words)

    assert (refusal is None) if complaint is None else (complaint in str(refusal) and "so nothing" in str(refusal))


@pytest.fixture
def script(tmp_path: Path) -> str:
    """A script that says that it was run."""
    path = tmp_path / "train.py"
    path.write_text("print('it ran')")
    return str(path)


def test_a_dry_run_says_what_would_start_and_starts_nothing(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTPUT", str(tmp_path))
    words = ["--nnodes", "2", "--nproc", "8", "--recipe", str(RECIPE), script, "--seed", "a b"]

    assert main(["run", "--dry-run", "--cpu", *words]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["nodes: 2", "ranks a node: 8", f"script: {script}", f"recipe: {RECIPE}"]
    assert lines[4].startswith("arguments: --num-layers 24 ") and lines[4].endswith("--seed 'a b'")
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("options", "arguments", "complaint"),
    [
        (["--nproc", "8"], ["--tensor-model-parallel-size=3"], "give a multiple of 3"),
        (["--nproc-per-node=8"], ["--tensor-model-parallel-size=3"], "give a multiple of 3"),
        (["--nnodes=3", "--nproc=1"], ["--tensor-model-parallel-size", "2"], "and 3 ranks were asked for"),
        (["--nnodes=1:3", "--nproc=1"], ["--tensor-model-parallel-size", "2"], None),
        (["--nproc", "2"], ["--save", ""], "--save has no directory"),
    ],
)
def test_what_cannot_work_is_one_line_before_anything_starts(
    script: str, options: list[str], arguments: list[str], complaint: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["run", "--dry-run", "--cpu", *options, script, *arguments])

    told = capsys.readouterr()
    assert code == (0 if complaint is None else 2)
    if complaint:
        (line,) = told.err.splitlines()
        assert line.startswith("megatron-ckpt run: ") and complaint in line
        assert told.out == ""


def test_without_a_number_of_ranks_torchrun_finds_out(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--dry-run", "--nproc-per-node", "gpu", script]) == 0
    assert "ranks a node: as torchrun finds out" in capsys.readouterr().out.splitlines()
    assert main(["run", "--dry-run", script]) == 0
    assert "ranks a node: 1, this process" in capsys.readouterr().out.splitlines()


def test_the_number_of_nodes_may_stand_in_torchruns_variable(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_NNODES", "2")
    words = ["run", "--dry-run", "--cpu", "--nproc", "4", script, "--tensor-model-parallel-size", "8"]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[0] == "nodes: 2"
    monkeypatch.delenv("PET_NNODES")
    assert main(words) == 2
