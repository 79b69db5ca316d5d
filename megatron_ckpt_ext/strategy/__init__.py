"""The save strategies that Megatron calls."""
