"""A training script's arguments as text, before anything parses them: the last of a flag wins, as in argparse."""

from collections.abc import Sequence

__all__ = ["has_flag", "is_megatrons", "last_value", "whole_number"]


def has_flag(words: Sequence[str], flag: str) -> bool:
    """Whether ``flag`` is there, in either of its two forms."""
    return any(word == flag or word.startswith(f"{flag}=") for word in words)


def is_megatrons(words: Sequence[str]) -> bool:
    """Whether these are arguments of Megatron's training loop, which needs one flag that other scripts hardly have."""
    return has_flag(words, "--micro-batch-size")


def last_value(words: Sequence[str], flag: str) -> str | None:
    """Return the value of the last ``--flag value`` or ``--flag=value``.

    Returns:
        ``None`` where the flag is not there; an empty text where no value stands behind it.
    """
    found = None
    for at, word in enumerate(words):
        if word.startswith(f"{flag}="):
            found = word.partition("=")[2]
        elif word == flag:
            behind = words[at + 1] if at + 1 < len(words) else "--"
            found = "" if behind.startswith("--") else behind
    return found


def whole_number(words: Sequence[str], flag: str, default: int | None) -> int | None:
    """Return the value of a flag that is a number of something; ``None`` if it is none, which its parser will say."""
    value = last_value(words, flag)
    if value is None:
        return default
    return int(value) if value.isdecimal() and int(value) > 0 else None
