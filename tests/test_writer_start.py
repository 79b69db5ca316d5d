"""When a writer process is started, and what it does to the GPU: nothing unless it must, and then only to its own."""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
import torch
from scenes import Scenes

from megatron_ckpt_ext.arguments import add_ckpt_ext_args
from megatron_ckpt_ext.compat.nvrx import open_cuda_device
from megatron_ckpt_ext.config import CkptExtConfig
from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.integrations.megatron_queue import worker_settings

pytest_plugins = ["guarantee_jobs"]


def test_there_is_no_writer_before_the_first_asynchronous_save(lives: tuple[Path, dict[str, Any]]) -> None:
    assert lives[1]["processes before the first save"] == []


def test_a_job_that_saves_nowhere_starts_no_writer() -> None:
    """Megatron starts it with ``--async-save`` alone, so a flag that brings our queue needs a place to save to."""
    arguments = add_ckpt_ext_args(ArgumentParser()).parse_args(["--async-save", "--ckpt-save-timeout", "60"])

    with pytest.raises(ConfigurationError, match="--save"):
        CkptExtConfig.from_args(arguments)


def test_a_writer_does_not_touch_cuda(scenes: Scenes) -> None:
    assert [cuda for _, cuda in scenes("two_requests")] == ["False", "False"]


def test_a_writer_that_needs_cuda_opens_its_own_device_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set_device", device)))
    monkeypatch.setattr(torch, "empty", lambda *_sizes, device: calls.append(("empty", device)))

    open_cuda_device(3)

    assert calls == [("set_device", 3), ("empty", "cuda:3")]


@pytest.mark.parametrize(
    ("devices", "shared_memory", "expected"), [(0, False, None), (8, False, 5), (4, False, 1), (8, True, None)]
)
def test_the_device_of_a_writer_is_that_of_its_trainer(
    monkeypatch: pytest.MonkeyPatch, devices: int, shared_memory: bool, expected: int | None
) -> None:
    """None where the trainer puts everything into shared memory."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setenv("LOCAL_RANK", "5")

    assert worker_settings(13, cpu_shm_mode=shared_memory).cuda_device == expected
