"""What cannot work whatever the script does: ranks that do not fit the nodes, checkpoints without a directory.

Pure decisions on the arguments as text; each returns the sentence for the operator, or nothing. They refuse only what
Megatron refuses later, on every rank and after minutes, and what trains for days and saves nothing.
"""

from collections.abc import Mapping, Sequence
from math import prod

from megatron_ckpt_ext.cli.words import has_flag, last_value, whole_number

__all__ = ["gpus_refusal", "nodes_refusal", "parallelism_refusal", "save_refusal"]

MODEL_PARALLEL = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")
"""Their product is how many ranks hold one copy of the model."""
NEED_A_DIRECTORY = ("--ckpt-metadata", "--ckpt-metadata-create", "--save-interval", "--async-save")


def gpus_refusal(ranks: int, gpus: int) -> str | None:
    """Refuse more ranks than this node has GPUs; 0 GPUs say nothing: the script may train on the CPU."""
    if gpus and ranks > gpus:
        return f"{ranks} ranks were asked for on this node, which has {gpus} GPUs: give --nproc {gpus} or less."
    return None


def nodes_refusal(nodes: str, environment: Mapping[str, str]) -> str | None:
    """Refuse a number of nodes that a Slurm job does not have; a range, as in ``1:4``, may come to any."""
    allocated = environment.get("SLURM_JOB_NUM_NODES")
    if allocated is None or not nodes.isdecimal() or int(nodes) <= int(allocated):
        return None
    return f"--nnodes {nodes} was given, and this Slurm job has {allocated} nodes: submit it with --nodes={nodes}."


def parallelism_refusal(words: Sequence[str], world: int) -> str | None:
    """Refuse a number of ranks that Megatron cannot divide among copies of the model, or a batch among these."""
    sizes = {flag: whole_number(words, flag, 1) for flag in MODEL_PARALLEL}
    known = [size for size in sizes.values() if size]
    if len(known) < len(sizes):
        return None
    copy = prod(known)
    said = ", ".join(f"{flag} {size}" for flag, size in sizes.items() if size != 1)
    if world % copy:
        return (
            f"one copy of the model takes {copy} ranks ({said}), and {world} ranks were asked for: "
            f"give a multiple of {copy}."
        )
    micro, whole = (whole_number(words, f"--{name}-batch-size", 0) for name in ("micro", "global"))
    if not micro or not whole or has_flag(words, "--rampup-batch-size"):
        return None
    step = micro * (world // copy)
    if whole % step:
        return (
            f"--global-batch-size {whole} is no multiple of {step}, which is --micro-batch-size {micro} times the "
            f"{world // copy} copies of the model on {world} ranks: change one of the three."
        )
    return None


def save_refusal(words: Sequence[str]) -> str | None:
    """Refuse checkpoints that are asked for and have no directory: such a job trains, and saves nothing.

    Other scripts than Megatron's, which cannot train without ``--micro-batch-size``, may have such flags and no --save.
    """
    directory = last_value(words, "--save")
    if directory == "":
        return "--save has no directory behind it, so nothing would be saved: name one, or leave --save out."
    asked = next((flag for flag in NEED_A_DIRECTORY if has_flag(words, flag)), None)
    if directory is None and asked and has_flag(words, "--micro-batch-size"):
        return f"{asked} was given without --save, so nothing would be saved: add --save DIRECTORY."
    return None
