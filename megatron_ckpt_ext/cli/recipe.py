"""Recipes: YAML files with the keys of Megatron-LM's ``model_config.yaml``, turned into an environment and arguments.

``MODEL_ARGS`` maps flags to values: ``true`` is a bare flag, ``false`` and ``null`` leave the flag out, a
list is several values. Any other value is passed on as it is written. ``${NAME}`` stands for an environment
variable, those of ``ENV_VARS`` included.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_ckpt_ext.errors import ConfigurationError

__all__ = ["Recipe", "read_recipe"]

USED_KEYS = ("ENV_VARS", "MODEL_ARGS", "MODEL_ARGS_2")
RUNNER_KEYS = ("AFTER_SCRIPT", "BEFORE_SCRIPT", "LAUNCHER", "METRICS", "MODE", "TEST_TYPE", "THROUGHPUT_TEST_PARAMS")
UNDERSTOOD_TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("bool", "null", "merge"))
TEXT_TAG = "tag:yaml.org,2002:str"
VARIABLE = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What a recipe asks for, expanded."""

    environment: Mapping[str, str]
    """Variables to set, over those already set."""
    arguments: tuple[str, ...]
    """The training script's arguments."""
    ignored: tuple[str, ...]
    """Keys that mean something to Megatron-LM's test runner and nothing here."""


class TextLoader(yaml.SafeLoader):
    """YAML in which numbers and dates stay the text that was written, so that arguments arrive unchanged."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> Any:
        """The tag of a node that has none of its own."""
        tag = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        return TEXT_TAG if kind is yaml.ScalarNode and tag not in UNDERSTOOD_TAGS else tag


def read_recipe(path: Path, *, resume: bool, environment: Mapping[str, str]) -> Recipe:
    """Read and expand the recipe at ``path``; ``resume`` takes ``MODEL_ARGS_2`` where the recipe has it.

    Raises ``ConfigurationError`` for a file that is not a recipe, for a ``${NAME}`` that is not set, and for a path
    that begins with an empty one.
    """
    try:
        return _recipe(_load(path), resume=resume, environment=environment)
    except ConfigurationError as error:
        raise ConfigurationError(f"recipe {path}: {error}") from error


def _load(path: Path) -> Mapping[str, Any]:
    """The recipe's top level, with every key known."""
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=TextLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot be read: {error}.") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"not valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(document, dict):
        raise ConfigurationError("not a mapping with the key MODEL_ARGS.")
    unknown = sorted(document.keys() - {*USED_KEYS, *RUNNER_KEYS}, key=str)
    if unknown:
        raise ConfigurationError(f"unknown key {unknown[0]}; correct or remove it (used here: {', '.join(USED_KEYS)}).")
    return document


def _recipe(document: Mapping[str, Any], *, resume: bool, environment: Mapping[str, str]) -> Recipe:
    """The recipe in ``document``."""
    variables: dict[str, str] = {}
    for name, value in _section(document, "ENV_VARS").items():
        variables[name] = _expand(name, _text(name, value), {**environment, **variables})
    key = "MODEL_ARGS_2" if resume and "MODEL_ARGS_2" in document else "MODEL_ARGS"
    if key not in document:
        raise ConfigurationError(f"{key} is missing: it maps the training script's flags to their values.")
    arguments = [
        _expand(flag, word, {**environment, **variables})
        for flag, value in _section(document, key).items()
        for word in _words(flag, value)
    ]
    ignored = tuple(name for name in RUNNER_KEYS if name in document)
    return Recipe(environment=variables, arguments=tuple(arguments), ignored=ignored)


def _section(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """One mapping of the recipe, empty where it is left out."""
    section = document.get(key) or {}
    if not isinstance(section, dict):
        raise ConfigurationError(f"{key} must map names to values, but is a {type(section).__name__}.")
    return section


def _words(flag: str, value: Any) -> list[str]:
    """The words of one flag on a command line."""
    if not flag.startswith("-"):
        raise ConfigurationError(f"the argument {flag} must start with a dash, as in --{flag}.")
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    values = value if isinstance(value, list) else [value]
    return [flag, *(_text(flag, item) for item in values)]


def _text(key: str, value: Any) -> str:
    """The text of a single value."""
    if not isinstance(value, str):
        raise ConfigurationError(f"{key} is {value!r}, where only text or a number can stand.")
    return value


def _expand(key: str, text: str, environment: Mapping[str, str]) -> str:
    """``text`` with every ``${NAME}`` replaced."""

    def value_of(match: re.Match[str]) -> str:
        value = environment.get(match[1])
        if value is None:
            raise ConfigurationError(
                f"{key} uses {match[0]}, which is not set: set it in the environment or in ENV_VARS."
            )
        if not value and text.startswith(f"{match[0]}/"):
            raise ConfigurationError(
                f"{key} uses {match[0]}, which is empty, so that {text} would lie below /: set it to a directory."
            )
        return value

    return VARIABLE.sub(value_of, text)
