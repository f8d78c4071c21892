"""Functions as tools: what the policy is told of them, and what it may give them."""

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Literal

import pytest
from pydantic import Field

from rlhf_core.agents.tools.schema import make_tool
from rlhf_core.errors import ConfigError

pytestmark = pytest.mark.agents


class Lock:
    """No data."""


class Unit(Enum):
    METRE = "m"
    MILE = "mi"


@dataclass
class Point:
    x: int
    y: float = 0.0


@dataclass
class Tree:
    value: int
    left: "Tree | None" = None


def add(a: int, b: float = 1.5, title: str | None = None) -> float:
    """Add two numbers.

    The result is exact.

    Args:
        a: The first,
            of two.
        b: The second.
        title: Of the sum.

    Returns:
        Their sum.
    """
    return a + b


async def wait(seconds: float) -> None:
    """Wait.

    Args:
        seconds: How long.
    """


def parameters_of(function):
    return make_tool(function, "agent.tools").parameters


def test_hints_and_docstring_become_the_schema():
    tool = make_tool(add, "agent.tools")

    assert tool.schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.\n\nThe result is exact.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first, of two."},
                    "b": {"type": "number", "description": "The second.", "default": 1.5},
                    "title": {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "Of the sum."},
                },
                "required": ["a"],
            },
        },
    }


def test_an_async_function_is_a_tool_too():
    assert parameters_of(wait)["properties"]["seconds"] == {"type": "number", "description": "How long."}


def test_classes_enums_and_literals_are_written_out():
    def measure(start: Point, unit: Unit, marks: list[int], how: Literal["near", "far"], options: dict[str, bool]):
        """Measure.

        Args:
            start: Where.
            unit: In what.
            marks: Between.
            how: How.
            options: More.
        """

    found = parameters_of(measure)

    point = {"x": {"type": "integer"}, "y": {"type": "number", "default": 0.0}}
    assert "$defs" not in found
    assert found["properties"]["start"]["properties"] == point
    assert found["properties"]["unit"] == {"type": "string", "description": "In what.", "enum": ["m", "mi"]}
    assert found["properties"]["marks"] == {
        "type": "array",
        "description": "Between.",
        "items": {"type": "integer"},
    }
    assert found["properties"]["how"]["enum"] == ["near", "far"]
    assert found["properties"]["options"]["additionalProperties"] == {"type": "boolean"}


def test_a_type_that_holds_itself_keeps_its_reference():
    def plant(tree: Tree):
        """Plant.

        Args:
            tree: What.
        """

    found = parameters_of(plant)

    assert found["properties"]["tree"]["properties"]["left"]["anyOf"][0] == {"$ref": "#/$defs/Tree"}
    assert "Tree" in found["$defs"]


def test_a_description_may_stand_in_the_hint():
    def say(text: Annotated[str, Field(description="What.", max_length=3)]):
        """Say."""

    assert parameters_of(say)["properties"]["text"] == {"type": "string", "description": "What.", "maxLength": 3}


def test_a_parameter_may_have_any_name():
    def look(json: str, _model: int = 1, schema: str = "s", title: str = "t", default: str = "d"):
        """Look.

        Args:
            json: a
            _model: b
            schema: c
            title: d
            default: e
        """

    tool = make_tool(look, "agent.tools")

    assert list(tool.parameters["properties"]) == ["json", "_model", "schema", "title", "default"]
    assert tool.problems({"json": "x", "_model": "4"}) == ({"json": "x", "_model": 4}, "")


@pytest.mark.parametrize(
    ("arguments", "taken"),
    [
        ({"a": "3"}, {"a": 3}),  # pydantic's rules: text of a number is a number
        ({"a": 3.0, "b": 2}, {"a": 3, "b": 2.0}),
        ({"a": 1, "title": None}, {"a": 1, "title": None}),
    ],
)
def test_arguments_are_taken_by_the_rules_of_pydantic(arguments, taken):
    assert make_tool(add, "agent.tools").problems(arguments) == (taken, "")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "a: Field required"),
        ({"a": "three"}, "a: Input should be a valid integer, unable to parse string as an integer"),
        ({"a": 3.5}, "a: Input should be a valid integer, got a number with a fractional part"),
        ({"a": 1, "c": 2}, "c: Extra inputs are not permitted"),
        ({"b": None}, "a: Field required; b: Input should be a valid number"),
    ],
)
def test_wrong_arguments_are_named(arguments, problem):
    assert make_tool(add, "agent.tools").problems(arguments) == ({}, problem)


def test_what_is_nested_gets_its_class():
    def show(start: Point, unit: Unit = Unit.METRE):
        """Show.

        Args:
            start: Where.
            unit: In what.
        """

    found, _ = make_tool(show, "agent.tools").problems({"start": {"x": "1"}, "unit": "mi"})

    assert found == {"start": Point(1), "unit": Unit.MILE}


def without_docstring(a: int):
    pass


def without_hint(a):
    """Do.

    Args:
        a: This.
    """


def without_description(a: int, b: int):
    """Do.

    Args:
        a: This.
    """


def with_rest(*values: int):
    """Do.

    Args:
        values: These.
    """


def with_odd_type(a: Lock):
    """Do.

    Args:
        a: This.
    """


def with_unknown_type(a: "Unknown"):  # noqa: F821
    """Do.

    Args:
        a: This.
    """


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (without_docstring, "the tool without_docstring has no docstring"),
        (without_hint, "the tool without_hint has no type hint for 'a'"),
        (without_description, "the tool without_description does not describe 'b'"),
        (with_rest, r"the tool with_rest takes \*values: int"),
        (with_odd_type, "the tool with_odd_type has a parameter whose type has no JSON schema: "),
        (
            with_unknown_type,
            "the tool with_unknown_type has a type hint that cannot be read: name 'Unknown' is not defined",
        ),
        (Point, "is no function"),
        (7, "7 is no function"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_with_its_name(function, reason):
    with pytest.raises(ConfigError, match=f"agent.tools=x: .*({reason})"):
        make_tool(function, "agent.tools=x")
