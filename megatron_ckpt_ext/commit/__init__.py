"""Agreeing on the outcome of a save: every rank publishes, or every rank raises the same error."""
