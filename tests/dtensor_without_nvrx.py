"""One rank of a job in an environment without NVRx: ``python dtensor_without_nvrx.py RANK WORLD_SIZE DIRECTORY``.

Prints one JSON line of what it saw.
"""

import json
import logging
import sys

sys.modules["nvidia_resiliency_ext"] = None  # type: ignore[assignment]  # how Python marks what cannot be imported

import torch.distributed as dist  # noqa: E402
from dtensor_jobs import SAVE, Trainer, reusing, saved  # noqa: E402

from megatron_ckpt_ext.strategy.fsdp_dtensor import FsdpDtensorSaver  # noqa: E402


class Heard(logging.Handler):
    """Keeps warnings; that of ``workload`` comes with Megatron's strategy, which needs NVRx."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def main(rank: int, world_size: int, directory: str) -> None:
    store = dist.FileStore(f"{directory}/store", world_size)  # type: ignore[attr-defined]  # public, not re-exported
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    file = f"{directory}/prepared.metadata"
    trainer = Trainer(seed=5)
    warnings = Heard()
    logging.getLogger("megatron_ckpt_ext").addHandler(warnings)
    with FsdpDtensorSaver(ckpt_metadata_create_path=file) as saver:
        seen = [saved(saver, f"{directory}/step_1", trainer.state())]
    with FsdpDtensorSaver(prepared_metadata=reusing(file), async_save=False) as saver:
        seen.append(saved(saver, f"{directory}/step_2", trainer.state()))
    found = {
        "kinds": [each.kind for each in seen],
        "how": [each.how for each in seen],
        "save": [each.counts[SAVE] for each in seen],
        "warnings": warnings.messages,
        "nvrx": [
            name for name, module in sys.modules.items() if name.startswith("nvidia_resil") and module is not None
        ],
    }
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
