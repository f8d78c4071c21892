"""A Python function as a tool: what the policy is told of it, and the check of what the policy gives it.

::

    def add(a: int, b: int = 1) -> int:          {"type": "function", "function": {"name": "add",
        \"\"\"Add two numbers.                         "description": "Add two numbers.",
                                          ──▶      "parameters": {"type": "object", "properties": {
        Args:                                        "a": {"type": "integer", "description": "The first."},
            a: The first.                            "b": {"type": "integer", "description": "...", "default": 1}},
            b: The second.                         "required": ["a"]}}}
        \"\"\"

Types are pydantic's, and so are its rules of what is taken for what: ``"3"`` is an int, ``"three"`` is not.
"""

from __future__ import annotations

import inspect
import json
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAX_PROBLEMS = 5  # wrong arguments that one answer names
ORDER = ("type", "description", "enum", "properties", "required")  # in which people write a schema, and models read it
VALUES = ("default", "enum", "const")  # keys of a schema that hold values, which may look like a schema
_ONLY_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the policy may call."""

    name: str
    description: str
    parameters: dict[str, Any]  # JSON schema of the arguments
    function: Callable[..., Any]  # plain or async
    arguments: TypeAdapter[dict[str, Any]]
    limits_itself: bool = False  # it ends in time by its own means

    @property
    def schema(self) -> dict[str, Any]:
        """What chat templates and OpenAI clients call a tool."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def problems(self, arguments: Any) -> tuple[dict[str, Any], str]:
        """The arguments as the function gets them, and what is wrong with them; '' for nothing."""
        try:
            return self.arguments.validate_python(arguments), ""
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False, include_context=False)
            listed = [f"{'.'.join(map(str, one['loc'])) or 'arguments'}: {one['msg']}" for one in found[:MAX_PROBLEMS]]
            return {}, "; ".join(listed)


def make_tool(function: Any, place: str, *, limits_itself: bool = False) -> Tool:
    """The tool that a function is.

    Args:
        function: with type hints, and a docstring in Google's style that describes it and each parameter.
        place: what named it, for messages.
        limits_itself: see ``Tool``.

    Raises:
        ConfigError: it is no function, or something of it is missing or has no JSON schema.
    """
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        raise ConfigError(f"{place}: {function!r} is no function: name one that is written with def or async def")
    place = f"{place}: the tool {function.__name__}"
    description, documented = _described(function, place)
    fields = {
        name: _field(parameter, hint, documented.get(name), place)
        for name, (parameter, hint) in _parameters(function, place).items()
    }
    # a TypedDict, not a model: its fields may have any name, and those that were left out stay out
    typed_dict: Any = TypedDict
    shape = typed_dict(function.__name__, fields)
    shape.__pydantic_config__ = ConfigDict(extra="forbid")
    try:
        arguments: TypeAdapter[dict[str, Any]] = TypeAdapter(shape)
        parameters = plain_schema(arguments.json_schema())
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{place} has a parameter whose type has no JSON schema: {reason}; use another type"
        ) from error
    return Tool(function.__name__, description, parameters, function, arguments, limits_itself)


def plain_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without titles and, as far as types do not hold themselves, without references: what policies can read."""
    definitions = schema.pop("$defs", {})

    def plain(node: Any, inside: tuple[str, ...]) -> Any:
        if isinstance(node, list):
            return [plain(one, inside) for one in node]
        if not isinstance(node, dict):
            return node
        name = node["$ref"].rpartition("/")[2] if isinstance(node.get("$ref"), str) else None
        if name in inside:
            recursive.add(name)
            return node
        if name is not None:
            rest = {key: value for key, value in node.items() if key != "$ref"}
            return plain(definitions[name] | rest, (*inside, name))
        ordered = sorted(node, key=lambda key: ORDER.index(key) if key in ORDER else len(ORDER))
        return {key: value_of(key, node[key], inside) for key in ordered if key != "title"}

    def value_of(key: str, value: Any, inside: tuple[str, ...]) -> Any:
        if key == "properties":
            return {name: plain(one, inside) for name, one in value.items()}
        return value if key in VALUES else plain(value, inside)

    recursive: set[str] = set()
    result: dict[str, Any] = plain(schema, ())
    result.pop("description", None)
    result.pop("additionalProperties", None)
    if recursive:
        result["$defs"] = {name: definitions[name] for name in sorted(definitions)}
    return result


def _described(function: Any, place: str) -> tuple[str, Mapping[str, str]]:
    """The function's description, and that of each parameter."""
    from docstring_parser import DocstringStyle, parse  # only here: processes of environments need not pay for it

    parsed = parse(inspect.getdoc(function) or "", style=DocstringStyle.GOOGLE)
    description = "\n\n".join(part for part in (parsed.short_description, parsed.long_description) if part)
    if not description:
        raise ConfigError(f"{place} has no docstring: say in it what the tool does, the policy reads it")
    return description, {one.arg_name: " ".join((one.description or "").split()) for one in parsed.params}


def _parameters(function: Any, place: str) -> dict[str, tuple[inspect.Parameter, Any]]:
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{place} has a type hint that cannot be read: {error}; import the type at run time"
        ) from error
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in _ONLY_NAMED:
            raise ConfigError(f"{place} takes {parameter}: a policy gives arguments by name, so name each parameter")
        if name not in hints:
            raise ConfigError(f"{place} has no type hint for {name!r}: write one, its JSON schema is made from it")
        found[name] = (parameter, hints[name])
    return found


def _field(parameter: inspect.Parameter, hint: Any, description: str | None, place: str) -> Any:
    name = parameter.name
    if not description and not _described_in(hint):
        raise ConfigError(
            f"{place} does not describe {name!r}: add 'Args:' to its docstring, with a line '{name}: ...'"
        )
    optional = parameter.default is not inspect.Parameter.empty
    extra = {"default": parameter.default} if optional and _is_json(parameter.default) else None
    typed = Annotated[hint, Field(description=description, json_schema_extra=extra)] if description else hint
    return NotRequired[typed] if optional else typed


def _described_in(hint: Any) -> bool:
    return any(getattr(extra, "description", None) for extra in getattr(hint, "__metadata__", ()))


def _is_json(value: Any) -> bool:
    try:
        return json.loads(json.dumps(value, allow_nan=False)) == value and value is not None
    except (TypeError, ValueError):
        return False
