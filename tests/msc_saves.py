"""Saves of a job whose checkpoints lie in a named profile. Functions named ``*_on_rank`` run inside a rank."""

import os
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.msc_utils import MultiStorageClientFeature
from workload import Job, StateDict, same, state, values


def save_and_load_on_rank(config: str, job: Job, seeds: list[int]) -> list[dict[str, Any]]:
    """Save one checkpoint a seed, load each with Megatron's own reader, and return this rank's values."""
    os.environ["MSC_CONFIG"] = config
    MultiStorageClientFeature.enable()
    try:
        strategy = job.strategy()
        return [_saved_and_loaded(strategy, f"{job.directory}/step_{seed}", seed) for seed in seeds]
    finally:
        MultiStorageClientFeature.disable()


def _saved_and_loaded(strategy: Any, directory: str, seed: int) -> dict[str, Any]:
    state_dict = state(seed)
    held = values(state_dict)
    # Megatron passes text; whoever passes a Path loses a slash of the URL.
    place = directory if seed % 2 else Path(directory)
    dist_checkpointing.save(state_dict, place, strategy, async_sharded_save=True).execute_sync()
    loaded = dist_checkpointing.load(state(0), directory)
    assert all(same(value, held[key]) for key, value in _pairs(state(0), loaded))
    return held


def _pairs(template: StateDict, loaded: StateDict) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, entry in template.items():
        if isinstance(entry, dict):
            found += _pairs(entry, loaded[name])
        elif isinstance(entry, ShardedTensor):
            found.append((f"{entry.key}@{list(entry.global_offset)}", loaded[name]))
        elif isinstance(entry, ShardedObject):
            found.append((entry.unique_key, loaded[name]))
    return found


def refused_on_rank(config: str, directory: str) -> str:
    """Save into a directory that the client's path mapping leads elsewhere."""
    os.environ["MSC_CONFIG"] = config
    MultiStorageClientFeature.enable()
    try:
        strategy = Job(directory=directory, create=f"{directory}.prepared").strategy()
        dist_checkpointing.save(state(1), directory, strategy, async_sharded_save=True)
    except ValueError as error:
        return str(error)
    finally:
        MultiStorageClientFeature.disable()
    return "saved"
