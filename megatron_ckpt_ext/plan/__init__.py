"""Deciding what this rank writes. No collectives."""
