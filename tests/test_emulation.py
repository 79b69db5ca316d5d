"""The CPU emulation: what CUDA names mean in it, that it cannot be on by mistake, and that it leaves nothing behind.

That a whole Megatron job trains and resumes in it is tested with the launcher.
"""

import sys
from collections.abc import Callable
from typing import Any

import megatron.core.optimizer
import pytest
import torch
from megatron.core.optimizer import distrib_optimizer

from megatron_ckpt_ext.compat.emulated import megatron_optimizer
from megatron_ckpt_ext.emulation import CpuEmulation, CudaWorksError
from megatron_ckpt_ext.emulation.cuda_surface import cuda_surface
from megatron_ckpt_ext.emulation.fused_adam import FusedAdam

OWNERS = (torch.cuda, torch.cuda.random, torch.accelerator, megatron.core.optimizer, distrib_optimizer)

needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the emulation is refused where CUDA works")


def names() -> list[dict[str, Any]]:
    """Every name of every module that the emulation touches."""
    return [dict(vars(owner)) for owner in OWNERS]


def test_every_replaced_name_exists() -> None:
    replaced = [*cuda_surface(), *megatron_optimizer(FusedAdam)]
    assert [name for owner, name, _ in replaced if not hasattr(owner, name)] == []


@needs_no_cuda
def test_every_name_is_put_back() -> None:
    before = names()
    with CpuEmulation():
        inside = names()
    after = names()
    assert all(old != new for old, new in zip(before, inside, strict=True))
    assert after == before
    with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|NVIDIA"):
        torch.zeros(1, device="cuda")


def test_refused_where_cuda_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = names()
    with pytest.raises(CudaWorksError, match="run without it"), CpuEmulation():
        pass
    assert names() == before


@needs_no_cuda
def test_refused_inside_itself() -> None:
    with CpuEmulation(megatron=False):
        with pytest.raises(CudaWorksError), CpuEmulation(megatron=False):
            pass
        assert torch.zeros(1, device="cuda").device.type == "cpu"


@needs_no_cuda
def test_a_megatron_that_does_not_import_leaves_torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(vars(torch.cuda))
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(ImportError), CpuEmulation():
        pass
    assert dict(vars(torch.cuda)) == before


@needs_no_cuda
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, device="cuda"),
        lambda: torch.zeros(2, device="cuda:1"),
        lambda: torch.zeros(2, device=torch.device("cuda", 1)),
        lambda: torch.zeros(2, device=torch.cuda.current_device()),
        lambda: torch.zeros(2).to("cuda"),
        lambda: torch.zeros(2).to(0),
        lambda: torch.zeros(2).to(device="cuda", dtype=torch.float16),
        lambda: torch.zeros(2, pin_memory=True),
        lambda: torch.zeros(2).pin_memory(),
        lambda: torch.zeros(2).cuda(non_blocking=True),
        lambda: torch.nn.Linear(2, 2, device="cuda").weight,
        lambda: torch.nn.Linear(2, 2).cuda(0).weight,
    ],
)
def test_cuda_devices_are_the_cpu(make: Callable[[], torch.Tensor]) -> None:
    with CpuEmulation(megatron=False):
        tensor = make()
        assert tensor.device.type == "cpu"
        assert not tensor.is_pinned()


@needs_no_cuda
def test_tensor_types_have_cuda_names() -> None:
    with CpuEmulation(megatron=False):
        tensor = torch.zeros(2, dtype=torch.bfloat16)
        assert tensor.type() == "torch.cuda.BFloat16Tensor"
        assert isinstance(tensor, torch.cuda.BFloat16Tensor)  # type: ignore[attr-defined]
        assert tensor.type("torch.cuda.FloatTensor").dtype == torch.float32
    assert tensor.type() == "torch.BFloat16Tensor"


@needs_no_cuda
def test_random_state_goes_around() -> None:
    with CpuEmulation(megatron=False):
        torch.cuda.manual_seed(7)
        state = torch.cuda.get_rng_state()
        first = torch.rand(3, device="cuda")
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(3, device="cuda"), first)
        torch.manual_seed(7)  # seeds the devices too, which must not come back here for ever
        assert torch.equal(torch.rand(3, device="cuda"), first)


@needs_no_cuda
def test_events_measure_time() -> None:
    with CpuEmulation(megatron=False):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            torch.ones(1000).sum()
        end.record(torch.cuda.current_stream())
        end.synchronize()
        assert 0 < start.elapsed_time(end) < 10_000


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_fused_adam_is_adam(adam_w_mode: bool) -> None:
    torch.manual_seed(1)
    ours = [torch.randn(5, 3, requires_grad=True), torch.randn(4, requires_grad=True)]
    theirs = [tensor.detach().clone().requires_grad_() for tensor in ours]
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    torch_adam = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    optimizers = [FusedAdam(ours, adam_w_mode=adam_w_mode, **options), torch_adam(theirs, **options)]
    for _ in range(5):
        for tensors, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            torch.autograd.backward([(tensor**3).sum() for tensor in tensors])
            optimizer.step()
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference)


def test_fused_adam_keeps_its_step_in_the_group() -> None:
    param = torch.ones(2, requires_grad=True)
    optimizer = FusedAdam([param])
    param.grad = torch.ones(2)
    optimizer.step()
    optimizer.step()
    state = optimizer.state_dict()
    assert state["param_groups"][0]["step"] == 2
    assert set(state["state"][0]) == {"exp_avg", "exp_avg_sq"}
