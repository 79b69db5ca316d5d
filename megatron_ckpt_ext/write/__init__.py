"""Writing in the background."""
