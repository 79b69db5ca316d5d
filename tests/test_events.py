"""The events file: its keys, its tolerance, and that it never costs a save."""

import json
import logging
import resource
import signal
import threading
from pathlib import Path

import pytest

from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.events import Event, EventLog, Phase, read_events

KEYS = ["time", "step", "rank", "phase", "seconds", "bytes", "items", "collectives", "reason", "path"]


def _log(directory: Path, rank: int = 3) -> EventLog:
    return EventLog(str(directory / "events"), rank, clock=lambda: 12.5)


def test_a_record_is_one_line_with_the_agreed_keys_and_reads_back(tmp_path: Path) -> None:
    with _log(tmp_path) as log:
        log.record(
            Phase.PLAN,
            step=7,
            seconds=0.5,
            bytes=64,
            items=2,
            collectives={"all_reduce": 1},
            path="iter_0000007",
        )
        log.record(Phase.REBUILD, step=8, reason="two\nlines \u2028 and more")
    lines = (tmp_path / "events.3").read_text().split("\n")
    assert [list(json.loads(line)) for line in lines[:-1]] == [KEYS, KEYS]
    assert lines[-1] == ""
    first, second = read_events(str(tmp_path / "events.3"))
    assert first == Event(
        time=12.5,
        step=7,
        rank=3,
        phase=Phase.PLAN,
        seconds=0.5,
        bytes=64,
        items=2,
        collectives={"all_reduce": 1},
        reason=None,
        path="iter_0000007",
    )
    assert (second.phase, second.reason, second.collectives) == (
        Phase.REBUILD,
        "two\nlines \u2028 and more",
        {},
    )


def test_phases_are_those_that_readers_know() -> None:
    assert list(Phase) == ["plan", "stage", "fence", "write", "commit", "publish", "rebuild", "fallback", "retain"]


def test_a_line_is_on_disk_as_soon_as_it_is_recorded(tmp_path: Path) -> None:
    log = _log(tmp_path)
    log.record(Phase.WRITE, step=1)
    assert len(read_events(str(tmp_path / "events"))) == 1
    log.close()


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with EventLog(None, 0) as log:
        log.record(Phase.WRITE, step=1)
    assert list(tmp_path.iterdir()) == []


def test_close_twice_and_record_after_close_are_harmless(tmp_path: Path) -> None:
    log = _log(tmp_path)
    log.record(Phase.WRITE, step=1)
    log.close()
    log.close()
    log.record(Phase.WRITE, step=2)
    assert [event.step for event in read_events(str(tmp_path / "events"))] == [1]


def test_a_directory_that_is_missing_is_one_sentence_with_the_flag_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--ckpt-events .*absent/events: .*existing directory"):
        EventLog(str(tmp_path / "absent" / "events"), 0)


def test_a_later_job_appends_and_starts_behind_a_torn_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with _log(tmp_path) as log:
        log.record(Phase.WRITE, step=1)
    file = tmp_path / "events.3"
    file.write_bytes(file.read_bytes() + b'{"time": 1.0, "st')
    assert [event.step for event in read_events(str(file))] == [1]
    assert not caplog.records, "a torn last line is normal"
    with _log(tmp_path) as log:
        log.record(Phase.WRITE, step=2)
    assert [event.step for event in read_events(str(file))] == [1, 2]
    assert "events.3:2 is skipped" in caplog.text


@pytest.mark.parametrize("line", ["[]", "3", '{"time": 1}', "\xff", '{"phase": "plan"}'])
def test_lines_that_are_no_events_are_skipped(tmp_path: Path, line: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "events.0").write_text(line + "\n")
    assert read_events(str(tmp_path / "events")) == []
    assert "events.0:1 is skipped" in caplog.text


def test_an_unknown_phase_is_skipped_and_an_unknown_key_ignored(tmp_path: Path) -> None:
    with _log(tmp_path, rank=0) as log:
        log.record(Phase.WRITE, step=1)
    record = json.loads((tmp_path / "events.0").read_text())
    (tmp_path / "events.0").write_text(
        json.dumps(record | {"later": 1}) + "\n" + json.dumps(record | {"phase": "later"}) + "\n"
    )
    assert [event.phase for event in read_events(str(tmp_path / "events"))] == [Phase.WRITE]


def test_all_ranks_are_read_in_rank_order_and_nothing_else(tmp_path: Path) -> None:
    for rank in (10, 2):
        with _log(tmp_path, rank) as log:
            log.record(Phase.COMMIT, step=1)
    (tmp_path / "events.bak").write_text("no event")
    assert [event.rank for event in read_events(str(tmp_path / "events"))] == [2, 10]
    with pytest.raises(FileNotFoundError):
        read_events(str(tmp_path / "other"))


def test_a_full_disk_warns_once_and_a_later_record_is_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """RLIMIT_FSIZE makes the kernel cut a write short and refuse the next one, as a full disk does."""
    log = _log(tmp_path)
    log.record(Phase.WRITE, step=1)
    size = (tmp_path / "events.3").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
        with caplog.at_level(logging.WARNING):
            log.record(Phase.WRITE, step=2)
            log.record(Phase.WRITE, step=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    log.record(Phase.WRITE, step=4)
    log.close()
    assert [event.step for event in read_events(str(tmp_path / "events"))] == [1, 4]


def test_threads_do_not_mix_lines(tmp_path: Path) -> None:
    with _log(tmp_path) as log:

        def record() -> None:
            for step in range(50):
                log.record(Phase.WRITE, step=step)

        threads = [threading.Thread(target=record) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(read_events(str(tmp_path / "events"))) == 200
