"""The errors of the package that need no torch; those that end a save are in ``commit.failures``.

Every message says what was asked, what was found and what to do, so that it can be shown to an operator as it is.
"""

__all__ = ["CkptExtError", "ConfigurationError", "PreparedFileError"]


class CkptExtError(Exception):
    """Base of every error that this package raises itself."""


class ConfigurationError(CkptExtError, ValueError):
    """Flags or settings that cannot work together, or that do not fit the environment."""


class PreparedFileError(CkptExtError, ValueError):
    """A prepared metadata file that cannot be used: missing, damaged, hostile, or made for another job."""
