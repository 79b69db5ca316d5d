"""``with_ckpt_ext``: our settings in a Bridge configuration, where recipes, YAML and overrides find them."""

from dataclasses import dataclass, fields
from pydoc import locate
from typing import Any

from megatron.bridge.training.config import CheckpointConfig, ConfigContainer
from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix

from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.integrations.bridge.job import BridgeJob, take_over_queue
from megatron_ckpt_ext.integrations.bridge.manager import PreparedCheckpointManager

__all__ = ["CkptExtCheckpointConfig", "with_ckpt_ext"]

MANAGER = "megatron_ckpt_ext.integrations.bridge.PreparedCheckpointManager"


@dataclass(kw_only=True)
class CkptExtCheckpointConfig(CheckpointConfig):  # type: ignore[misc]  # Bridge is untyped
    """A ``CheckpointConfig`` with the settings of this package; made by ``with_ckpt_ext``.

    Attributes:
        job: the package in the job that this configuration describes.
    """

    custom_manager_class: str | None = MANAGER
    """Ours, or one derived from it; ``None`` leaves saves to Bridge."""
    ckpt_metadata: str | None = None
    """Path of the prepared metadata that saves follow."""
    ckpt_metadata_create: bool = False
    """Whether the first save makes it, unless one that fits is there."""
    ckpt_metadata_on_drift: str = "rebuild"
    """What a save does that does not match: ``"rebuild"`` it with all ranks, or ``"fail"``."""
    ckpt_save_timeout: float | None = None
    """Seconds that a save may go on without moving a byte; ``None``: 1800 where our queue is in charge."""
    ckpt_events: str | None = None
    """Path of the events file, without the rank."""

    def __post_init__(self) -> None:
        """Belong to no job yet."""
        super().__post_init__()
        self.job: BridgeJob | None = None

    def finalize(self) -> None:
        """Check all settings, as Bridge does with a configuration before it trains. No collectives.

        Raises:
            ConfigurationError: settings that cannot work together.
        """
        super().finalize()
        if self.custom_manager_class is None:
            self.job = None  # an operator's way to switch the package off
        elif not _is_ours(self.custom_manager_class):
            raise ConfigurationError(
                f"checkpoint.custom_manager_class is {self.custom_manager_class}, and saves of with_ckpt_ext need "
                f"{MANAGER}: derive yours from it, or leave one of the two out"
            )
        if self.job is not None:
            self.job.settle()

    def to_cfg_dict(self) -> dict[str, Any]:
        """Return what ``run_config.yaml`` keeps: Bridge's own settings, for one that lacks this package."""
        own = {field.name: getattr(self, field.name) for field in fields(CheckpointConfig)}
        if own["custom_manager_class"] == MANAGER:
            own["custom_manager_class"] = None
        stock = f"{CheckpointConfig.__module__}.{CheckpointConfig.__qualname__}"
        return {"_target_": stock, **own}


def with_ckpt_ext(container: ConfigContainer, **settings: Any) -> ConfigContainer:
    """Let a Bridge job save with this package. No collectives; call it on every rank before overrides are applied.

    ``container.checkpoint`` becomes a ``CkptExtCheckpointConfig``, so that overrides of its settings are not skipped as
    unknown keys; the package is put on Bridge's allow-list of targets; and the queue of asynchronous saves of such a
    job is ours. Configurations that did not come by here are left alone.

    Args:
        container: a configuration, of a recipe or built by hand. It is changed.
        **settings: values for ``container.checkpoint``.

    Returns:
        The same configuration.

    Raises:
        ConfigurationError: a setting that there is not.
    """
    register_allowed_target_prefix("megatron_ckpt_ext.")
    take_over_queue()
    known = {field.name for field in fields(CkptExtCheckpointConfig)}
    if unknown := sorted(set(settings) - known):
        raise ConfigurationError(f"checkpoint.{unknown[0]} was given, and there is no such setting: correct its name")
    before = container.checkpoint
    given = {field.name: getattr(before, field.name) for field in fields(before)}
    given["custom_manager_class"] = given["custom_manager_class"] or MANAGER
    container.checkpoint = CkptExtCheckpointConfig()
    for name, value in {**given, **settings}.items():
        setattr(container.checkpoint, name, value)  # not by the constructor, which turns the strategy to mcore
    container.checkpoint.job = BridgeJob(container)
    return container


def _is_ours(name: str) -> bool:
    """Whether a manager is ours, or derived from it; a name that cannot be imported is not."""
    manager = locate(name)
    return isinstance(manager, type) and issubclass(manager, PreparedCheckpointManager)
