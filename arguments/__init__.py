"""The command line flags, and nothing else; imported as `megatron_ckpt_ext.arguments`."""

from megatron_ckpt_ext.arguments.flags import add_ckpt_ext_args
from megatron_ckpt_ext.arguments.manager_flags import add_manager_args

__all__ = ["add_ckpt_ext_args", "add_manager_args"]
