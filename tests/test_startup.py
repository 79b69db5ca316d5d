"""Start-up: what one rank finds, and how all ranks make one decision of what each of them found."""

import contextlib
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from prepared_files import FINGERPRINT, layout, prepared_bytes
from ranks import RankPool

from megatron_ckpt_ext.collectives import CollectiveCounter
from megatron_ckpt_ext.config import CkptExtConfig
from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.strategy.startup import Action, Finding, agree_on_start, examine

NOBODY = 65534
PLAIN = pickle.dumps(layout(2))
FITTING = prepared_bytes(layout(2))
OTHER_LAYOUT = prepared_bytes(layout(2), replace(FINGERPRINT, tensor_parallel=1))
DAMAGED = FITTING[:-1]


def config_for(path: Path | str, *, create: bool = False, **others: Any) -> CkptExtConfig:
    return CkptExtConfig(
        ckpt_metadata=str(path), ckpt_metadata_create=create, async_save=True, save="checkpoints", **others
    )


def found(path: Path | str, *, create: bool, rank: int = 0, world_size: int = 2) -> Finding:
    settings = replace(FINGERPRINT, world_size=world_size)
    return examine(str(path), settings, rank, world_size, create=create)


def test_without_the_flag_nothing_is_done() -> None:
    finding = examine(None, FINGERPRINT, 0, 2, create=False)

    assert finding.action is Action.NOTHING
    assert finding.prepared is None


@pytest.mark.parametrize(
    ("content", "create", "action", "reason"),
    [
        (None, False, Action.STOP, "no such file: name an existing one, or add --ckpt-metadata-create"),
        (None, True, Action.CREATE, "is not there yet, the first save makes it"),
        (FITTING, False, Action.REUSE, "saves reuse "),
        (FITTING, True, Action.REUSE, "saves reuse "),
        (PLAIN, False, Action.REUSE, "saves reuse "),
        (PLAIN, True, Action.REUSE, "saves reuse "),
        (OTHER_LAYOUT, False, Action.STOP, "tensor parallel is 2 in this job and 1 in the prepared metadata"),
        (OTHER_LAYOUT, True, Action.CREATE, "tensor parallel is 2 in this job and 1 in the prepared metadata"),
        (DAMAGED, False, Action.STOP, "damaged"),
        (DAMAGED, True, Action.STOP, "damaged"),
        (b"", False, Action.STOP, "damaged"),
        (b"", True, Action.STOP, "damaged"),
    ],
    ids=lambda value: f"{len(value)}_bytes" if isinstance(value, bytes) else str(value)[:9],
)
def test_what_a_rank_finds(tmp_path: Path, content: bytes | None, create: bool, action: Action, reason: str) -> None:
    path = tmp_path / "prepared"
    if content is not None:
        path.write_bytes(content)

    for rank in range(2):
        finding = found(path, create=create, rank=rank)
        assert finding.action is action
        assert reason in finding.reason
        assert str(path) in finding.reason
        assert (finding.prepared is not None) == (action is Action.REUSE)
    assert path.exists() == (content is not None)
    assert content is None or path.read_bytes() == content


@pytest.mark.parametrize("create", [False, True])
def test_a_file_of_another_format_that_does_not_fit_is_never_replaced(tmp_path: Path, create: bool) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(PLAIN)

    finding = found(path, create=create, world_size=3)

    assert finding.action is Action.STOP
    assert "world size is 3 in this job and 2 in the prepared metadata" in finding.reason
    assert "another FILE" in finding.reason


@pytest.mark.parametrize("create", [False, True])
def test_a_directory_is_refused(tmp_path: Path, create: bool) -> None:
    finding = found(tmp_path, create=create)

    assert finding.action is Action.STOP
    assert finding.reason == f"--ckpt-metadata {tmp_path}: this is a directory or a device: name a file"


@pytest.mark.parametrize("create", [False, True])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, create: bool) -> None:
    os.mkfifo(tmp_path / "prepared")

    finding = found(tmp_path / "prepared", create=create)

    assert finding.action is Action.STOP
    assert "name a file" in finding.reason


def test_a_read_that_fails_is_a_finding_too() -> None:
    """A rank that raises here would leave its peers in the reduction."""
    finding = found("/proc/self/mem", create=False)

    assert finding.action is Action.STOP
    assert finding.reason == "--ckpt-metadata /proc/self/mem: OSError: [Errno 5] Input/output error"


def test_a_directory_that_is_not_there_is_refused_before_the_first_save(tmp_path: Path) -> None:
    finding = found(tmp_path / "absent" / "prepared", create=True)

    assert finding.action is Action.STOP
    assert f"its directory {tmp_path}/absent does not exist: make it first" in finding.reason
    assert not (tmp_path / "absent").exists()


def test_the_name_of_a_checkpoints_own_metadata_is_not_made(tmp_path: Path) -> None:
    """In the directory of a save that failed it would look like a complete checkpoint."""
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "metadata.json").touch()
    for path in (tmp_path / ".metadata", tmp_path / "step" / "prepared"):
        finding = found(path, create=True)
        assert finding.action is Action.STOP
        assert "choose another directory and name" in finding.reason


