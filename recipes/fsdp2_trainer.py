"""Trains a small model with FSDP2, saves every few steps, and goes on from the newest complete step when started again.

On GPUs where there are any, else on the CPU; as one process, under torchrun, or under ``megatron-ckpt run``:

    python recipes/fsdp2_trainer.py --directory run7 --ckpt.async-save --ckpt.keep-last 2
    torchrun --nproc-per-node 2 recipes/fsdp2_trainer.py --directory run7 --ckpt.async-save --ckpt.keep-last 2

Kill it whenever you like, start the same command again, and it trains on as if nothing had happened. ``--help`` lists
the flags. A trainer of your own needs the five lines with ``manager``.
"""

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_ckpt_ext import CheckpointManager, ManagerConfig
from megatron_ckpt_ext.arguments import add_manager_args

ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
"""What torchrun would set; port 0 is a free one."""


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width: int) -> None:
        """Build it for inputs of ``width`` numbers."""
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Add to the inputs."""
        outputs: torch.Tensor = inputs + self.layers(inputs)
        return outputs


class Training(Stateful):
    """All that a resumed job has to know: model, optimizer and schedule, sharded over all ranks."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        """Build the model, the same on all ranks, and shard it. Called on all ranks."""
        torch.manual_seed(options.seed)
        self.device = device
        self.width = options.width
        self.model = nn.Sequential(*(Block(options.width) for _ in range(options.layers))).to(device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in self.model:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.999)

    def state_dict(self) -> dict[str, Any]:
        """Return what is saved: a name does not depend on the number of ranks."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what was loaded."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.schedule.load_state_dict(state_dict["schedule"])

    def batch(self, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets: another batch in each step and on each rank, the same whenever a step is run."""
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        inputs = torch.randn(size, self.width, generator=generator)
        return inputs.to(self.device), inputs.flip(-1).to(self.device)


def train_step(training: Training, manager: CheckpointManager, step: int, batch_size: int) -> float:
    """Train one step; return the mean loss of all ranks."""
    inputs, targets = training.batch(step, batch_size)
    loss = nn.functional.mse_loss(training.model(inputs), targets)
    loss.backward()  # type: ignore[no-untyped-call]  # torch
    manager.wait_for_staging()  # the optimizer is about to change what may still be on its way to the host
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.schedule.step()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item()


def train(training: Training, manager: CheckpointManager, options: argparse.Namespace) -> None:
    """Load the newest complete step, if there is one, and train from there to the last one."""
    state = {"training": training}
    done = manager.load(state) or 0
    say(f"starts behind step {done}")
    for step in range(done + 1, options.steps + 1):
        began = time.perf_counter()
        loss = train_step(training, manager, step, options.batch_size)
        if step % options.save_interval == 0 or step == options.steps:
            manager.save(step, state)
        record(options, step, loss, seconds=time.perf_counter() - began)


def record(options: argparse.Namespace, step: int, loss: float, *, seconds: float) -> None:
    """Append step, exact loss and seconds of the step, its save included, to ``--losses``."""
    if options.losses and dist.get_rank() == 0:
        with open(options.losses, "a") as file:
            file.write(f"{step} {loss.hex()} {seconds:.6f}\n")


def say(text: str) -> None:
    """Print a line, once for the job."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def start() -> torch.device:
    """Join the other ranks, or be the only one; return the device to train on."""
    on_gpu = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if on_gpu:
        torch.cuda.set_device(local_rank)
    for name, value in ONE_RANK.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    return torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")


def parser() -> argparse.ArgumentParser:
    """Return the parser of all flags."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--directory", required=True, help="of the checkpoints; shared by all ranks")
    flags.add_argument("--steps", type=int, default=100, help="to train in all (%(default)s)")
    flags.add_argument("--save-interval", type=int, default=10, metavar="N", help="save every N steps (%(default)s)")
    flags.add_argument("--losses", metavar="FILE", help="append step, loss in hexadecimal, and seconds of each step")
    flags.add_argument("--width", type=int, default=256, help="of a layer (%(default)s)")
    flags.add_argument("--layers", type=int, default=4, help="of the model (%(default)s)")
    flags.add_argument("--batch-size", type=int, default=32, help="on each rank (%(default)s)")
    flags.add_argument("--lr", type=float, default=1e-3, help="in the first step (%(default)s)")
    flags.add_argument("--seed", type=int, default=1234, help="of the first weights (%(default)s)")
    return add_manager_args(flags, prefix="ckpt")


def main() -> None:
    """Train."""
    options = parser().parse_args()
    training = Training(options, start())
    config = ManagerConfig.from_args(options, prefix="ckpt")
    with CheckpointManager(
        options.directory, config=config, on_saved=lambda step: say(f"step {step} is durable")
    ) as manager:
        train(training, manager, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
