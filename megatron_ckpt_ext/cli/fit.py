"""What cannot work whatever the script does: ranks that do not fit the nodes, checkpoints without a directory.

Pure decisions on the arguments as text; each returns the sentence for the operator, or nothing. They refuse only what
Megatron refuses later, on every rank and after minutes, and what trains for days and saves nothing.
"""

from collections.abc import Mapping, Sequence
from math import prod

from megatron_ckpt_ext.cli.words import has_flag, is_megatrons, last_value, whole_number

__all__ = ["gpus_refusal", "nodes_refusal", "parallelism_refusal", "save_refusal"]

MODEL_PARALLEL = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")
"""Their product is how many ranks hold one copy of the model."""
EXPERT_PARALLEL = ("--expert-tensor-parallel-size", "--expert-model-parallel-size", "--pipeline-model-parallel-size")
"""Their product is how many ranks hold one copy of the experts; the first is that of the rest where it is left out."""
SET_ELSEWHERE = ("--yaml-cfg", "--use-checkpoint-args", "--tensor-parallel-num-weight-shards")
"""With one of these the sizes are not, or not only, those of the flags."""
BATCH_VARIES = ("--rampup-batch-size", "--step-batch-size-schedule", "--decrease-batch-size-if-needed")
"""With one of these the batch need not be a multiple."""
NEED_A_DIRECTORY = ("--ckpt-metadata", "--ckpt-metadata-create", "--save-interval", "--async-save")


def gpus_refusal(words: Sequence[str], ranks: int, gpus: int) -> str | None:
    """Refuse more ranks of a Megatron job than this node has GPUs: each takes the one of its number.

    0 GPUs say nothing, the job may be started for a node that has some; and other scripts may train on the CPU.
    """
    if gpus and ranks > gpus and is_megatrons(words):
        return f"{ranks} ranks were asked for on this node, which has {gpus} GPUs: give --nproc {gpus} or less."
    return None


def nodes_refusal(nodes: str, environment: Mapping[str, str]) -> str | None:
    """Refuse more nodes than a Slurm job has.

    Fewer may be meant. A range, as in ``1:4``, may come to any number, and of a heterogeneous job Slurm only says how
    many nodes one part of it has.
    """
    allocated = environment.get("SLURM_JOB_NUM_NODES", "")
    if "SLURM_HET_SIZE" in environment or not allocated.isdecimal() or not nodes.isdecimal():
        return None
    if int(nodes) <= int(allocated):
        return None
    return f"--nnodes {nodes} was given, and this Slurm job has {allocated} nodes: submit it with --nodes={nodes}."


def parallelism_refusal(words: Sequence[str], world: int) -> str | None:
    """Refuse a number of ranks that Megatron cannot divide among copies of the model, or a batch among these."""
    if any(has_flag(words, flag) for flag in SET_ELSEWHERE):
        return None
    copy = _product(words, MODEL_PARALLEL)
    if copy is None:
        return None
    return (
        _ranks_refusal("the model", MODEL_PARALLEL, words, world)
        or _ranks_refusal("the experts", EXPERT_PARALLEL, words, world)
        or _batch_refusal(words, world, copies=world // copy)
    )


def _ranks_refusal(whose: str, flags: Sequence[str], words: Sequence[str], world: int) -> str | None:
    """Refuse ranks that are no multiple of what one copy takes."""
    copy = _product(words, flags)
    if copy is None or world % copy == 0:
        return None
    said = ", ".join(f"{flag} {size}" for flag, size in _sizes(words, flags).items() if size != 1)
    return (
        f"one copy of {whose} takes {copy} ranks ({said}), and {world} ranks were asked for: give a multiple of {copy}."
    )


def _batch_refusal(words: Sequence[str], world: int, *, copies: int) -> str | None:
    """Refuse a batch that does not come to whole micro-batches, as many on each copy of the model."""
    micro, whole = (whole_number(words, f"--{name}-batch-size", 0) for name in ("micro", "global"))
    if not micro or not whole or whole % (micro * copies) == 0 or any(has_flag(words, flag) for flag in BATCH_VARIES):
        return None
    return (
        f"--global-batch-size {whole} is no multiple of {micro * copies}, which is --micro-batch-size {micro} times "
        f"the {copies} copies of the model on {world} ranks: change one of the three."
    )


def _sizes(words: Sequence[str], flags: Sequence[str]) -> dict[str, int | None]:
    """What the flags say; where the experts' tensor parallel size is left out, it is the other one."""
    tensor = whole_number(words, "--tensor-model-parallel-size", 1)
    defaults = {"--expert-tensor-parallel-size": tensor}
    return {flag: whole_number(words, flag, defaults.get(flag, 1)) for flag in flags}


def _product(words: Sequence[str], flags: Sequence[str]) -> int | None:
    """The product of the flags' sizes; ``None`` if one is no size, which Megatron's parser will say."""
    known = [size for size in _sizes(words, flags).values() if size]
    return prod(known) if len(known) == len(flags) else None


def save_refusal(words: Sequence[str]) -> str | None:
    """Refuse checkpoints that are asked for and have no directory: such a job trains, and saves nothing.

    Other scripts than Megatron's may have such flags and no --save.
    """
    directory = last_value(words, "--save")
    if directory == "":
        return "--save has no directory behind it, so nothing would be saved: name one, or leave --save out."
    asked = next((flag for flag in NEED_A_DIRECTORY if has_flag(words, flag)), None)
    if directory is None and asked and is_megatrons(words) and not has_flag(words, "--skip-train"):
        return f"{asked} was given without --save, so nothing would be saved: add --save DIRECTORY."
    return None
