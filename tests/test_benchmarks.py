"""Every benchmark runs with tiny sizes, prints its tables and writes what they say as JSON."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

from growth import Growth  # noqa: E402  (needs the path set above)

STEADY = ("holdings", "slots", "held drift")
KIB, MIB = 1 << 10, 1 << 20


def run(name: str, directory: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Run a benchmark as an operator would, from another folder; return what it printed and wrote.

    Tiny sizes may miss a limit; then, and only then, the exit code is 1.
    """
    result, plot = directory / "out" / f"{name}.json", directory / "out" / f"{name}.png"
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--repetitions", "2", *arguments]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [*command, "--json", str(result), "--plot", str(plot)],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr[-4000:]
    assert result.exists(), done.stderr[-4000:]
    assert plot.exists() == (importlib.util.find_spec("matplotlib") is not None)
    written: dict[str, Any] = json.loads(result.read_text())
    assert written["benchmark"] == name
    assert written["machine"]["torch"] in done.stdout
    met = [limit["met"] for limit in written["limits"]]
    assert (done.returncode == 0) == written["met"] == all(met)
    assert ("MISSED" in done.stdout) == (not all(met))
    return done.stdout, written


def ordered(spread: dict[str, float]) -> bool:
    return 0 < spread["low"] <= spread["median"] <= spread["high"]


def bounds(written: dict[str, Any]) -> dict[str, float]:
    return {limit["what"]: limit["bound"] for limit in written["limits"]}


def test_guard(tmp_path: Path) -> None:
    printed, written = run("guard", tmp_path, "--tensors", "30", "--items", "4")

    assert "Slots and layout guard" in printed
    rows = written["rows"]
    assert [(row["size"]["tensors"], row["size"]["items"]) for row in rows] == [(30, 0), (0, 4), (30, 4)]
    assert list(bounds(written).values()) == [row["limit_ms"] for row in rows] == [0.09, 0.4, 0.49]
    assert all(ordered(row["cpu"]) and ordered(row["wall"]) for row in rows)
    assert all(row["parts"].keys() == {"holdings", "slots", "held drift", "describe", "layout"} for row in rows)
    assert all(row["cpu"]["high"] <= sum(row["parts"][part]["high"] for part in STEADY) for row in rows)
    without_items, only_items, _ = rows
    assert only_items["parts"]["slots"]["median"] > without_items["parts"]["slots"]["median"]


def test_drift_save(tmp_path: Path) -> None:
    printed, written = run(
        "drift_save", tmp_path, "--tensors", "3", "--elements", "16", "--items", "2", "--directory", str(tmp_path)
    )

    assert "Ratios within a round" in printed
    assert written["state"] == {"tensors": 3, "elements": 16, "items": 2, "replicated": 0}
    sides = written["seconds"]
    assert len(sides) == 4
    assert all(len(saves) == 2 and min(min(save.values()) for save in saves) > 0 for saves in sides.values())
    assert [ratio["limit"] for ratio in written["ratios"]] == [1.3, None, None, None]
    assert list(bounds(written).values()) == [1.3]
    assert all(ordered(ratio[what]) for ratio in written["ratios"] for what in ("whole", "blocking", "cpu"))
    first = written["ratios"][0]
    assert first["ours"] in printed and first["stock"] in printed
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # no checkpoint is left behind


