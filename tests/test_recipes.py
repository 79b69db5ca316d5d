"""Recipes: how they are read, and that Megatron takes what the shipped ones say."""

import os
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from recipe_headers import commands, header

from megatron_ckpt_ext import ManagerConfig
from megatron_ckpt_ext.cli.main import main
from megatron_ckpt_ext.cli.recipe import Recipe, read_recipe
from megatron_ckpt_ext.config import CkptExtConfig
from megatron_ckpt_ext.errors import ConfigurationError
from recipes.fsdp2_trainer import parser

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
ALL = sorted(RECIPES.glob("*.yaml"))
TRAINERS = RECIPES / "fsdp2_trainer.yaml"
MEGATRONS = [path for path in ALL if path != TRAINERS]


def read(folder: Path, text: str, *, resume: bool = False, environment: Mapping[str, str] | None = None) -> Recipe:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return read_recipe(path, resume=resume, environment=environment or {})


def test_values_become_words(tmp_path: Path) -> None:
    recipe = read(
        tmp_path,
        """
        MODEL_ARGS:
          --bf16: true
          --fp16: false
          --none: null
          --lr: 1.0e-4
          --octal: 010
          --split: 949,50,1
          --text: "two words"
          --quoted: 'true'
          --list: [1, 2, three]
          --empty: ''
        """,
    )
    assert recipe.arguments == (
        *("--bf16", "--lr", "1.0e-4", "--octal", "010", "--split", "949,50,1", "--text", "two words"),
        *("--quoted", "true", "--list", "1", "2", "three", "--empty", ""),
    )
    assert recipe.environment == {}


def test_names_are_expanded(tmp_path: Path) -> None:
    text = """
    ENV_VARS: {ROOT: "${HOME}/runs", SIZE: 3, NAME: "${ROOT}/a"}
    MODEL_ARGS: {--save: "${NAME}/${SIZE}", --price: $5, --list: ["${SIZE}"]}
    """
    recipe = read(tmp_path, text, environment={"HOME": "/home/me", "SIZE": "old"})
    assert recipe.environment == {"ROOT": "/home/me/runs", "SIZE": "3", "NAME": "/home/me/runs/a"}
    assert recipe.arguments == ("--save", "/home/me/runs/a/3", "--price", "$5", "--list", "3")


@pytest.mark.parametrize(("resume", "expected"), [(False, ("--a", "1")), (True, ("--a", "2", "--b"))])
def test_resume_takes_the_second_arguments(tmp_path: Path, resume: bool, expected: tuple[str, ...]) -> None:
    text = "MODEL_ARGS: &one {--a: 1}\nMODEL_ARGS_2: {<<: *one, --b: true, --a: 2}"
    assert sorted(read(tmp_path, text, resume=resume).arguments) == sorted(expected)


def test_resume_without_second_arguments_takes_the_first(tmp_path: Path) -> None:
    assert read(tmp_path, "MODEL_ARGS: {--a: 1}", resume=True).arguments == ("--a", "1")


def test_keys_of_megatrons_runner_are_named(tmp_path: Path) -> None:
    recipe = read(tmp_path, "TEST_TYPE: regular\nMETRICS: [lm loss]\nMODEL_ARGS: {--a: 1}")
    assert recipe.ignored == ("METRICS", "TEST_TYPE")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("MODEL_ARGS: {--save: '${NOWHERE}/x'}", r"--save uses \$\{NOWHERE\}, which is not set"),
        ("ENV_VARS: {A: '${NOWHERE}'}\nMODEL_ARGS: {--a: 1}", r"A uses \$\{NOWHERE\}"),
        (
            "ENV_VARS: {A: ''}\nMODEL_ARGS: {--save: '${A}/x'}",
            r"--save uses \$\{A\}, which is empty, so that \$\{A\}/x",
        ),
        ("MODEL_ARG: {--a: 1}", "unknown key MODEL_ARG;"),
        ("1: 2", "unknown key 1;"),
        ("ENV_VARS: {A: 1}", "MODEL_ARGS is missing"),
        ("MODEL_ARGS: [--a]", "MODEL_ARGS must map names to values, but is a list"),
        ("MODEL_ARGS: {a: 1}", "the argument a must start with a dash"),
        ("MODEL_ARGS: {--a: {b: 1}}", "--a is {'b': '1'}"),
        ("ENV_VARS: {A: true}\nMODEL_ARGS: {--a: 1}", "A is True"),
        ("MODEL_ARGS: {--a: 1", "not valid YAML"),
        ("- a", "not a mapping"),
        ("", "not a mapping"),
        ("MODEL_ARGS: !!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
)
def test_bad_recipes_are_refused_in_one_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint) as refused:
        read(tmp_path, text)
    assert str(refused.value).startswith(f"recipe {tmp_path / 'recipe.yaml'}: ")
    assert "\n" not in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.yaml: cannot be read"):
        read_recipe(tmp_path / "none.yaml", resume=False, environment={})


def test_an_empty_name_is_taken_where_no_path_begins_with_it(tmp_path: Path) -> None:
    recipe = read(tmp_path, "MODEL_ARGS: {--a: '${E}', --b: 'x${E}/y'}", environment={"E": ""})
    assert recipe.arguments == ("--a", "", "--b", "x/y")


