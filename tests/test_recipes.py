"""Recipes: how they are read, and that Megatron takes what the shipped ones say."""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from megatron_ckpt_ext.cli.recipe import Recipe, read_recipe
from megatron_ckpt_ext.errors import ConfigurationError

RECIPES = Path(__file__).resolve().parent.parent / "recipes"


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


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.name)
@pytest.mark.parametrize("resume", [False, True])
def test_megatron_takes_the_shipped_recipes(path: Path, resume: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training.arguments import parse_args

    from megatron_ckpt_ext.arguments import add_ckpt_ext_args

    recipe = read_recipe(path, resume=resume, environment={"OUTPUT": "/output"})
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *recipe.arguments])
    args = parse_args(extra_args_provider=add_ckpt_ext_args)
    assert args.save == "/output/checkpoints"
    assert args.async_save and args.use_persistent_ckpt_worker


def test_the_reuse_recipe_is_the_create_recipe_continued() -> None:
    create, reuse = (
        yaml.safe_load((RECIPES / f"gpt_torch_dist_{name}.yaml").read_text()) for name in ("create", "reuse")
    )
    create["MODEL_ARGS"].pop("--ckpt-metadata-create")
    create["MODEL_ARGS"]["--train-iters"] = reuse["MODEL_ARGS"]["--train-iters"]
    assert reuse == create
