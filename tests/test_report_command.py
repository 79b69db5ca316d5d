"""``megatron-ckpt report``: figures of saves from events, and a page that needs no network."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_ckpt_ext.cli.main import main
from megatron_ckpt_ext.events import Event, EventLog, Phase, read_events
from megatron_ckpt_ext.examine.page import page_of
from megatron_ckpt_ext.examine.saves import SaveFigures, saves_of

HOSTILE = "rank 3: item '<script>alert(1)</script>' has outgrown its slot"


def event(step: int, phase: Phase, *, rank: int = 0, time: float = 0.0, seconds: float = 0.0, **more: Any) -> Event:
    known = {"bytes": 0, "items": 0, "collectives": {}, "reason": None, "path": None}
    return Event(step=step, phase=phase, rank=rank, time=time, seconds=seconds, **{**known, **more})


def a_save(step: int, began: float, *, rank: int = 0, plan: float = 0.25, objects: int = 0) -> list[Event]:
    counted = {"all_gather_object": objects} if objects else {}
    return [
        event(step, Phase.PLAN, rank=rank, time=began + plan, seconds=plan, collectives=counted),
        event(step, Phase.STAGE, rank=rank, time=began + plan + 0.5, seconds=0.5),
        event(step, Phase.COMMIT, rank=rank, time=began + 3, seconds=0.25, collectives={"all_reduce": 2}, bytes=100),
    ]


def test_figures_of_two_saves_on_two_ranks() -> None:
    events = [
        *a_save(10, 100.0, objects=2),
        *a_save(10, 100.0, rank=1, plan=1.25, objects=1),
        *a_save(20, 121.0),
        *a_save(20, 121.0, rank=1),
        event(20, Phase.REBUILD, rank=1, time=125.0, reason="the slot is too small"),
    ]

    first, second = saves_of(events)
    assert (first.step, first.ranks, first.objects, first.others, first.bytes) == (10, 2, 2, 2, 200)
    assert first.blocking == {0: 1.0, 1: 2.0}
    assert first.slowest == 2.0
    assert (first.step_seconds, second.step_seconds) == (None, (21.0 - 1.0) / 10)
    assert (first.remarks, second.remarks) == ((), ("the slot is too small",))


def test_a_step_that_a_resumed_job_saves_again_is_another_save() -> None:
    events = [*a_save(10, 100.0), *a_save(20, 110.0), *a_save(20, 500.0), *a_save(30, 510.0)]

    assert [(save.step, save.attempt) for save in saves_of(events)] == [(10, 0), (20, 0), (20, 1), (30, 0)]
    assert [save.step_seconds is None for save in saves_of(events)] == [True, False, True, True]


def test_a_save_that_was_cut_off_has_what_it_left() -> None:
    (save,) = saves_of(a_save(10, 100.0)[:1])

    assert (save.ranks, save.slowest, save.bytes) == (1, 0.25, 0)


def events_file(folder: Path) -> Path:
    for rank in range(2):
        with EventLog(str(folder / "events"), rank) as log:
            for step in (2, 4):
                log.record(Phase.PLAN, step=step, seconds=0.1 * (rank + 1), collectives={"gather_object": 1})
                log.record(Phase.COMMIT, step=step, seconds=0.1, collectives={"all_reduce": 1})
            log.record(Phase.REBUILD, step=4, reason=HOSTILE)
    return folder / "events"


def test_the_page_stands_alone_and_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    output = tmp_path / "report.html"

    assert main(["report", str(events_file(tmp_path)), "-o", str(output)]) == 0
    page = output.read_text()
    assert not re.search(r"(src|href)=\"(?!data:)|@import|url\(", page)
    assert "<script>" not in page
    assert page.count("&lt;script&gt;alert(1)") == 1
    assert page.count("data:image/png;base64,") == 4
    assert {path.name for path in tmp_path.glob("*.png")} == {
        f"report.{name}.png" for name in ("waits", "steps", "ranks", "collectives")
    }
    assert "steps 4: rank 3" in capsys.readouterr().out


def test_figures_for_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(events_file(tmp_path)), "--json"]) == 0

    saves = json.loads(capsys.readouterr().out)["saves"]
    assert [save["step"] for save in saves] == [2, 4]
    assert saves[0]["blocking"] == {"0": pytest.approx(0.2), "1": pytest.approx(0.3)}
    assert saves[0]["objects"] == 1


@pytest.mark.parametrize("saves", [[], saves_of(a_save(1, 0.0))], ids=["none", "one"])
def test_a_page_can_be_made_of_little(saves: Sequence[SaveFigures]) -> None:
    assert page_of("Saves", saves, []).endswith("</html>\n")


def test_no_events_are_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "events")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["report", str(events_file(tmp_path)), "-o", str(tmp_path / "none" / "report.html")]) == 2


def test_events_of_a_job_can_be_read_back(tmp_path: Path) -> None:
    assert len(saves_of(read_events(str(events_file(tmp_path))))) == 2
