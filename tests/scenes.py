"""What scenarios over one queue found, and a judge of what they saved."""

from pathlib import Path
from typing import Any

from workload import assert_holds


class Scenes:
    """What the scenarios of one queue found, on two ranks."""

    def __init__(self, directory: Path, by_rank: list[Any]) -> None:
        self._directory = directory
        self._by_rank = by_rank

    def __call__(self, name: str) -> list[Any]:
        """Of each rank, after every checkpoint of the scenario was found to hold what was saved."""
        found = [rank[name][0] for rank in self._by_rank]
        for each in found:
            assert not (isinstance(each, str) and each.startswith("Traceback")), each
        for saved in self._by_rank[0][name][1]:
            assert_holds(self._directory / name / saved, [rank[name][1][saved] for rank in self._by_rank])
        return found

    def alike(self, name: str) -> Any:
        """What both ranks found."""
        first, second = self(name)
        assert first == second, (first, second)
        return first
