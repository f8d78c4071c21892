"""A placement as a table, for ``rlhf config check``.

::

    slot  GPU  CPU  engine        policy        reference
    0       1    3  engine-0 1/3  policy-0 1/3  reference-0 1/3
    1       1    3  engine-1 1/3  policy-1 1/3  reference-1 1/3

One row a slot; fractions are shares of its GPU. Of a long row of equals the middle is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.cluster.placement import LIGHT_CPUS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rlhf_core.cluster.placement import Node, Placement, Slot

MOST_EQUALS = 4  # rows in full


def slot_table(placement: Placement, light: Sequence[str] = ()) -> list[str]:
    """Its lines. ``light``: workers outside the slots."""
    roles = [role for role, count in placement.counts.items() if count]
    head = ["slot", *(["GPU"] if placement.device == "gpu" else []), "CPU", *roles]
    rows = [head, *_rows(placement, roles)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    numbers = len(head) - len(roles)
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if 0 < column < numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    if any(group.on_one_node for group in placement.groups):
        size = len(placement.groups[0].slots)
        lines.append(f"every {size} slots of an engine on one node, its vLLM workers one a slot")
    if light:
        lines.append(f"outside the slots: {', '.join(light)}, {LIGHT_CPUS:g} CPU each")
    return lines


def cluster_line(nodes: Sequence[Node]) -> str:
    """What there is: nodes of a kind together."""
    kinds: dict[tuple[float, float], int] = {}
    for node in nodes:
        kinds[node.cpus, node.gpus] = kinds.get((node.cpus, node.gpus), 0) + 1
    listed = []
    for (cpus, gpus), count in kinds.items():
        with_gpus = f" and {gpus:g} GPU" if gpus else ""
        listed.append(f"{count} node{'s' if count > 1 else ''} of {cpus:g} CPU{with_gpus}")
    return " + ".join(listed)


def _rows(placement: Placement, roles: Sequence[str]) -> Iterator[list[str]]:
    slots = placement.slots
    shapes = [_shape(slot) for slot in slots]
    start = 0
    while start < len(slots):
        end = next((index for index in range(start, len(slots)) if shapes[index] != shapes[start]), len(slots))
        shown = range(start, end)
        if len(shown) <= MOST_EQUALS:
            yield from (_row(placement, roles, index) for index in shown)
        else:
            first, last = _row(placement, roles, start), _row(placement, roles, end - 1)
            yield first
            yield ["…" if cell else "" for cell in first]
            yield last
        start = end


def _shape(slot: Slot) -> tuple[object, ...]:
    """The same for slots that differ in their numbers only."""
    return slot.gpus, slot.cpus, tuple(name.rpartition("-")[0] for name in slot.shares)


def _row(placement: Placement, roles: Sequence[str], index: int) -> list[str]:
    slot = placement.slots[index]
    by_role = {name.rpartition("-")[0]: _cell(name, slot) for name in slot.shares}
    gpus = [f"{slot.gpus}"] if placement.device == "gpu" else []
    return [str(index), *gpus, f"{slot.cpus:g}", *(by_role.get(role, "") for role in roles)]


def _cell(name: str, slot: Slot) -> str:
    sharing = len(slot.shares)
    return name if sharing == 1 or not slot.gpus else f"{name} 1/{sharing}"
