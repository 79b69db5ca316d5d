"""Checkpoints of a trainer that is not Megatron's."""
