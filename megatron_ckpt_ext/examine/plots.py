"""Plots of the saves of a job, as PNG. Needs matplotlib."""

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_ckpt_ext.errors import ConfigurationError
from megatron_ckpt_ext.examine.saves import BLOCKING, SaveFigures

__all__ = ["Plot", "plots_of"]

_SIZE, _DPI = (8.5, 3.4), 110
_COLORS = {
    "plan": "#4269d0", "stage": "#efb118", "fence": "#ff725c", "commit": "#6cc5b0",
    "write": "#9c6b4e", "publish": "#97bbf5",
}  # fmt: skip


class Plot(NamedTuple):
    """A picture."""

    name: str
    """For a file."""
    title: str
    """For people."""
    png: bytes
    """The picture."""


def plots_of(saves: Sequence[SaveFigures]) -> list[Plot]:
    """Draw what is to be seen at a glance. No collectives.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            "a report needs matplotlib, which is not installed: pip install 'megatron-ckpt-ext[plot]'"
        ) from error
    drawings = (
        ("waits", "How long training waits for each save", _blocking),
        ("steps", "The same beside the time of a training step", _beside_steps),
        ("ranks", "The same by rank", _by_rank),
        ("collectives", "Collectives of each save", _collectives),
    )
    found = []
    for name, title, draw in drawings:
        figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
        axes = figure.subplots()
        draw(axes, saves)
        axes.spines[["top", "right"]].set_visible(False)
        image = io.BytesIO()
        figure.savefig(image, format="png")
        found.append(Plot(name, title, image.getvalue()))
    return found


def _label(axes: Any, saves: Sequence[SaveFigures]) -> range:
    """Name the saves below the axis, as many as can be read."""
    places = range(len(saves))
    every = max(1, -(-len(saves) // 12))
    axes.set_xticks(places[::every], [str(save.step) for save in saves[::every]])
    axes.set_xlabel("step")
    return places


def _blocking(axes: Any, saves: Sequence[SaveFigures]) -> None:
    places, height = _label(axes, saves), [0.0] * len(saves)
    for phase in (each.value for each in BLOCKING):
        part = [1000 * max(save.phases.get(phase, {}).values(), default=0.0) for save in saves]
        if any(part):
            axes.bar(places, part, bottom=height, label=phase, color=_COLORS[phase])
            height = [below + more for below, more in zip(height, part, strict=True)]
    axes.set_ylabel("ms, slowest rank of each phase")
    axes.legend(frameon=False)


def _by_rank(axes: Any, saves: Sequence[SaveFigures]) -> None:
    ranks = sorted({rank for save in saves for rank in save.blocking})
    grid = [[1000 * save.blocking.get(rank, float("nan")) for save in saves] for rank in ranks]
    image = axes.imshow(grid, aspect="auto", interpolation="nearest", cmap="viridis")
    _label(axes, saves)
    every = max(1, len(ranks) // 12)
    axes.set_yticks(range(len(ranks))[::every], [str(rank) for rank in ranks[::every]])
    axes.set_ylabel("rank")
    axes.figure.colorbar(image, ax=axes, label="ms")


def _collectives(axes: Any, saves: Sequence[SaveFigures]) -> None:
    places = _label(axes, saves)
    objects = [save.objects for save in saves]
    axes.bar(places, objects, label="of objects", color="#ff725c")
    axes.bar(places, [save.others for save in saves], bottom=objects, label="others", color="#4269d0")
    axes.set_ylabel("calls of a rank")
    axes.legend(frameon=False)


def _beside_steps(axes: Any, saves: Sequence[SaveFigures]) -> None:
    places = _label(axes, saves)
    axes.plot(places, [1000 * save.slowest for save in saves], "o-", label="save, slowest rank", color="#ff725c")
    known = [(at, 1000 * save.step_seconds) for at, save in enumerate(saves) if save.step_seconds is not None]
    axes.plot([at for at, _ in known], [ms for _, ms in known], "o-", label="training step", color="#4269d0")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("ms")
    axes.legend(frameon=False)
