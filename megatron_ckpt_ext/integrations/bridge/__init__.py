"""Megatron-Bridge: prepared saves in its own training loop, through ``checkpoint.custom_manager_class``.

One call on a configuration, before overrides are applied and ``pretrain`` is called:

    cfg = with_ckpt_ext(vanilla_gpt_pretrain_config())

Needs megatron-bridge, which nothing else of the package does.
"""

from megatron_ckpt_ext.integrations.bridge.config import CkptExtCheckpointConfig, with_ckpt_ext
from megatron_ckpt_ext.integrations.bridge.manager import PreparedCheckpointManager

__all__ = ["CkptExtCheckpointConfig", "PreparedCheckpointManager", "with_ckpt_ext"]
