"""Where checkpoints live: files that are renamed, or objects that a marker makes count."""
