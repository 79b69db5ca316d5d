"""Deciding what each rank writes: from the prepared metadata without collectives, or together."""
