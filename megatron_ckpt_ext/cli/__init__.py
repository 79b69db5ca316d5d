"""The ``megatron-ckpt`` command: one module for each subcommand, none of which imports torch before it has to."""