def test_scaling(tmp_path: Path) -> None:
    printed, written = run("scaling", tmp_path, "--shapes", "2048x1024", "--directory", str(tmp_path))

    assert "Start-up of one rank" in printed
    (row,) = written["rows"]
    assert (row["entries"], row["shape"]["ranks"]) == (2048, 1024)
    assert list(bounds(written).values()) == [10.0, 1_000_000, 1]
    published, planned = row["published"], row["planned"]
    assert published["whole_bytes"] < published["file_bytes"]
    assert all(len(published[kind]) == 2 and min(published[kind]) > 0 for kind in ("stock", "training_thread"))
    assert min(planned["stock"] + planned["ours"]) > min(planned["guard"]) > 0
    assert all(each["counts"]["opens"] == 1 for each in row["started"] + row["whole"])
    whole, own = row["whole"][0]["counts"]["bytes_read"], row["started"][0]["counts"]["bytes_read"]
    assert own < whole <= published["whole_bytes"] + 4096
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.timeout(180)
def test_steady_save(tmp_path: Path) -> None:
    sizes = ("--ranks", "2", "--jobs", "1", "--tensors", "6", "--replicated", "3", "--elements", "16", "--items", "2")
    printed, written = run("steady_save", tmp_path, *sizes, "--directory", str(tmp_path))

    assert "Collectives of one save by phase" in printed
    first, steady = written["measured"]
    assert (first["kind"], steady["kind"]) == ("first", "steady")
    assert objects(first, "stock") >= 5
    assert objects(steady, "stock") == 1
    assert objects(first, "ours") == objects(steady, "ours") == 0
    assert [len(each["seconds"]["ours"]["finalize"]) for each in (first, steady)] == [1, 2]
    assert 0 < steady["cpu"]["ours"]["save call"][0] <= steady["seconds"]["ours"]["save call"][0]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_memory(tmp_path: Path) -> None:
    sizes = ("--ranks", "1", "--saves", "6", "--tensors", "8", "--elements", "16", "--items", "2")
    printed, written = run("memory", tmp_path, *sizes, "--repetitions", "1", "--directory", str(tmp_path))

    assert "Growth of resident memory" in printed
    assert written["memory"].keys() == {"stock", "create", "reuse"}
    for (entry,) in written["memory"].values():
        assert entry.keys() == {"trainer", "writer"}
        for process in entry.values():
            assert len(process["resident"]) == 6
            assert process["after"]["peak"] >= max(process["resident"])
            assert process["after"]["rss"] >= process["after"]["pss"] >= process["after"]["uss"] > 0
    assert len(bounds(written)) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("resident", "leaks"),
    [
        ([100 * KIB * save for save in range(60)], True),
        ([50 * KIB * save for save in range(60)], False),
        ([16 * MIB if save >= 25 else 0 for save in range(60)], False),
        ([16 * MIB if save >= 25 else 0 for save in range(60)][::-1], False),
    ],
    ids=["leak", "as slow as allowed", "a step up", "a step down"],
)
def test_a_leak_goes_on(resident: list[int], *, leaks: bool) -> None:
    assert Growth.of(resident).is_leak(Growth(slope=0.0, rise=0.0)) == leaks
    assert not Growth.of(resident).is_leak(Growth.of(resident))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_flags_unset(tmp_path: Path) -> None:
    printed, written = run("flags_unset", tmp_path, "--repetitions", "2", "--directory", str(tmp_path))

    assert "8 iterations with 2 saves" in printed
    blocks = written["blocks"]
    assert [block["kind"] for block in blocks[:6]] == [
        *("stock", "stock again", "installed"),
        *("stock again", "installed", "stock"),
    ]
    assert len(blocks) == 3 * (written["warm"] + 2)
    assert all(block["wall"] > 2 * block["save_call"] > 0 and block["wall"] > block["cpu"] > 0 for block in blocks)
    chance = written["ratios"]["wall"]["stock again"]
    bound, lower = (limit["bound"] for limit in written["limits"])
    assert (bound, lower) == (pytest.approx(1.03 * chance["high"]), pytest.approx(0.97 * chance["low"]))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def objects(measured: dict[str, Any], side: str) -> int:
    phases = measured["collectives"][side].values()
    return sum(number for phase in phases for name, number in phase.items() if "object" in name)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_manager(tmp_path: Path) -> None:
    sizes = ("--ranks", "1", "--tensors", "3", "--elements", "4096", "--directory", str(tmp_path))
    printed, written = run("manager", tmp_path, *sizes)

    assert "A writer that sleeps for 3 steps" in printed
    (measured,) = written["measured"]
    (found,) = measured["found"]
    assert found["staged"] == 3 * 4096 * 4
    assert len(found["rounds"]) == len(found["slow"]) == 2
    assert all(0 < each["save"] <= each["durable"] and min(each.values()) > 0 for each in found["rounds"])
    assert list(bounds(written).values()) == [1.3, 1.1, 1.1, 3]
    assert written["limits"][3]["met"]  # it sleeps, whatever the sizes
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_offline(tmp_path: Path) -> None:
    sizes = ("--items", "2000", "--mebibytes", "4", "--repetitions", "2")
    printed, written = run("offline", tmp_path, *sizes, "--directory", str(tmp_path))

    assert "2,000 items; 4 MiB on" in printed
    assert set(written["seconds"]) == {"unpickling", "inspect", "verify", "verify --deep", "reading", "CRC-32"}
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in written["seconds"].values())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
