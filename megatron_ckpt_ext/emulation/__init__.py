"""CPU emulation: lets an unmodified Megatron training script run on machines without CUDA.

A tool for tests and laptops, never for speed. It is off unless asked for, refuses to be switched on where
CUDA works, and every name it replaces is put back when it is left. One file for each thing that is emulated:

* ``device_names``: what a ``cuda`` device, pinned memory and a ``torch.cuda.*`` tensor type mean;
* ``cuda_surface``: the functions and classes of ``torch.cuda``;
* ``fused_adam``: the optimizer that Megatron takes from Transformer Engine or Apex;
* ``cpu``: the switch that puts them in place and removes them.
"""

from megatron_ckpt_ext.emulation.cpu import CpuEmulation, CudaWorksError, refuse_where_cuda_works

__all__ = ["CpuEmulation", "CudaWorksError", "refuse_where_cuda_works"]
