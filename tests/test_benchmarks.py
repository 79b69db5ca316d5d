"""Every benchmark runs with tiny sizes, prints its tables and writes what they say as JSON."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def run(name: str, directory: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Run a benchmark as an operator would, from another folder; return what it printed and wrote."""
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
    assert done.returncode == 0, done.stderr[-4000:]
    assert plot.exists() == (importlib.util.find_spec("matplotlib") is not None)
    written: dict[str, Any] = json.loads(result.read_text())
    assert written["benchmark"] == name
    assert written["machine"]["torch"] in done.stdout
    return done.stdout, written


def ordered(spread: dict[str, float]) -> bool:
    return 0 < spread["low"] <= spread["median"] <= spread["high"]


def test_guard(tmp_path: Path) -> None:
    printed, written = run("guard", tmp_path, "--tensors", "30", "--items", "4")

    assert "Slots and layout guard" in printed
    rows = written["rows"]
    assert [(row["size"]["tensors"], row["size"]["items"]) for row in rows] == [(30, 0), (0, 4), (30, 4)]
    assert [row["limit_ms"] for row in rows] == [0.09, 0.4, 0.49]
    assert all(ordered(row["cpu"]) and ordered(row["wall"]) for row in rows)
    assert all(row["parts"].keys() == {"describe", "slots", "held drift", "layout"} for row in rows)
    without_items, only_items, _ = rows
    assert only_items["parts"]["slots"]["median"] > without_items["parts"]["slots"]["median"]


def test_drift_save(tmp_path: Path) -> None:
    printed, written = run(
        "drift_save", tmp_path, "--tensors", "3", "--elements", "16", "--items", "2", "--directory", str(tmp_path)
    )

    assert "Ratios within a round" in printed
    assert written["state"] == {"tensors": 3, "elements": 16, "items": 2}
    sides = written["seconds"]
    assert len(sides) == 4
    assert all(len(saves) == 2 and min(min(save.values()) for save in saves) > 0 for saves in sides.values())
    assert [ratio["limit"] for ratio in written["ratios"]] == [1.3, None, None, None]
    assert all(ordered(ratio["whole"]) and ordered(ratio["blocking"]) for ratio in written["ratios"])
    first = written["ratios"][0]
    assert first["ours"] in printed and first["stock"] in printed
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # no checkpoint is left behind
