"""Copies of a state dict in host memory: what a save writes while the trainer goes on."""
