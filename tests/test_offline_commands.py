"""``megatron-ckpt inspect``, ``verify`` and ``latest``: what they print, what they find, and their exit codes."""

import io
import json
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_checkpoints import edited
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_ckpt_ext.cli.main import main
from megatron_ckpt_ext.examine.bounded import bounded_memory
from megatron_ckpt_ext.examine.summary import summarize
from megatron_ckpt_ext.examine.verdict import examine_checkpoint
from megatron_ckpt_ext.metadata.container import Container

pytest_plugins = ["made_checkpoints"]

FLIPS = 1000


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = main([str(word) for word in words])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def run_json(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, Any]:
    code, text = run(capsys, *words, "--json")
    return code, json.loads(text)


def data_file(directory: Path) -> Path:
    return max(directory.glob("*.distcp"), key=lambda path: path.stat().st_size)


def contents_in(archive: bytes) -> list[int]:
    """Positions of bytes of the entries of an archive, without what is between them."""
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        entries = opened.infolist()
    positions: list[int] = []
    for entry in entries:
        name, extra = (int.from_bytes(archive[entry.header_offset + at :][:2], "little") for at in (26, 28))
        begin = entry.header_offset + 30 + name + extra
        positions += range(begin, begin + entry.file_size)
    return positions


def flip(file: Path, position: int, bit: int = 0) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1 << bit
    file.write_bytes(content)


@pytest.mark.parametrize("which", ["megatron", "plain"])
def test_a_sound_checkpoint_is_good(
    which: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = request.getfixturevalue(which)

    code, document = run_json(capsys, "verify", "--deep", "--against", directory, directory)
    assert code == 0
    (found,) = document["checkpoints"]
    assert (found["complete"], found["findings"], found["problems"]) == (True, [], [])
    assert found["items_read"] >= found["items"] > 3
    code, text = run(capsys, "verify", directory)
    assert code == 0
    assert text.startswith(f"{directory}: good, {found['kind']}, {found['items']} items in ")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no metadata": (lambda folder: (folder / ".metadata").unlink(), ".metadata is missing"),
    "a short file": (lambda folder: data_file(folder).write_bytes(data_file(folder).read_bytes()[:-1]), "reach beyond"),
    "bytes behind": (lambda folder: data_file(folder).write_bytes(data_file(folder).read_bytes() + b"x"), "no item"),
    "a file too many": (lambda folder: (folder / "__7_0.distcp").write_bytes(b"xyz"), "3 bytes of '__7_0.distcp'"),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGES.values(), ids=DAMAGES)
