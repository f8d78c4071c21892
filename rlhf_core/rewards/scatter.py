"""Old and new rewards as a picture: no display, readable from ten points to a million.

Few distinct points are discs whose area is the number of samples there (rewards of 0 and 1 would hide each other); many are
hexagons, their colour the logarithm of that number. Points on the dashed line did not change.
"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_DISCS = 2000  # distinct points
INCHES = 6.0
DOTS_PER_INCH = 120


def draw_scatter(old: NDArray[np.float64], new: NDArray[np.float64], old_name: str, new_name: str, title: str) -> bytes:
    """A PNG.

    Args:
        old: ``[N]`` rewards, of which there is at least one.
        new: ``[N]`` other rewards of the same samples.
        old_name: label of the x axis.
        new_name: label of the y axis.
        title: of the picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes a second, and must not look for a display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(INCHES, INCHES), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    points, counts = np.unique(np.stack([old, new], axis=1), axis=0, return_counts=True)
    limits = [_limits(old), _limits(new)]
    drawn = _discs(axes, points, counts) if len(points) <= MAX_DISCS else _hexagons(axes, old, new, limits)
    if len(points) > 1:
        figure.colorbar(drawn, ax=axes, label="samples", shrink=0.8)
    axes.axline((0, 0), slope=1, color="black", linewidth=0.8, linestyle="--", label="unchanged")
    axes.set(xlim=limits[0], ylim=limits[1])
    # $ begins a formula, and a name of the user's is none
    axes.set_xlabel(_plain(old_name))
    axes.set_ylabel(_plain(new_name))
    axes.set_title(_plain(title), fontsize="medium")
    axes.legend(loc="best", fontsize="small")
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    return image.getvalue()


def _discs(axes: Any, points: NDArray[np.float64], counts: NDArray[np.int64]) -> Any:
    from matplotlib.colors import LogNorm

    largest = int(counts.max())
    area = 12 + 600 * counts / largest if largest > 1 else np.full(len(counts), 18.0)
    shade = LogNorm(1, max(largest, 2))
    return axes.scatter(
        *points.T, s=area, c=counts, norm=shade, cmap="viridis_r", alpha=0.8, edgecolors="black", linewidths=0.3
    )


def _hexagons(axes: Any, old: NDArray[np.float64], new: NDArray[np.float64], limits: list[tuple[float, float]]) -> Any:
    extent = (*limits[0], *limits[1])
    return axes.hexbin(old, new, gridsize=60, bins="log", mincnt=1, cmap="viridis_r", extent=extent, linewidths=0)


def _limits(values: NDArray[np.float64]) -> tuple[float, float]:
    """A little more than all values."""
    low, high = float(values.min()), float(values.max())
    margin = 0.06 * (high - low) or 0.5 * max(abs(low), 1.0)
    low, high = low - margin, high + margin
    return (low, high) if math.isfinite(low) and math.isfinite(high) else (-1.0, 1.0)


def _plain(text: str) -> str:
    return text.replace("$", r"\$")
