"""One self-contained HTML page about the saves of a job; opens without a network."""

import base64
from collections.abc import Iterator, Sequence
from html import escape
from statistics import median

from megatron_ckpt_ext.examine.plots import Plot
from megatron_ckpt_ext.examine.saves import SaveFigures

__all__ = ["page_of", "remarks_of"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }
th { font-weight: 600; } td:last-child, th:last-child { text-align: left; } img { max-width: 100%; }
.remark { border-left: 4px solid #efb118; padding: .2rem .8rem; margin: .4rem 0; background: #fdf8ea; }
.wide { overflow-x: auto; } .quiet { color: #666; }
"""
_COLUMNS = (
    *("saved step", "ranks", "training waits, slowest rank (ms)", "median rank (ms)", "a training step (ms)"),
    *("object collectives", "other collectives", "MiB"),
)


def page_of(title: str, saves: Sequence[SaveFigures], plots: Sequence[Plot]) -> str:
    """Write the page. Pure; everything that comes from events is escaped.

    Args:
        title: of the page.
        saves: of ``saves_of``.
        plots: of ``plots_of``.
    """
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(sentence)}</p>" for sentence in _sentences(saves)),
        *_remarks(saves),
        *_images(plots),
        *_table(saves),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def remarks_of(saves: Sequence[SaveFigures]) -> list[tuple[str, list[int]]]:
    """Return each reason for which saves were not as asked for, and their steps."""
    found: dict[str, list[int]] = {}
    for save in saves:
        for remark in save.remarks:
            found.setdefault(remark, []).append(save.step)
    return list(found.items())


def _sentences(saves: Sequence[SaveFigures]) -> Iterator[str]:
    if not saves:
        yield "The events hold no save."
        return
    waits = [1000 * save.slowest for save in saves]
    silent = sum(not save.objects for save in saves)
    yield (
        f"{len(saves)} saves of {max(save.ranks for save in saves)} ranks, steps {saves[0].step} to {saves[-1].step}. "
        f"Training waited {median(waits):.0f} ms for a save (median of the slowest ranks), {max(waits):.0f} ms at most."
    )
    yield f"{silent} of {len(saves)} saves had no object collectives."
    if len({save.ranks for save in saves}) > 1:
        yield "Not every save has events of all ranks: ranks were killed, or files are missing."


def _remarks(saves: Sequence[SaveFigures]) -> Iterator[str]:
    yield "<h2>Rebuilt, or not as asked for</h2>"
    remarks = remarks_of(saves)
    if not remarks:
        yield '<p class="quiet">None.</p>'
    for remark, steps in remarks:
        more = f" and {len(steps) - 8} more" if len(steps) > 8 else ""
        named = ", ".join(map(str, steps[:8])) + more
        yield f'<div class="remark">{escape(remark)} <span class="quiet">(steps {named})</span></div>'


def _images(plots: Sequence[Plot]) -> Iterator[str]:
    for plot in plots:
        data = base64.b64encode(plot.png).decode()
        yield f'<h2>{escape(plot.title)}</h2><img alt="{escape(plot.title)}" src="data:image/png;base64,{data}">'


def _table(saves: Sequence[SaveFigures]) -> Iterator[str]:
    yield '<h2>Saves</h2><div class="wide"><table><tr>' + "".join(f"<th>{each}</th>" for each in _COLUMNS) + "</tr>"
    for save in saves:
        step = f"{save.step} (again)" if save.attempt else f"{save.step}"
        cells = (
            step,
            save.ranks,
            f"{1000 * save.slowest:.1f}",
            f"{1000 * median(save.blocking.values()):.1f}",
            "" if save.step_seconds is None else f"{1000 * save.step_seconds:.1f}",
            save.objects,
            save.others,
            f"{save.bytes / 2**20:.1f}",
        )
        yield "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>"
    yield "</table></div>"
