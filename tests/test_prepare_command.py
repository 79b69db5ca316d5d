"""``megatron-ckpt prepare``: saves follow a file that was made from a checkpoint of stock Megatron, or of torch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workload
from dtensor_jobs import reusing
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from ranks import RankPool
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from workload import Job

from megatron_ckpt_ext.cli.main import main
from megatron_ckpt_ext.commit.commit import Committed, How
from megatron_ckpt_ext.compat.mcore import TorchDistSaveShardedStrategy
from megatron_ckpt_ext.emulation import CpuEmulation
from megatron_ckpt_ext.examine.summary import summarize
from megatron_ckpt_ext.strategy.fsdp_dtensor import FsdpDtensorSaver

pytest_plugins = ["made_checkpoints"]


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, Any]:
    code = main(["prepare", *map(str, words), "--json"])
    printed = capsys.readouterr()
    return code, json.loads(printed.out) if printed.out else printed.err


def with_text(seed: int, letters: int) -> workload.StateDict:
    text = ShardedObject("text", "x" * letters, (1,), (0,), replica_id=dist.get_rank())
    return {**workload.state(seed), "text": text}


def stock_on_rank(directory: str) -> None:
    Path(directory).mkdir(exist_ok=True)
    dist.barrier()
    with CpuEmulation(megatron=False):
        dist_checkpointing.save(with_text(1, 10), directory, TorchDistSaveShardedStrategy())


def following_on_rank(directory: str, file: str) -> list[How]:
    """Save three states that follow the file; the text grows in its head room."""
    outcomes: list[Committed] = []
    strategy = Job(directory=directory, reuse=file, extra={"on_commit": outcomes.append}).strategy()
    for number, letters in enumerate((10, 400, 900)):
        workload.save(strategy, f"{directory}/{number}", with_text(number, letters))
    return [committed.how for committed in outcomes]


@pytest.mark.parametrize("slots", [True, False])
def test_saves_follow_a_file_made_from_a_stock_checkpoint(
    slots: bool, ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.run(stock_on_rank, str(tmp_path / "stock"), world_size=2)
    file = tmp_path / "prepared"

    code, made = run(capsys, tmp_path / "stock", "-o", file, *[] if slots else ["--no-slots"])
    assert code == 0
    assert (made["ranks"], made["workers_per_rank"]) == (2, 1)
    assert ("text/shard_0_1" in made["unslotted"]) is not slots
    how = ranks.run(following_on_rank, str(tmp_path), str(file), world_size=2)
    assert how == [[How.REUSED, How.REUSED if slots else How.REBUILT, How.REUSED]] * 2
    said = summarize(tmp_path / "1").provenance or ""
    assert said.startswith("reused layout crc32 " if slots else "rebuilt, rank 0: text/shard_0_1 does not match")


def state_of_torch(letters: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"weight": DTensor.from_local(torch.rand(2, 3), mesh, [Shard(0)]), "text": "x" * letters}


def torch_on_rank(directory: str) -> None:
    save(state_of_torch(10), checkpoint_id=directory)


def following_torch_on_rank(directory: str, file: str) -> list[How]:
    with FsdpDtensorSaver(prepared_metadata=reusing(file)) as saver:
        return [
            saver.save(state_of_torch(letters), f"{directory}/{letters}").wait().committed.how for letters in (10, 900)
        ]


def test_saves_follow_a_file_made_from_a_checkpoint_of_torch(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.run(torch_on_rank, str(tmp_path / "torch"), world_size=2)

    assert run(capsys, tmp_path / "torch", "-o", tmp_path / "prepared")[0] == 0
    how = ranks.run(following_torch_on_rank, str(tmp_path), str(tmp_path / "prepared"), world_size=2)
    assert how == [[How.REUSED, How.REUSED]] * 2


def test_a_file_with_slots_is_left_as_it_is(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run(capsys, made / "step_2", "-o", tmp_path / "prepared", "--no-slots")

    assert (code, found["unslotted"]) == (0, [])


def test_a_file_is_compared_with_the_settings_of_a_job(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--check", made / "prepared.metadata", "--world-size", 2)[0] == 0
    for file in (made / "prepared.metadata", made / "step_2" / ".metadata"):
        code, found = run(capsys, "--check", file, "--world-size", 4)
        assert (code, found["fits"]) == (1, False)
        assert found["differences"] == ["world size is 4 in this job and 2 in the prepared metadata"]


def test_bad_input_is_one_sentence(megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (damaged := tmp_path / "damaged").mkdir()
    for words in (
        [],
        [megatron],
        [megatron, "--check", megatron],
        [damaged, "-o", tmp_path / "x"],
        [megatron, "-o", tmp_path / "none" / "x"],
        ["--check", tmp_path / "nowhere"],
    ):
        code, text = run(capsys, *words)
        assert code == 2, words
        assert text.count("\n") == 1
    assert not (tmp_path / "x").exists()
