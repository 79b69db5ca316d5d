"""Which step a job resumes from, the same on all ranks, and what it gets."""

import gc
import logging
import os
import pickle
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dtensor_jobs import StateDict, Trainer, differing, full
from ranks import RankPool
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_ckpt_ext.collectives import CollectiveCounter
from megatron_ckpt_ext.compat.dcp import DistWrapper
from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.manager.resume import Chosen, LoadFailedError, choose_step, load_step

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

ALONE = DistWrapper(None, False, 0)


class Counting:
    """A ``Stateful`` whose state dict is a copy, as those that gather or convert make."""

    def __init__(self, value: float) -> None:
        self.value = torch.full((1000,), value)
        self.copies: list[weakref.ref[torch.Tensor]] = []

    def state_dict(self) -> StateDict:
        copy = self.value.clone()
        self.copies.append(weakref.ref(copy))
        return {"deep": {"value": copy}, "name": "counting"}

    def load_state_dict(self, state_dict: StateDict) -> None:
        self.value = state_dict["deep"]["value"] * 1

    @property
    def alive(self) -> int:
        return sum(copy() is not None for copy in self.copies)


@contextmanager
def without_collector() -> Iterator[None]:
    """What is freed here is freed because nobody holds it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def plain_state(value: float) -> StateDict:
    return {
        "weight": torch.full((3, 4), value),
        "half": torch.full((5,), value, dtype=torch.bfloat16),
        "nested": {"list": [torch.tensor(value), {"empty": torch.empty(0, 4)}], "rate": value},
        "object": {"cursor": int(value), "words": ("a", "b")},
        "counting": Counting(value),
    }


def wrapper() -> DistWrapper:
    return DistWrapper(None, dist.is_initialized(), 0)


def trained_on_rank(directory: str) -> StateDict:
    """Save ``step_1/trainer`` to ``step_4/trainer`` of an FSDP2 model; return what ``step_2`` holds."""
    trainer, held = Trainer(seed=1), {}
    for step in range(1, 5):
        trainer.step()
        state = trainer.state(**plain_state(float(step)))
        if step == 2:
            held = values(state)
        save(state, checkpoint_id=f"{directory}/step_{step}/trainer")
    return held


def values(state: StateDict) -> StateDict:
    """All of a state, whole. Called on all ranks."""
    return full({**state, "counting": state["counting"].value})


@pytest.fixture(scope="module")
def trained(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StateDict]:
    """Steps 1 and 2 are complete, 3 has lost a file, 4 was cut off; and what step 2 holds."""
    directory = tmp_path_factory.mktemp("trained")
    held = ranks.run(trained_on_rank, str(directory))[0]
    (directory / "step_3" / "trainer" / "__1_0.distcp").unlink()
    (directory / "step_4" / "trainer" / ".metadata").unlink()
    return directory, held


class Messages(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def logged() -> Iterator[list[str]]:
    messages, logger = Messages(), logging.getLogger("megatron_ckpt_ext.manager.resume")
    logger.addHandler(messages)
    try:
        yield messages.texts
    finally:
        logger.removeHandler(messages)


def resumed_on_rank(directory: str) -> tuple[Chosen, list[str], dict[str, int], StateDict, int, bool]:
    """Resume a trainer of other values."""
    state = Trainer(seed=99).state(**plain_state(0.0))
    weight = state["weight"]
    with logged() as texts, without_collector():
        with CollectiveCounter() as counter, counter.phase("choose"):
            chosen = choose_step(directory, subdirectory="trainer", wrapper=wrapper())
        assert chosen is not None
        load_step(state, chosen, wrapper())
        alive = state["counting"].alive
    return chosen, texts, counter.totals()["choose"], values(state), alive, state["weight"] is weight


def test_the_newest_complete_step_is_loaded_bit_for_bit(ranks: RankPool, trained: tuple[Path, StateDict]) -> None:
    directory, held = trained

    found = ranks.run(resumed_on_rank, str(directory))

    skipped = {
        f"{directory}/step_4/trainer": ".metadata is missing: no save was finished in this directory",
        f"{directory}/step_3/trainer": found[0][0].skipped[f"{directory}/step_3/trainer"],
    }
    assert skipped[f"{directory}/step_3/trainer"].startswith("file '__1_0.distcp', in which")
    for chosen, _, counts, loaded, alive, in_place in found:
        assert chosen == Chosen(step=2, path=f"{directory}/step_2/trainer", skipped=skipped)
        assert list(chosen.skipped) == list(skipped)
        assert counts == {"broadcast_object_list": 1, "all_reduce": 1}
        assert differing(loaded, held) == []
        assert (alive, in_place) == (0, True)
    told = [f"the checkpoint {path} is passed over: {reason}" for path, reason in skipped.items()]
    assert [texts for _, texts, *_ in found] == [told, []]


def test_another_number_of_ranks_gets_the_same(ranks: RankPool, trained: tuple[Path, StateDict]) -> None:
    directory, held = trained

    [(chosen, _, _, loaded, _, _)] = ranks.run(resumed_on_rank, str(directory), world_size=1)

    assert (chosen.step, differing(loaded, held)) == (2, [])


def refused_on_rank(directory: str, step: int | None, blind: int | None) -> str:
    """What this rank is told; the blind one is somewhere else, and the directory is relative."""
    before = os.getcwd()
    os.chdir("/" if dist.get_rank() == blind else directory)
    try:
        choose_step(".", subdirectory="trainer", step=step, wrapper=wrapper())
    except ConfigurationError as error:
        return str(error)
    finally:
        os.chdir(before)
    return "nothing was refused"


@pytest.mark.parametrize(
    ("step", "blind", "sentence"),
    [
        (
            4,
            None,
            "step 4 was asked for, but './step_4/trainer' is not a complete checkpoint: .metadata is missing: no save "
            "was finished in this directory. Ask for another step, or for none to load the newest complete one",
        ),
        (
            3,
            None,
            "step 3 was asked for, but './step_3/trainer' is not a complete checkpoint: file '__1_0.distcp', in which ",
        ),
        (
            9,
            None,
            "step 9 was asked for, but './step_9/trainer' is not a complete checkpoint: './step_9/trainer' is no",
        ),
        (-1, None, "-1 is no number of a step: give one from 0 to "),
        (
            None,
            1,
            "rank 0 has chosen the checkpoint './step_2/trainer', but rank 1 sees no .metadata there: keep checkpoints "
            "in a directory that all ranks share",
        ),
        (1, 1, "rank 0 has chosen the checkpoint './step_1/trainer', but rank 1 sees no .metadata there: "),
    ],
)
def test_all_ranks_refuse_with_one_sentence(
    ranks: RankPool, trained: tuple[Path, StateDict], step: int | None, blind: int | None, sentence: str
) -> None:
    told = ranks.run(refused_on_rank, str(trained[0]), step, blind)

    assert told[0].startswith(sentence)
    assert told[1] == told[0]


def failed_on_rank(directory: str, spoil: Callable[[StateDict], None]) -> tuple[str, list[int], int]:
    """Load step 2 into a state that does not fit on rank 1."""
    state = Trainer(seed=99).state(**plain_state(0.0))
    if dist.get_rank() == 1:
        spoil(state)
    chosen = Chosen(step=2, path=f"{directory}/step_2/trainer", skipped={})
    with without_collector():
        try:
            load_step(state, chosen, wrapper())
        except LoadFailedError as error:
            return str(error), list(error.causes), state["counting"].alive
    return "nothing failed", [], 0


def add_a_key(state: StateDict) -> None:
    state["more"] = torch.ones(2)


def reshape(state: StateDict) -> None:
    state["weight"] = torch.ones(4, 3)


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (add_a_key, "RuntimeError: Missing key in checkpoint state_dict: more."),
        (
            reshape,
            "ValueError: Size mismatch between saved torch.Size([3, 4]) and current: torch.Size([4, 3]) for weight",
        ),
    ],
)
def test_a_state_that_does_not_fit_fails_on_all_ranks(
    ranks: RankPool, trained: tuple[Path, StateDict], spoil: Callable[[StateDict], None], cause: str
) -> None:
    found = ranks.run(failed_on_rank, str(trained[0]), spoil)

    for text, causes, alive in found:
        assert text.startswith(f"the checkpoint '{trained[0]}/step_2/trainer' could not be loaded on rank 1: {cause}")
        assert (causes, alive) == ([1], 0)


def saved(directory: Path, value: float) -> Path:
    save(plain_state(value), checkpoint_id=directory, no_dist=True)
    return directory


def test_without_a_process_group(tmp_path: Path) -> None:
    for step in (1, 2):
        saved(tmp_path / f"step_{step}", float(step))
    saved(tmp_path / "iter_0000009", 9.0)  # of Megatron
    state = plain_state(0.0)

    for asked, expected in ((None, 2), (1, 1)):
        chosen = choose_step(str(tmp_path), step=asked, wrapper=ALONE)
        assert chosen == Chosen(step=expected, path=f"{tmp_path}/step_{expected}", skipped={})
        with without_collector():
            load_step(state, chosen, ALONE)
            assert state["counting"].alive == 0
        assert differing(values(state), values(plain_state(float(expected)))) == []


def test_a_link_to_the_step_of_another_job_is_one(tmp_path: Path) -> None:
    saved(tmp_path / "other" / "step_8", 8.0)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "step_8").symlink_to(tmp_path / "other" / "step_8")

    chosen = choose_step(str(tmp_path / "mine"), wrapper=ALONE)

    assert chosen is not None
    assert chosen.step == 8


def test_there_is_no_step(tmp_path: Path) -> None:
    assert choose_step(str(tmp_path / "not there yet"), wrapper=ALONE) is None
    assert choose_step(str(tmp_path), wrapper=ALONE) is None
    (tmp_path / "step_3").mkdir()

    with logged() as texts:
        assert choose_step(str(tmp_path), wrapper=ALONE) is None

    assert texts == [
        f"the checkpoint {tmp_path}/step_3 is passed over: .metadata is missing: no save was finished in this directory"
    ]


def test_a_directory_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(ConfigurationError, match="cannot be listed: Not a directory"):
        choose_step(str(tmp_path / "file"), wrapper=ALONE)
    with pytest.raises(ConfigurationError, match="is not the name of one directory inside step_N"):
        choose_step(str(tmp_path), subdirectory="..", wrapper=ALONE)
    with pytest.raises(ConfigurationError, match=r"^no step can be chosen in 'x+': OSError: .*File name too long"):
        choose_step("x" * 1000, wrapper=ALONE)


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (shutil.rmtree, "AssertionError: metadata is None; global metadata read failed: "),
        (lambda path: (path / "__0_0.distcp").unlink(), "FileNotFoundError: "),
        (lambda path: os.truncate(path / "__0_0.distcp", 3000), ""),
    ],
    ids=["gone", "file_gone", "cut"],
)
def test_what_goes_wrong_afterwards_is_told_and_let_go(
    tmp_path: Path, damage: Callable[[Path], Any], cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = Chosen(step=1, path=str(saved(tmp_path / "step_1", 1.0)), skipped={})
    damage(tmp_path / "step_1")
    state = plain_state(0.0)

    with without_collector(), caplog.at_level(logging.CRITICAL):  # pytest would keep torch's message with its traceback
        with pytest.raises(LoadFailedError) as caught:
            load_step(state, chosen, ALONE)
        assert state["counting"].alive == 0

    assert str(caught.value).startswith(f"the checkpoint {chosen.path!r} could not be loaded on rank 0: {cause}")
    assert caught.value.__context__ is None


def test_missing_keys_may_be_allowed(tmp_path: Path) -> None:
    chosen = Chosen(step=1, path=str(saved(tmp_path / "step_1", 1.0)), skipped={})
    state = {**plain_state(0.0), "more": {"bias": torch.full((2,), 7.0)}}

    with pytest.raises(LoadFailedError, match=r"Missing key in checkpoint state_dict: more\.bias"):
        load_step(state, chosen, ALONE)
    with logged() as texts:
        load_step(state, chosen, ALONE, allow_missing=True)

    assert texts == [f"'more.bias' keeps its value: the checkpoint {chosen.path} does not have it"]
    assert torch.equal(state.pop("more")["bias"], torch.full((2,), 7.0))
    assert differing(values(state), values(plain_state(1.0))) == []


def test_an_error_tells_the_lowest_rank_and_how_many_others_and_is_plain_data() -> None:
    error = pickle.loads(pickle.dumps(LoadFailedError("/run/step_1", {5: "no", 3: "OSError: gone", 4: "no"})))

    assert str(error).startswith(
        "the checkpoint '/run/step_1' could not be loaded on rank 3: OSError: gone (and 2 more ranks). The "
    )
    assert isinstance(error, CheckpointException)
    assert isinstance(error, Exception)
    assert list(error.failures) == [3, 4, 5]
