"""A write that takes longer than the training of these jobs; the writer process imports it."""

import time
from typing import Any

__all__ = ["slowly"]

LONGER_THAN_TRAINING_SECONDS = 3.0


def slowly(write: Any, *args: Any, **options: Any) -> Any:
    time.sleep(LONGER_THAN_TRAINING_SECONDS)
    return write(*args, **options)
