"""``megatron-ckpt diff``: differences of layout and of values between two checkpoints."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megatron_ckpt_ext.cli.main import main

pytest_plugins = ["made_checkpoints"]


def saved(folder: Path, name: str, **state: Any) -> Path:
    save(state, checkpoint_id=folder / name, no_dist=True)
    return folder / name


def diff(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, Any]:
    code = main(["diff", *map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_checkpoint_does_not_differ_from_itself(megatron: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff(capsys, megatron, megatron, "--values") == (0, {"layout": [], "values": []})


def test_two_steps_differ_in_values_only(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff(capsys, made / "step_1", made / "step_2") == (0, {"layout": [], "values": []})

    code, found = diff(capsys, made / "step_1", made / "step_2", "--values")
    assert code == 1
    assert found["layout"] == []
    assert {"model.weight", "rng/shard_0_2"} <= {each["name"] for each in found["values"]}


def test_layouts_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = saved(tmp_path, "a", same=torch.ones(2), shape=torch.ones(2), dtype=torch.ones(2), gone=torch.ones(1))
    second = saved(tmp_path, "b", same=torch.ones(2), shape=torch.ones(3), dtype=torch.ones(2).half(), new=1)

    code, found = diff(capsys, first, second, "--values")
    assert code == 1
    assert {each["name"]: each["what"] for each in found["layout"]} == {
        "gone": "only in the first",
        "new": "only in the second",
        "shape": "float32 [2] in the first, float32 [3] in the second",
        "dtype": "float32 [2] in the first, float16 [2] in the second",
    }
    assert found["values"] == []


VALUES = {
    "float": (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.5, 3.25]), 2, 0.5),
    "nan": (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 3.0]), 1, 2.0),
    "to nan": (torch.tensor([1.0]), torch.tensor([float("nan")]), 1, float("inf")),
    "int": (torch.tensor([2**40]), torch.tensor([2**40 + 1]), 1, 1.0),
    "bool": (torch.tensor([True, False]), torch.tensor([True, True]), 1, 1.0),
    "eight bits": (torch.ones(2).to(torch.float8_e4m3fn), torch.zeros(2).to(torch.float8_e4m3fn), 2, 1.0),
    "scalar": (torch.tensor(1), torch.tensor(4), 1, 3.0),
}


@pytest.mark.parametrize(("left", "right", "count", "largest"), VALUES.values(), ids=VALUES)
def test_the_largest_difference_is_told(
    left: torch.Tensor,
    right: torch.Tensor,
    count: int,
    largest: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, found = diff(capsys, saved(tmp_path, "a", x=left), saved(tmp_path, "b", x=right), "--values")

    assert code == 1
    assert found["values"] == [{"name": "x", "what": f"{count} elements differ", "largest": largest}]


def sharded_on_rank(directory: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(21.0).view(7, 3)
    local = whole.chunk(dist.get_world_size())[dist.get_rank()]
    save(
        {"x": DTensor.from_local(local, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride())},
        checkpoint_id=directory,
    )


def test_shards_that_are_cut_otherwise_are_compared(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for world_size in (2, 4):
        ranks.run(sharded_on_rank, str(tmp_path / str(world_size)), world_size=world_size)
    other = torch.arange(21.0).view(7, 3)
    other[6, 2] += 8
    third = saved(tmp_path, "third", x=other)

    code, found = diff(capsys, tmp_path / "2", tmp_path / "4", "--values")
    assert (code, found["values"]) == (1, [])
    assert [each["what"] for each in found["layout"]] == ["cut otherwise: 2 shards in the first, 4 in the second"]
    for name in ("2", "4"):
        for pair in ((tmp_path / name, third), (third, tmp_path / name)):
            _, found = diff(capsys, *pair, "--values")
            assert found["values"] == [{"name": "x", "what": "1 elements differ", "largest": 8.0}]


def test_what_cannot_be_read_is_exit_code_2(megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(megatron), str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_damaged_shard_is_a_difference(megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = Path(shutil.copytree(megatron, tmp_path / "damaged"))
    for file in damaged.glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))

    code, found = diff(capsys, megatron, damaged, "--values")
    assert code == 1
    assert all(each["what"].startswith("cannot be compared: ") for each in found["values"])
