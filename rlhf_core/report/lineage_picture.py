"""The graph of a run's lineage as SVG with real text: ``lineage.graph`` says what stands in it, and where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from rlhf_core.lineage.graph_picture import box_size, layout

if TYPE_CHECKING:
    from rlhf_core.lineage.graph import Graph

UNITS = 112.0  # of the drawing, to an inch of the layout: its characters are 7.6 wide then, room for a font of 12
LINE = 17.9  # from one line to the next


def lineage_svg(graph: Graph) -> Markup:
    """Boxes with what went in on the left, what came out on the right."""
    places, width, height = layout(graph)
    wide, tall = width * UNITS, height * UNITS
    parts = []
    for (source, target), label in graph.arrows.items():
        size = box_size(graph.boxes[source])
        start = ((places[source][0] + size[0]) * UNITS, (height - places[source][1]) * UNITS)
        end = (places[target][0] * UNITS, (height - places[target][1]) * UNITS)
        parts.append(
            f'<line class="arrow" x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0] - 7:.1f}" y2="{end[1]:.1f}"/>'
        )
        if label:
            x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2 - 4
            parts.append(f'<text class="told" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(label)}</text>')
    for key, box in graph.boxes.items():
        (left, middle), (box_wide, box_tall) = places[key], box_size(box)
        x, y = left * UNITS, (height - middle - box_tall / 2) * UNITS
        parts.append(
            f'<rect class="box-{box.shape}" x="{x:.1f}" y="{y:.1f}" width="{box_wide * UNITS:.1f}" '
            f'height="{box_tall * UNITS:.1f}" rx="6"/>'
        )
        for number, line in enumerate(box.lines):
            bold = ' font-weight="600"' if number == 0 else ""
            parts.append(
                f'<text x="{x + 13:.1f}" y="{y + 13 + (number + 0.72) * LINE:.1f}"{bold}>{escape(line)}</text>'
            )
    arrow = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="1" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="tip" d="M0,0 L8,4 L0,8 z"/></marker></defs>'
    )
    return Markup(
        f'<svg class="lineage" viewBox="0 0 {wide:.0f} {tall:.0f}" width="{wide:.0f}" height="{tall:.0f}" role="img" '
        f'aria-label="Lineage of the run"><title>Lineage of the run</title>{arrow}{"".join(parts)}</svg>'
    )