def as_run(command: Sequence[str]) -> list[str]:
    """What `megatron-ckpt run` gets of a command; from train.sbatch on each node, with a task a GPU."""
    if "megatron-ckpt" in command:
        return list(command[command.index("megatron-ckpt") + 2 :])
    slurm = {name: command[command.index(f"--{name}") + 1] for name in ("nodes", "gpus-per-node")}
    (at,) = (at for at, word in enumerate(command) if word == "functional_tests/slurm/train.sbatch")
    return ["--nnodes", slurm["nodes"], "--nproc", slurm["gpus-per-node"], *command[at + 1 :]]


def world(run: Sequence[str]) -> int:
    """How many ranks a command starts."""
    return int(run[run.index("--nproc") + 1]) * (int(run[run.index("--nnodes") + 1]) if "--nnodes" in run else 1)


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_a_recipe_says_when_to_use_it_and_how_to_run_it(path: Path) -> None:
    when = list(takewhile(bool, header(path)))
    assert when[0].startswith("When: ") and 1 < len(when) <= 3
    assert commands(path)
    for command in commands(path):
        assert command[0].startswith("OUTPUT=/") and f"recipes/{path.name}" in command
    row = f"| [{path.name}]({path.name}) |"
    assert sum(line.startswith(row) for line in (RECIPES / "README.md").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("path", "command"), [pytest.param(path, command, id=path.name) for path in ALL for command in commands(path)]
)
def test_the_commands_of_a_recipe_pass_a_dry_run(
    path: Path, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(RECIPES.parent)
    monkeypatch.setattr(os, "environ", {**os.environ, "OUTPUT": str(tmp_path)})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    script = {"pretrain_gpt.py": "recipes/pretrain_gpt.py"}
    words = [script.get(word, word) for word in as_run(command)]

    assert main(["run", "--dry-run", *words]) == 0

    assert f"recipe: recipes/{path.name}" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def parsed(path: Path, monkeypatch: pytest.MonkeyPatch, *, resume: bool = False) -> Namespace:
    """What Megatron's parser, with our flags, makes of a recipe; its variables are set."""
    from megatron.training.arguments import parse_args

    from megatron_ckpt_ext.arguments import add_ckpt_ext_args

    recipe = read_recipe(path, resume=resume, environment={"OUTPUT": "/output"})
    for name, value in recipe.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *recipe.arguments])
    args: Namespace = parse_args(extra_args_provider=add_ckpt_ext_args)
    return args


@pytest.mark.parametrize("path", MEGATRONS, ids=lambda path: path.name)
@pytest.mark.parametrize("resume", [False, True])
def test_megatron_takes_the_shipped_recipes(path: Path, resume: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    args = parsed(path, monkeypatch, resume=resume)
    assert args.save == "/output/checkpoints"
    assert args.async_save and args.use_persistent_ckpt_worker
    assert args.load == (args.save if resume or args.transformer_impl == "transformer_engine" else None)
    assert CkptExtConfig.from_args(args).save == args.save


@pytest.mark.parametrize(
    ("path", "ranks"),
    [pytest.param(path, world(as_run(command)), id=path.name) for path in MEGATRONS for command in commands(path)],
)
def test_megatron_validates_the_shipped_recipes_at_their_number_of_ranks(
    path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator
    from megatron.training.arguments import core_transformer_config_from_args, validate_args

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=9))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    args = parsed(path, monkeypatch)
    validate_args(args, {"tokenizer_type": "NullTokenizer"})
    assert args.async_save and args.async_strategy == "nvrx"
    args.apply_rope_fusion = False  # asks for Transformer Engine, which needs a GPU
    core_transformer_config_from_args(args)
    batches = ConstantNumMicroBatchesCalculator(
        args.global_batch_size, args.micro_batch_size, args.data_parallel_size, args.decrease_batch_size_if_needed, 0
    )
    assert args.virtual_pipeline_model_parallel_size is None or batches.get() % args.pipeline_model_parallel_size == 0


def test_the_trainer_takes_its_recipe() -> None:
    recipe = read_recipe(TRAINERS, resume=False, environment={"OUTPUT": "/output"})
    options = parser().parse_args(recipe.arguments)
    config = ManagerConfig.from_args(options, prefix="ckpt")
    assert options.directory == "/output/checkpoints"
    assert config.async_save and config.keep_last == 2
    assert config.keep_interval is not None and config.keep_interval % options.save_interval == 0


@pytest.mark.parametrize("kind", ["gpt", "multi_node"])
def test_the_reuse_recipe_is_the_create_recipe_without_the_flag_that_makes_the_file(kind: str) -> None:
    """Not even the schedule may differ: Megatron refuses a checkpoint of another one."""
    create, reuse = (
        yaml.safe_load((RECIPES / f"{kind}_torch_dist_{name}.yaml").read_text()) for name in ("create", "reuse")
    )
    assert create["MODEL_ARGS"].pop("--ckpt-metadata-create") is True
    create["MODEL_ARGS"].pop("--exit-interval", None)
    assert reuse == create