def test_a_relative_file_is_looked_up_here(tmp_path: Path) -> None:
    (tmp_path / "prepared").write_bytes(FITTING)

    with contextlib.chdir(tmp_path):
        assert found("prepared", create=True).action is Action.REUSE
        assert found("absent", create=True).action is Action.CREATE


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Without root's rights, where the tests run as root."""
    if os.getuid() != 0:
        yield
        return
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that everybody can reach; pytest's own cannot be entered by other users."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)
        os.chmod(name, 0o755)


def test_a_directory_that_is_not_writable_is_refused_before_the_first_save(open_directory: Path) -> None:
    os.chmod(open_directory, 0o555)

    with as_nobody():
        finding = found(open_directory / "prepared", create=True)

    assert finding.action is Action.STOP
    assert f"its directory {open_directory} is not writable: choose another place" in finding.reason


def test_a_fitting_file_in_a_read_only_place_is_reused(open_directory: Path) -> None:
    (open_directory / "prepared").write_bytes(FITTING)
    os.chmod(open_directory, 0o555)

    with as_nobody():
        assert found(open_directory / "prepared", create=False).action is Action.REUSE


def test_a_file_that_may_not_be_read_is_refused(open_directory: Path) -> None:
    (open_directory / "prepared").write_bytes(FITTING)
    os.chmod(open_directory / "prepared", 0)

    with as_nobody():
        finding = found(open_directory / "prepared", create=False)

    assert finding.action is Action.STOP
    assert "cannot be read: Permission denied" in finding.reason


def test_a_version_difference_is_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "prepared"
    path.write_bytes(FITTING)

    finding = examine(str(path), replace(FINGERPRINT, torch_version="2.15.0"), 0, 2, create=False)

    assert finding.action is Action.REUSE
    (warning,) = finding.warnings
    assert "torch version is 2.15.0 in this job and 2.14.1 in the prepared metadata" in warning
    assert found(path, create=False).warnings == ()


def test_one_warning_names_all_that_a_plain_file_does_not_tell(tmp_path: Path) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(PLAIN)

    (warning,) = found(path, create=False).warnings

    unknown = "tensor parallel, pipeline parallel, context parallel, expert parallel, ckpt format, "
    assert unknown + "drops redundant extra state, optimizer sharding;" in warning


@dataclass(frozen=True, kw_only=True)
class Start:
    """How the start ended on one rank: with an action, or with a sentence."""

    action: Action | None
    text: str
    has_part: bool
    collectives: dict[str, int]


