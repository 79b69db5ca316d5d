"""Named profiles of the real multi-storage client, over folders: one of files, one of flat objects.

A plug-in of pytest, for its fixtures; test modules import it before pytest does, so PYTEST_DONT_REWRITE its asserts.
Names are new for each test: the client keeps a profile for the length of a
process.
"""

import json
import multiprocessing
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

KINDS = ("files", "objects")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A profile and where its objects really are."""

    name: str
    kind: str
    config: Path
    """For MSC_CONFIG."""
    folder: Path
    """Of the files, or of the flat objects."""

    def url(self, *parts: str) -> str:
        return "/".join([f"msc://{self.name}", *parts])

    @property
    def plain(self) -> Path:
        """The folder that files of the profile can be reached by as well."""
        assert self.kind == "files"
        return self.folder


def made_profile(folder: Path, kind: str) -> Profile:
    """Make a profile with a name of its own."""
    name = f"{kind}-{uuid.uuid4().hex[:8]}"
    profile = Profile(name=name, kind=kind, config=folder / f"{name}.json", folder=folder / name)
    profile.folder.mkdir()
    if kind == "files":
        settings = {"storage_provider": {"type": "file", "options": {"base_path": str(profile.folder)}}}
    else:
        bundle = {"type": "flat_objects.FlatBundle", "options": {"folder": str(profile.folder)}}
        settings = {"provider_bundle": bundle}
    profile.config.write_text(json.dumps({"profiles": {name: settings}}))
    return profile


@contextmanager
def in_use(profile: Profile) -> Iterator[None]:
    """Let the client of this process know the profile."""
    before = os.environ.get("MSC_CONFIG")
    os.environ["MSC_CONFIG"] = str(profile.config)
    try:
        yield
    finally:
        os.environ.pop("MSC_CONFIG")
        if before is not None:
            os.environ["MSC_CONFIG"] = before


def exit_code(act: Callable[[], object]) -> int | None:
    """Do something in a process of its own, a copy of this one, and return how it ended."""
    process = multiprocessing.get_context("fork").Process(target=act)
    process.start()
    process.join(60)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode


@pytest.fixture(params=KINDS)
def profile(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Profile]:
    """A profile of each kind."""
    made = made_profile(tmp_path, request.param)
    with in_use(made):
        yield made


@pytest.fixture
def files_profile(tmp_path: Path) -> Iterator[Profile]:
    """A profile whose objects are files."""
    made = made_profile(tmp_path, "files")
    with in_use(made):
        yield made
