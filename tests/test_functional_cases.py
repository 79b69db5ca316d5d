"""The functional cases as files: Megatron-LM's conventions, as recorded from its runner, and what the cases promise."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from cases import CASES, SUITES, Case, cases_in_scope, read_case

from megatron_ckpt_ext.arguments import add_ckpt_ext_args
from megatron_ckpt_ext.cli.recipe import read_recipe
from recipes.fsdp2_trainer import parser as trainer_parser

CONFIG_KEYS = {"ENV_VARS", "MODEL_ARGS", "TEST_TYPE", "LAUNCHER", "METRICS", "BEFORE_SCRIPT"}
"""Of a ``model_config.yaml``, those that are used here."""
TEST_TYPES = {"regular", "ckpt-resume", "frozen-start", "frozen-resume", "release", "checkpoint-consistency"}
SUITE_KEYS = {"type", "format_version", "maintainers", "loggers", "spec", "products"}
SPEC_KEYS = {"name", "model", "build", "nodes", "gpus", "n_repeat", "platforms", "script_setup", "script"}
AXES = {"environment", "scope", "platforms"}
FOLDERS = {"OUTPUT_PATH": "/output", "CHECKPOINT_SAVE_PATH": "/output/checkpoints", "NODE_LOCAL_PATH": "/local"}

EVERY_CASE = cases_in_scope()
EVERY_SUITE = sorted(SUITES.glob("*.yaml"))


def config_of(case: Case) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(case.config.read_text())
    return document


def test_every_case_is_in_one_suite() -> None:
    listed = [f"{case.model}/{case.name}" for case in EVERY_CASE]

    assert sorted(listed) == sorted(str(path.parent.relative_to(CASES)) for path in CASES.glob("*/*/expected.yaml"))
    assert len(set(listed)) == len(listed)
    assert {path.name for path in CASES.glob("*/*/*")} == {"expected.yaml", "model_config.yaml"}


@pytest.mark.parametrize("case", EVERY_CASE, ids=lambda case: case.name)
def test_a_config_has_the_keys_of_megatrons_runner(case: Case) -> None:
    config = config_of(case)

    assert {"ENV_VARS", "MODEL_ARGS", "TEST_TYPE"} <= config.keys() <= CONFIG_KEYS
    assert config["TEST_TYPE"] in TEST_TYPES
    assert config["LAUNCHER"] == "torchrun"
    assert (config["TEST_TYPE"] == "ckpt-resume") == any(life.rewound for life in case.lives)


@pytest.mark.parametrize("case", EVERY_CASE, ids=lambda case: case.name)
def test_the_training_script_takes_the_arguments(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training.arguments import parse_args

    words = read_recipe(case.config, resume=False, environment=FOLDERS).arguments
    monkeypatch.setattr(sys, "argv", ["script", *words])

    if case.model == "fsdp2":
        assert trainer_parser().parse_args(words).directory == FOLDERS["CHECKPOINT_SAVE_PATH"]
    else:
        args = parse_args(extra_args_provider=add_ckpt_ext_args)
        assert args.save == args.load == FOLDERS["CHECKPOINT_SAVE_PATH"]
        assert args.async_save and args.use_persistent_ckpt_worker
        assert getattr(args, "ckpt_metadata_create", False) is not case.without_nvrx


@pytest.mark.parametrize("case", EVERY_CASE, ids=lambda case: case.name)
def test_the_saves_that_are_expected_are_those_of_the_interval(case: Case) -> None:
    arguments = config_of(case)["MODEL_ARGS"]
    last, interval = arguments.get("--train-iters", arguments.get("--steps")), arguments["--save-interval"]

    for life in case.lives:
        ends = next((int(n) for n in life.arguments if n.isdecimal() and "--exit-interval" in life.arguments), last)
        made = [*life.saves, *([life.killed_in] if life.killed_in else [])]
        assert made == list(range(life.resumes + interval, made[-1] + 1, interval))
        assert made[-1] == ends or life.killed_in


def test_the_layouts_differ_in_what_their_names_say_and_in_nothing_else() -> None:
    said = ("--tensor-model-parallel-size", "--no-ckpt-fully-parallel-save", "--dist-ckpt-workers")
    seen = []
    for tp in (1, 2):
        for saver, flag in (("fully_parallel", None), ("main_replica", True)):
            for writers, plural in ((1, ""), (2, "s")):
                name = f"torch_dist_tp{tp}_{saver}_{writers}_writer{plural}"
                config = config_of(read_case("gpt", name))
                assert [config["MODEL_ARGS"].pop(each, None) for each in said] == [tp, flag, writers]
                seen.append(config)
    assert len(seen) == 8
    assert all(config == seen[0] for config in seen)


@pytest.mark.parametrize("path", EVERY_SUITE, ids=lambda path: path.name)
def test_a_suite_has_the_form_of_megatrons(path: Path) -> None:
    suite = yaml.safe_load(path.read_text())

    assert suite.keys() == SUITE_KEYS
    assert (suite["type"], suite["format_version"]) == ("basic", 1)
    assert suite["spec"].keys() == SPEC_KEYS
    folders = {"assets_dir": "/assets", "artifacts_dir": "/artifacts"}
    for product in suite["products"]:
        assert product.keys() == {"test_case", "products"}
        for axes in product["products"]:
            assert axes.keys() == AXES
            chosen = {name: values[0] for name, values in axes.items()}
            for name in product["test_case"]:
                filled = suite["spec"] | chosen | {"test_case": name} | folders
                assert "{" not in suite["spec"]["name"].format(**filled)
                script = suite["spec"]["script"].format(**filled)
                assert f"test_cases/{suite['spec']['model']}/{name}/model_config.yaml" in script


def test_the_short_selection_has_the_case_of_private_directories() -> None:
    assert [case.name for case in cases_in_scope("mr-github-slim")] == ["torch_dist_node_local_file"]
    assert [case.name for case in EVERY_CASE if case.node_local] == ["torch_dist_node_local_file"]


def test_a_kind_of_save_that_is_not_in_the_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cases.CASES", tmp_path)
    (tmp_path / "gpt" / "a").mkdir(parents=True)
    (tmp_path / "collectives.yaml").write_text("t: {create: {}}")
    expected = "shows: x\nranks: 2\ncollectives: t\nlives: [{name: one, saves: {1: made}}]"
    (tmp_path / "gpt" / "a" / "expected.yaml").write_text(expected)
    with pytest.raises(ValueError, match="'made'"):
        read_case("gpt", "a")
    (tmp_path / "gpt" / "a" / "expected.yaml").write_text(expected.replace("made", "create") + "\nnodelocal: true")
    with pytest.raises(ValueError, match="nodelocal"):
        read_case("gpt", "a")


def test_the_script_for_other_runners_runs_the_one_beside_it_with_the_extension(tmp_path: Path) -> None:
    (tmp_path / "pretrain_gpt.py").write_text(
        "import argparse\nfrom megatron.training import arguments\n"
        "parser = arguments.add_megatron_arguments(argparse.ArgumentParser())\n"
        "print(__name__, parser.parse_args(['--ckpt-metadata-create']).ckpt_metadata_create)"
    )
    script = CASES.parent / "pretrain_gpt_with_extension.py"

    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=True)

    assert done.stdout.split()[-2:] == ["__main__", "True"]
