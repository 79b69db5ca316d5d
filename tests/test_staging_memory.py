"""Which memory is staged into: how much is free, and how page-locked memory is packed. No GPU: the pages are a fake."""

from pathlib import Path

import pytest
import torch
from staged_states import every_kind, stage_twice

from megatron_ckpt_ext.staging.page_locked import SLAB, SMALL, PageLockedMemory
from megatron_ckpt_ext.staging.room import free_memory
from megatron_ckpt_ext.staging.stage import HostStager

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR")


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """A /proc and a /sys with 1000 KiB available."""
    texts = {"proc/meminfo": "MemTotal: 2000 kB\nMemAvailable: 1000 kB\n", "proc/self/cgroup": cgroup, **files}
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2_STAT = "anon 5\ninactive_file 100\nactive_file 20\n"
V1_STAT = "inactive_file 1\ntotal_inactive_file 100\ntotal_active_file 20\n"


def v2(folder: str, limit: str, used: int) -> dict[str, str]:
    return {
        f"sys/fs/cgroup/{folder}memory.max": f"{limit}\n",
        f"sys/fs/cgroup/{folder}memory.current": f"{used}\n",
        f"sys/fs/cgroup/{folder}memory.stat": V2_STAT,
    }


def v1(folder: str, limit: int, used: int) -> dict[str, str]:
    return {
        f"sys/fs/cgroup/memory/{folder}memory.limit_in_bytes": f"{limit}\n",
        f"sys/fs/cgroup/memory/{folder}memory.usage_in_bytes": f"{used}\n",
        f"sys/fs/cgroup/memory/{folder}memory.stat": V1_STAT,
    }


MACHINES: dict[str, tuple[str, dict[str, str], int]] = {
    "no_cgroup": ("0::/\n", {}, 1_024_000),
    "unlimited": ("0::/job\n", v2("job/", "max", 5), 1_024_000),
    "larger_than_the_machine": ("0::/job\n", v2("job/", "2000000", 5), 1_024_000),
    "limited": ("0::/job\n", v2("job/", "5000", 1000), 4120),
    "limited_further_up": ("0::/job/step\n", {**v2("job/", "5000", 1000), **v2("job/step/", "9000", 0)}, 4120),
    "container": ("0::/not/mounted\n", v2("", "5000", 1000), 4120),
    "over_its_limit": ("0::/\n", v2("", "5000", 6000), 0),
    "version_1": ("4:cpu:/x\n5:memory:/job\n0::/\n", v1("job/", 5000, 1000), 4120),
}


@pytest.mark.parametrize(("cgroup", "files", "free"), MACHINES.values(), ids=MACHINES)
def test_free_memory_is_what_machine_and_cgroups_leave(
    cgroup: str, files: dict[str, str], free: int, tmp_path: Path
) -> None:
    assert free_memory(machine(tmp_path, cgroup, files)) == free


def test_this_machine_has_free_memory() -> None:
    assert 1 << 20 < free_memory() < 1 << 50


class LockedPages:
    """Pages that are locked by nobody but this list."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.count = 0

    def lock(self, address: int, nbytes: int) -> None:
        assert address % 4096 == nbytes % 4096 == 0
        assert all(address + nbytes <= each or each + size <= address for each, size in self.locked.items())
        self.locked[address] = nbytes
        self.count += 1

    def unlock(self, address: int) -> None:
        del self.locked[address]


def test_page_locked_memory_is_packed() -> None:
    pages = LockedPages()
    memory = PageLockedMemory(pages)
    sizes = [4, 1, 63, SMALL - 1, SMALL, 3 * SMALL + 5, SLAB - 7, 5 * SLAB + 1] * 6
    tensors = [memory.allocate(size) for size in sizes]

    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == sizes
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
    for index, tensor in enumerate(tensors):
        tensor.fill_(index)
    assert all(bool((tensor == index).all()) for index, tensor in enumerate(tensors))
    assert sum(pages.locked.values()) <= 1.1 * sum(sizes)
    for tensor in tensors:
        memory.free(tensor)
    assert pages.locked == {}


def test_a_slab_is_unlocked_with_its_last_piece() -> None:
    pages = LockedPages()
    memory = PageLockedMemory(pages)
    first, second = memory.allocate(4), memory.allocate(4)
    memory.free(first)
    assert (pages.count, len(pages.locked)) == (1, 1)
    third = memory.allocate(4)
    assert third.data_ptr() not in (first.data_ptr(), second.data_ptr())
    memory.free(second)
    memory.free(third)
    assert pages.locked == {}
    memory.free(memory.allocate(4))
    assert pages.count == 2


def test_page_locked_memory_serves_a_stager() -> None:
    pages = LockedPages()
    stager = HostStager(allocator=PageLockedMemory(pages))

    assert stage_twice(stager, every_kind(torch.device("cpu"))) == []
    assert pages.count == 1
    stager.close()
    assert pages.locked == {}
