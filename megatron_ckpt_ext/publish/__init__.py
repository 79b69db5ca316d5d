"""Making things appear whole or not at all."""
