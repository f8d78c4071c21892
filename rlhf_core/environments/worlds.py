"""How each of Gymnasium's small worlds is told: its rules, its actions by number, what is seen, and when it is solved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class World:
    """One world in words."""

    actions: tuple[str, ...]  # in the order of their numbers
    rules: Callable[[Any], str]  # of the unwrapped environment
    tell: Callable[[Any, Any], str]  # of the unwrapped environment, and what it observed
    is_solved: Callable[[float], bool]  # of the last reward, once the world has ended
    has_maps: bool = False


def _lake_rules(env: Any) -> str:
    rows, columns = env.desc.shape
    slippery = " The ice is slippery: you may slide to a side." if _is_slippery(env) else ""
    return (
        f"You cross a frozen lake of {rows} by {columns} tiles: S is the start, F is ice, H is a hole, G is the goal; you "
        f"stand on the tile in brackets. Reach G without falling into a hole.{slippery}"
    )


def _is_slippery(env: Any) -> bool:
    return any(len(outcomes) > 1 for outcomes in env.P[0].values())


def _lake(env: Any, seen: int) -> str:
    return _grid([[tile.decode() for tile in row] for row in env.desc], int(seen))


def _cliff_rules(_: Any) -> str:
    return (
        "You walk along a cliff: o is ground, C is the cliff, T is where you want to go; you stand on the tile in brackets. "
        "Each step costs 1; falling off the cliff costs 100 and brings you back to the start."
    )


def _cliff(env: Any, seen: int) -> str:
    rows, columns = env.shape
    tiles = [["C" if env._cliff[row, column] else "o" for column in range(columns)] for row in range(rows)]
    tiles[-1][-1] = "T"
    return _grid(tiles, int(seen))


def _grid(tiles: list[list[str]], at: int) -> str:
    """Rows of tiles, the one at number ``at`` in brackets."""
    columns = len(tiles[0])
    return "\n".join(
        "".join(
            f"[{tile}]" if row * columns + column == at else f" {tile} " for column, tile in enumerate(of_row)
        ).rstrip()
        for row, of_row in enumerate(tiles)
    )


PLACES = ("R", "G", "Y", "B")  # Taxi's ranks, in the order of their numbers


def _taxi_rules(env: Any) -> str:
    tiles = "\n".join(b"".join(row).decode().replace(" ", ".") for row in env.desc[1:-1])
    return (
        "You drive a taxi on 5 by 5 tiles; rows are counted from the north, columns from the west, both from 0. Between two "
        f"tiles : is open and | is a wall:\n{tiles}\n"
        "Drive to the passenger, pick them up, drive to their destination and drop them off. Each step costs 1; a wrong "
        "pickup or dropoff costs 10, and 20 are earned at the end."
    )


def _taxi(env: Any, seen: int) -> str:
    row, column, passenger, destination = env.decode(int(seen))
    where = "in the taxi" if passenger == len(PLACES) else f"at {PLACES[passenger]}"
    return f"The taxi is at row {row}, column {column}. The passenger is {where}. The destination is {PLACES[destination]}."


def _blackjack_rules(_: Any) -> str:
    return (
        "You play Blackjack against a dealer: come nearer to 21 than they do without going over it. Face cards count 10, an "
        "ace 1 or 11."
    )


def _blackjack(_: Any, seen: Any) -> str:
    mine, dealer, ace = (int(value) for value in seen)
    return f"You hold {mine}{' with an ace that counts 11' if ace else ''}. The dealer shows {dealer}."


_LAKE = World(("left", "down", "right", "up"), _lake_rules, _lake, lambda reward: reward > 0, has_maps=True)
_CLIFF = World(("up", "right", "down", "left"), _cliff_rules, _cliff, lambda reward: reward > -100)
WORLDS: dict[str, World] = {
    "FrozenLake-v1": _LAKE,
    "FrozenLake8x8-v1": _LAKE,
    "CliffWalking-v1": _CLIFF,
    "CliffWalkingSlippery-v1": _CLIFF,
    "Taxi-v4": World(
        ("south", "north", "east", "west", "pickup", "dropoff"), _taxi_rules, _taxi, lambda reward: reward > 0
    ),
    "Blackjack-v1": World(("stand", "hit"), _blackjack_rules, _blackjack, lambda reward: reward > 0),
}
