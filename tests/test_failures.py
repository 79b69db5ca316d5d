"""The errors that end a save: catchable in every usual way, readable, the same on every rank, and plain data."""

import copy
import pickle
import pickletools
from typing import Any

import pytest
from ranks import RankError, RankPool
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ckpt_ext.commit.failures import (
    MetadataReuseError,
    PublishFailedError,
    SaveFailedError,
    WriteFailedError,
)
from megatron_ckpt_ext.errors import CkptExtError, ConfigurationError, PreparedFileError

CAUSES = {3: "OSError: no space left on device", 1: "ValueError: what a rank held was lost"}
KINDS = [(WriteFailedError, "write"), (MetadataReuseError, "metadata_reuse")]


class _HandleError(Exception):
    """An error that cannot cross a process."""

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle a handle")


@pytest.mark.parametrize(("error_type", "kind"), KINDS, ids=[kind for _, kind in KINDS])
def test_the_text_names_kind_ranks_and_causes_in_order(error_type: type[SaveFailedError], kind: str) -> None:
    error = error_type(CAUSES)

    assert str(error) == (
        f"checkpoint save failed ({kind}), nothing was published. "
        "rank 1: ValueError: what a rank held was lost; rank 3: OSError: no space left on device"
    )
    assert error.kind == kind
    assert error.causes == CAUSES


@pytest.mark.parametrize("base", [CkptExtError, CheckpointException, Exception, SaveFailedError])
@pytest.mark.parametrize(("error_type", "kind"), KINDS, ids=[kind for _, kind in KINDS])
def test_every_usual_except_clause_catches_it(
    error_type: type[SaveFailedError], kind: str, base: type[BaseException]
) -> None:
    with pytest.raises(base):
        raise error_type(CAUSES)


def test_code_written_for_torch_finds_the_failures() -> None:
    failures = WriteFailedError(CAUSES).failures

    assert {rank: str(error) for rank, (error, _) in failures.items()} == CAUSES
    assert "(RANK 3)\nRuntimeError: OSError: no space left on device" in CheckpointException.__str__(
        WriteFailedError(CAUSES)
    )


@pytest.mark.parametrize("copied", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_it_crosses_a_process_whole(copied: Any) -> None:
    error = copied(MetadataReuseError(CAUSES))

    assert type(error) is MetadataReuseError
    assert error.causes == CAUSES
    assert str(error) == str(MetadataReuseError(CAUSES))


def test_its_pickle_is_plain_data() -> None:
    error = WriteFailedError(CAUSES)
    try:
        raise error from _HandleError("the cause stays in its process")
    except WriteFailedError as raised:
        content = pickle.dumps(raised, protocol=2)

    names = {argument for opcode, argument, _ in pickletools.genops(content) if opcode.name == "GLOBAL"}
    assert names == {"megatron_ckpt_ext.commit.failures WriteFailedError"}


def test_a_late_failure_does_not_claim_that_nothing_was_published() -> None:
    text = str(PublishFailedError({0: "publishing failed: OSError: no space left on device"}))

    assert text == (
        "checkpoint save failed (publish), verify_checkpoint tells whether it is complete, and the tracker may not "
        "name it. rank 0: publishing failed: OSError: no space left on device"
    )


def test_no_causes_is_still_an_error_with_a_text() -> None:
    assert str(WriteFailedError({})).startswith("checkpoint save failed (write), nothing was published.")


def _fail_on_rank() -> None:
    raise WriteFailedError(CAUSES)


def test_it_reads_the_same_on_every_rank(ranks: RankPool) -> None:
    outcomes = ranks.run_expecting_failure(_fail_on_rank)

    errors = [outcome for outcome in outcomes if isinstance(outcome, RankError)]
    assert [error.type_name for error in errors] == ["megatron_ckpt_ext.commit.failures.WriteFailedError"] * 2
    assert {error.message for error in errors} == {str(WriteFailedError(CAUSES))}


def test_configuration_and_file_errors_are_value_errors() -> None:
    for error_type in (ConfigurationError, PreparedFileError):
        assert issubclass(error_type, CkptExtError) and issubclass(error_type, ValueError)
    assert not issubclass(CkptExtError, ValueError)