def test_what_is_wrong_is_said_and_is_exit_code_1(
    damage: Callable[[Path], object], words: str, megatron: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(megatron)

    code, text = run(capsys, "verify", megatron)
    assert code == 1
    assert words in text


def test_a_flipped_bit_of_any_item_is_found_by_reading_it(
    megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = random.Random(3)
    with edited(megatron) as metadata:
        places = list(metadata.storage_data.values())
    for number, place in enumerate(places):
        damaged = tmp_path / str(number)
        shutil.copytree(megatron, damaged)
        content = (damaged / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
        flip(damaged / place.relative_path, place.offset + drawn.choice(contents_in(content)), drawn.randrange(8))

        assert run(capsys, "verify", damaged)[0] == 0
        code, text = run(capsys, "verify", "--deep", damaged)
        assert code == 1, place
        assert "is damaged: its" in text


def test_two_tensors_that_were_exchanged_are_found_against_a_copy_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, (first, second) in {"right": (1.0, 2.0), "exchanged": (2.0, 1.0)}.items():
        state = {"first": torch.full((8,), first), "second": torch.full((8,), second)}
        save(state, checkpoint_id=tmp_path / name, no_dist=True)

    assert run(capsys, "verify", "--deep", tmp_path / "exchanged")[0] == 0
    code, text = run(capsys, "verify", tmp_path / "exchanged", "--against", tmp_path / "right")
    assert code == 1
    assert "item 'first at offset [0]' has other content" in text
    assert "item 'second at offset [0]' has other content" in text


def test_a_tensor_of_another_shape_or_dtype_than_metadata_says_is_found(
    plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = plain.with_name("other")
    save({"weight": torch.ones(4, 3, dtype=torch.int32)}, checkpoint_id=other, no_dist=True)
    with edited(other) as metadata:
        place = next(iter(metadata.storage_data.values()))
    bytes_of_other = (other / place.relative_path).read_bytes()
    with edited(plain) as metadata:
        (index,) = (index for index in metadata.storage_data if index.fqn == "weight")
        target = metadata.storage_data[index]
        assert target.length == place.length
    file = plain / target.relative_path
    content = file.read_bytes()
    file.write_bytes(content[: target.offset] + bytes_of_other + content[target.offset + target.length :])

    assert run(capsys, "verify", plain)[0] == 0
    code, text = run(capsys, "verify", "--deep", plain)
    assert code == 1
    assert "it is a int32 [4, 3], and .metadata says float32 [3, 4]" in text


@pytest.mark.parametrize("which", ["megatron", "plain"])
def test_flipped_bytes_are_findings_or_harmless_and_never_a_traceback(
    which: str, request: pytest.FixtureRequest
) -> None:
    directory = request.getfixturevalue(which)
    drawn = random.Random(7)
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size)
    found = 0
    for _ in range(FLIPS // 2):
        file = drawn.choice(files)
        before = file.read_bytes()
        position, bit = drawn.randrange(len(before)), drawn.randrange(8)
        flip(file, position, bit)
        with bounded_memory(1 << 30):  # as the command line does
            summarize(directory, keys="*")
            found += not examine_checkpoint(directory, deep=True).good
        file.write_bytes(before)

    assert found > FLIPS // 8
    assert examine_checkpoint(directory, deep=True).good


def test_a_pickle_that_asks_for_much_memory_is_a_finding(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (plain / ".metadata").write_bytes(b"\x80\x02Nr\xff\xff\xff\x7f.")  # a memo of two billion places

    code, text = run(capsys, "inspect", plain)
    assert code == 1
    assert "not complete: .metadata is damaged" in text


def test_all_steps_of_a_run(megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "run"
    for name in ("iter_0000001", "iter_0000002"):
        shutil.copytree(megatron, root / name)
    assert run(capsys, "verify", "--all", root)[0] == 0

    (root / "iter_0000002" / ".metadata").unlink()
    code, text = run(capsys, "verify", "--all", root)
    assert code == 1
    assert f"{root}/iter_0000001\tgood\t" in text
    assert f"{root}/iter_0000002\tincomplete\t" in text


def test_the_newest_complete_step_and_its_tracker(
    megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "run"
    for name in ("iter_0000001", "iter_0000002", "iter_0000003"):
        shutil.copytree(megatron, root / name)
        (root / name / "train_state.pt").write_text(name)
    (root / "iter_0000003" / ".metadata").unlink()
    iteration, state = root / "latest_checkpointed_iteration.txt", root / "latest_train_state.pt"
    iteration.write_text("3")
    state.write_text("")

    code, found = run_json(capsys, "latest", root)
    assert (code, found["step"], found["path"]) == (1, 2, str(root / "iter_0000002"))
    assert [each["path"] for each in found["skipped"]] == [str(root / "iter_0000003")]
    assert [each["path"] for each in found["trackers"]] == [str(iteration), str(state)]
    assert (iteration.read_text(), state.read_text()) == ("3", "")

    code, text = run(capsys, "latest", "--fix-tracker", root)
    assert code == 0
    assert text.count("fixed ") == 2
    assert (iteration.read_text(), state.read_text()) == ("2", "iter_0000002")
    assert run(capsys, "latest", root)[0] == 0


def test_nothing_complete_is_exit_code_1_and_bad_input_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "iter_0000001").mkdir()

    assert run(capsys, "latest", tmp_path)[0] == 1
    code, text = run(capsys, "latest", tmp_path / "nowhere")
    assert code == 2
    assert text.count("\n") == 1
    assert run(capsys, "verify", "--all", tmp_path / "iter_0000001")[0] == 2
    assert run(capsys, "verify", "--all", "--against", tmp_path, tmp_path)[0] == 2


def test_a_checkpoint_is_described(megatron: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, "inspect", megatron, "--keys", "model.*", "--largest", "2")

    assert (code, found["kind"], found["step"], found["complete"]) == (0, "torch_dist", 2, True)
    assert {name: items for name, (items, _) in found["dtypes"].items()} == {"bfloat16": 1, "float32": 5, "object": 4}
    assert sum(size for _, size in found["dtypes"].values()) == found["bytes"]
    assert sum(size for _, size in found["files"].values()) == found["bytes"]
    assert found["ranks"] == 2
    assert len(found["largest"]) == 2
    assert {each["name"].split(" at ")[0] for each in found["listed"]} == {"model.weight", "model.bias", "model.norm"}
    assert {each["what"] for each in found["listed"] if "weight" in each["name"]} == {"float32 [4, 6] of [8, 6]"}
    code, text = run(capsys, "inspect", megatron, "--tree")
    assert "\nmodel  (4 items, " in text
    assert "\n  weight  (2 items, " in text


def test_a_checkpoint_says_how_it_got_its_layout(made: Path, plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (run_json(capsys, "inspect", made / name)[1]["provenance"] for name in ("step_1", "step_2"))

    assert first == "created"
    assert second == f"reused layout {prepared_identity(made / 'prepared.metadata')}"
    assert run_json(capsys, "inspect", plain)[1]["provenance"] is None


def prepared_identity(file: Path) -> str:
    with Container.open(str(file)) as opened:
        return str(opened.header()["identity"])


def test_a_prepared_file_is_described(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, "inspect", made / "prepared.metadata")

    assert (code, found["kind"], found["complete"]) == (0, "prepared", True)
    assert found["fingerprint"]["world_size"] == 2
    assert found["slots"]["items"] == found["objects"]
    assert 0 < found["slots"]["used"] < found["slots"]["bytes"]
    assert all(left >= 1024 for _, left in found["slots"]["tightest"])


def test_a_prepared_file_is_verified(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = (made / "prepared.metadata").read_bytes()
    code, text = run(capsys, "verify", made / "prepared.metadata")
    assert code == 0
    assert ": good, prepared, " in text
    assert run(capsys, "verify", made / "step_2" / ".metadata")[0] == 0
    assert run(capsys, "verify", "--deep", made / "prepared.metadata")[0] == 2

    drawn, file = random.Random(5), tmp_path / "prepared"
    for _ in range(100):
        file.write_bytes(whole)
        flip(file, drawn.randrange(len(whole)), drawn.randrange(8))
        with bounded_memory(1 << 30):
            assert not examine_checkpoint(file).good or is_suffix_only(whole, file.read_bytes())


def is_suffix_only(whole: bytes, flipped: bytes) -> bool:
    """Whether the flip is where no checksum reaches: between the body and the sections, in what names a checkpoint."""
    position = next(at for at, (left, right) in enumerate(zip(whole, flipped, strict=True)) if left != right)
    return whole.index(b"storage_meta") - 64 < position < whole.index(b'{"rank"')


def test_a_damaged_prepared_file_is_a_finding(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prepared"
    file.write_bytes((made / "prepared.metadata").read_bytes())
    flip(file, 30)

    code, text = run(capsys, "inspect", file)
    assert code == 1
    assert "not complete: " in text
