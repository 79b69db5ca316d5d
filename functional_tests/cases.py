"""Functional cases: what a folder of ``test_cases`` asks for, as frozen data.

``model_config.yaml`` has the keys of Megatron-LM's functional tests and is run as a recipe. ``expected.yaml`` beside it
is ours: the jobs that follow each other (lives), what each of them saves, and what a save may cost.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import yaml

__all__ = ["CASES", "CPU_ARGUMENTS", "SUITES", "Case", "Life", "cases_in_scope", "read_case"]

CASES = Path(__file__).resolve().parent / "test_cases"
CPU_ARGUMENTS = CASES / "cpu.yaml"
SUITES = Path(__file__).resolve().parent / "test_suites"


@dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """One job of a case."""

    name: str
    """Also of its folder."""
    ranks: int
    """Of all nodes together."""
    saves: Mapping[int, str]
    """Step -> kind of save, as ``collectives.yaml`` names it."""
    arguments: tuple[str, ...] = ()
    """Behind those of ``model_config.yaml``; ``${NAME}`` is a variable of the case."""
    save: str = "${CHECKPOINT_SAVE_PATH}"
    """Directory of its checkpoints."""
    resumes: int = 0
    """Step of the checkpoint that it starts from; 0 for none."""
    rewound: bool = False
    """Whether newer checkpoints are removed first, as in Megatron-LM's ``ckpt-resume``."""
    killed_in: int | None = None
    """Step in whose write every rank is killed, if any."""
    reference: str = "uninterrupted"
    """Stock job with the same losses: ``uninterrupted``, or ``resumed`` from the same checkpoint."""

    def expanded(self, variables: Mapping[str, str]) -> tuple[str, ...]:
        """Return the arguments with every variable replaced."""
        return tuple(Template(word).substitute(variables) for word in self.arguments)

    def directory(self, variables: Mapping[str, str]) -> Path:
        """Return where its checkpoints go."""
        return Path(Template(self.save).substitute(variables))


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One folder of ``test_cases``."""

    name: str
    """Of the folder."""
    model: str
    """Of the folder above: ``gpt`` is Megatron's training loop, ``fsdp2`` the trainer in ``recipes``."""
    shows: str
    """What it is for, in one sentence."""
    collectives: Mapping[str, Mapping[str, int]]
    """Kind of save -> object collective -> calls of rank 0."""
    lives: tuple[Life, ...]
    """In order."""
    node_local: bool = False
    """Whether the prepared file is on storage that each node has for itself: needs two nodes."""
    without_nvrx: bool = False
    """Whether NVRx is not there."""

    @property
    def config(self) -> Path:
        """The recipe."""
        return CASES / self.model / self.name / "model_config.yaml"


def read_case(model: str, name: str) -> Case:
    """Read one case.

    Raises:
        ValueError: a key that is not known, or a kind of save that is not in the table.
    """
    document = _load(CASES / model / name / "expected.yaml")
    table = _load(CASES / "collectives.yaml")[document["collectives"]]
    ranks = document.pop("ranks")
    lives = tuple(_life(life, ranks) for life in document["lives"])
    unknown = {kind for life in lives for kind in life.saves.values()} - table.keys()
    if unknown:
        raise ValueError(f"{name}: saves of kind {sorted(unknown)} are not in the table of {document['collectives']}")
    try:
        return Case(name=name, model=model, **{**document, "lives": lives, "collectives": table})
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from error


def _life(document: dict[str, Any], ranks: int) -> Life:
    """Read one life; the ranks are those of the case where it has none of its own."""
    return Life(**{"ranks": ranks, **document, "arguments": tuple(document.get("arguments", ()))})


def cases_in_scope(scope: str | None = None) -> list[Case]:
    """Read the cases that the suites list for a scope, or all of them, in the order of the suites."""
    found = []
    for suite in (_load(path) for path in sorted(SUITES.glob("*.yaml"), reverse=True)):
        for product in suite["products"]:
            scopes = {name for axes in product["products"] for name in axes["scope"]}
            if scope is None or scope in scopes:
                found += [read_case(suite["spec"]["model"], name) for name in product["test_case"]]
    return found


def _load(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(path.read_text())
    return document