def _start_on_rank(directories: list[str], configs: list[CkptExtConfig]) -> Start:
    """Examine and agree; each rank in its own working directory, where a relative FILE is another one."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    config = configs[rank]
    settings = replace(FINGERPRINT, world_size=world_size)
    with contextlib.chdir(directories[rank]), CollectiveCounter() as counter, counter.phase("start") as tally:
        try:
            decision = agree_on_start(
                examine(config.ckpt_metadata, settings, rank, world_size, create=config.ckpt_metadata_create), config
            )
        except ConfigurationError as error:
            return Start(action=None, text=str(error), has_part=False, collectives=tally.counts)
    return Start(
        action=decision.action,
        text=decision.reason,
        has_part=decision.prepared is not None,
        collectives=tally.counts,
    )


@pytest.fixture
def start(ranks: RankPool, tmp_path: Path) -> Callable[..., list[Start]]:
    """Start a job in which each rank has its own file of a given content; `None` is no file."""

    def run(*contents: bytes | None, configs: list[CkptExtConfig] | None = None, create: bool = False) -> list[Start]:
        directories = []
        for rank, content in enumerate(contents):
            directory = tmp_path / f"rank_{rank}"
            directory.mkdir()
            directories.append(str(directory))
            if content is not None:
                (directory / "prepared").write_bytes(content)
        configs = configs or [config_for("prepared", create=create)] * len(contents)
        return ranks.run(_start_on_rank, directories, configs, world_size=len(contents))

    return run


@pytest.mark.parametrize("create", [False, True])
def test_ranks_that_see_one_fitting_file_reuse_it(start: Callable[..., list[Start]], create: bool) -> None:
    for outcome in start(FITTING, FITTING, create=create):
        assert outcome.action is Action.REUSE
        assert outcome.has_part
        assert outcome.collectives == {"all_reduce": 1}


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_file_that_is_damaged_for_one_rank_stops_all_with_its_sentence(
    start: Callable[..., list[Start]], bad_rank: int
) -> None:
    contents = [DAMAGED if rank == bad_rank else FITTING for rank in range(2)]

    outcomes = start(*contents, create=True)

    assert [outcome.action for outcome in outcomes] == [None, None]
    assert outcomes[0].text == outcomes[1].text
    assert outcomes[0].text.startswith("--ckpt-metadata: prepared metadata 'prepared' is damaged")
    assert outcomes[0].collectives == {"all_reduce": 1, "broadcast_object_list": 1}


def test_damage_that_only_one_rank_would_ever_read_stops_all(start: Callable[..., list[Start]]) -> None:
    one_bit = FITTING.replace(b'{"rank":1,', b'{"rank":3,')
    assert one_bit != FITTING

    outcomes = start(one_bit, one_bit)

    assert [outcome.action for outcome in outcomes] == [None, None]
    assert outcomes[0].text == outcomes[1].text
    assert "section of rank 1" in outcomes[0].text


@pytest.mark.parametrize("missing_rank", [0, 1])
def test_a_file_that_is_missing_for_one_rank_is_made_for_all(
    start: Callable[..., list[Start]], missing_rank: int
) -> None:
    contents = [None if rank == missing_rank else FITTING for rank in range(2)]

    for outcome in start(*contents, create=True):
        assert outcome.action is Action.CREATE
        assert not outcome.has_part
        assert "saves reuse" not in outcome.text
        assert outcome.collectives == {"all_reduce": 1}


def test_a_file_that_is_missing_for_one_rank_stops_all_without_create(start: Callable[..., list[Start]]) -> None:
    outcomes = start(FITTING, None)

    assert [outcome.action for outcome in outcomes] == [None, None]
    assert outcomes[0].text == outcomes[1].text
    assert "no such file: name an existing one, or add --ckpt-metadata-create" in outcomes[0].text


@pytest.mark.parametrize("create", [False, True])
def test_ranks_that_see_different_files_do_not_mix_them(start: Callable[..., list[Start]], create: bool) -> None:
    outcomes = start(FITTING, prepared_bytes(layout(2), identity="file-2"), create=create)

    assert {outcome.action for outcome in outcomes} == {Action.CREATE if create else None}
    assert outcomes[0].text == outcomes[1].text
    assert "not all ranks see the same" in outcomes[0].text
    assert not any(outcome.has_part for outcome in outcomes)
    assert {tuple(outcome.collectives.items()) for outcome in outcomes} == {(("all_reduce", 1),)}


@pytest.mark.parametrize("contents", [(FITTING, PLAIN), (PLAIN, None), (None, PLAIN)], ids=["ours", "first", "last"])
def test_a_file_of_another_format_on_one_rank_is_never_replaced(
    start: Callable[..., list[Start]], contents: tuple[bytes | None, bytes | None]
) -> None:
    outcomes = start(*contents, create=True)

    assert [outcome.action for outcome in outcomes] == [None, None]
    assert outcomes[0].text == outcomes[1].text
    assert "not all ranks see the same file. Copy one file to every node, or name another FILE" in outcomes[0].text
    assert outcomes[0].collectives == {"all_reduce": 1}


def test_a_file_that_does_not_fit_on_one_rank_is_replaced_for_all(start: Callable[..., list[Start]]) -> None:
    outcomes = start(FITTING, OTHER_LAYOUT, create=True)

    assert [outcome.action for outcome in outcomes] == [Action.CREATE] * 2
    assert not any(outcome.has_part for outcome in outcomes)


@pytest.mark.parametrize(
    ("changed", "flag", "values"),
    [
        ({"ckpt_metadata": "elsewhere"}, "--ckpt-metadata", ("'prepared'", "'elsewhere'")),
        ({"ckpt_metadata_create": False}, "--ckpt-metadata-create", ("True", "False")),
        ({"ckpt_metadata_on_drift": "fail"}, "--ckpt-metadata-on-drift", ("'rebuild'", "'fail'")),
        ({"ckpt_save_timeout": 60.0}, "--ckpt-save-timeout", ("None", "60.0")),
        ({"ckpt_events": "events"}, "--ckpt-events", ("None", "'events'")),
        ({"save": "other"}, "--save", ("'checkpoints'", "'other'")),
        ({"ckpt_metadata": None, "ckpt_metadata_create": False}, "--ckpt-metadata", ("'prepared'", "None")),
    ],
    ids=str,
)
def test_settings_that_differ_are_named_with_both_values_on_every_rank(
    start: Callable[..., list[Start]], changed: dict[str, Any], flag: str, values: tuple[str, str]
) -> None:
    common = config_for("prepared", create=True)

    outcomes = start(None, None, configs=[common, replace(common, **changed)])

    sentence = (
        f"{flag} differs between ranks: {values[0]} on rank 0, {values[1]} on rank 1. "
        "Start every rank with the same arguments"
    )
    assert [outcome.text for outcome in outcomes] == [sentence] * 2
    assert [outcome.action for outcome in outcomes] == [None, None]


def test_without_the_flag_the_start_costs_one_reduction(start: Callable[..., list[Start]]) -> None:
    for outcome in start(None, None, configs=[CkptExtConfig()] * 2):
        assert outcome.action is Action.NOTHING
        assert outcome.collectives == {"all_reduce": 1}
