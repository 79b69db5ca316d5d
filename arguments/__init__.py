"""The command line flags, and nothing else; imported as `megatron_ckpt_ext.arguments`."""

from megatron_ckpt_ext.arguments.flags import add_ckpt_ext_args

__all__ = ["add_ckpt_ext_args"]
