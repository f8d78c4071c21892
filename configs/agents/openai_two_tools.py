"""An agent written with the OpenAI client: it looks prices up, calculates, and answers what a purchase costs.

    {"input": "What do 3 apples and 2 pears cost?", "label": 13}

    policy ──lookup("apple")──▶ 3    ──lookup("pear")──▶ 2    ──calculate("3*3 + 2*2")──▶ 13    ──▶ "13"

Nothing here knows of training: the same function works with any OpenAI-compatible server. What a policy says wrong (a tool
that does not exist, arguments that are no JSON) is told to it, as an observation. ``digits_weight`` rewards digits in the last
answer, which even a random model can learn.

Use: ``train.agent_func_path=configs/agents/openai_two_tools.py`` and
``data.prompt_dataset=configs/agents/openai_two_tools.py:purchases?count=64``.
"""

import ast
import itertools
import json
import operator
import random
import re
from collections.abc import Iterator
from typing import Any

from openai import APIStatusError, AsyncOpenAI

PRICES = {"apple": 3, "pear": 2, "melon": 7, "fig": 1, "lemon": 4, "mango": 5}
SYSTEM = "Use the tools. Then answer with the number only."
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]},
        },
    }
    for name, description, argument in (
        ("lookup", "Price of one fruit", "fruit"),
        ("calculate", "Value of a sum or product", "expression"),
    )
]
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
BUDGET_USED_UP = (400, 429)  # the episode has had its tokens, calls or context


def purchases(count: int = 64, seed: int = 0) -> Iterator[dict[str, Any]]:
    """``count`` different questions with their answers; at most 1215."""
    pairs = itertools.combinations(PRICES, 2)
    choices = [(a, m, b, n) for a, b in pairs for m in range(1, 10) for n in range(1, 10)]
    for a, m, b, n in random.Random(seed).sample(choices, count):
        yield {"input": f"What do {m} {a}s and {n} {b}s cost?", "label": m * PRICES[a] + n * PRICES[b]}


async def run_agent(
    prompt: str, label: int, client: AsyncOpenAI, *, max_calls: int = 6, digits_weight: float = 0.0
) -> dict[str, Any]:
    """Play one episode; the reward is 1 for the right number, else what the digits of the answer are worth."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
    answer, used, failed = "", 0, 0
    for _ in range(max_calls):
        try:
            reply = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        except APIStatusError as error:
            if error.status_code in BUDGET_USED_UP and len(messages) > 2:
                break
            raise
        said = reply.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        answer = said.content or ""
        if not said.tool_calls:
            break
        for call in said.tool_calls:
            result, fine = use_tool(call.function.name, call.function.arguments)
            used, failed = used + 1, failed + (not fine)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    right = last_number(answer) == label
    share = sum(character in "0123456789" for character in answer) / max(1, len(answer))
    return {
        "reward": 1.0 if right else digits_weight * share,
        "scores": float(right),
        "extra_logs": {"tools_used": used, "tools_failed": failed},
    }


def use_tool(name: str, arguments: str) -> tuple[str, bool]:
    """What a tool says, and whether it could be used."""
    try:
        match name:
            case "lookup":
                fruit = str(json.loads(arguments)["fruit"]).strip().lower().rstrip("s")
                return str(PRICES[fruit]), True
            case "calculate":
                return str(calculate(str(json.loads(arguments)["expression"]))), True
        return f"there is no tool {name!r}: use lookup or calculate", False
    except (ValueError, TypeError, KeyError, SyntaxError, RecursionError) as error:
        return f"{name} failed: {type(error).__name__}: {error}"[:200], False


def calculate(expression: str) -> int:
    """The value of an expression of whole numbers with ``+``, ``-`` and ``*``."""

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)) if abs(number) < 10**6:
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return int(OPERATORS[type(op)](value(left), value(right)))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
        raise ValueError("only whole numbers, +, - and * are known")

    return value(ast.parse(expression[:100], mode="eval").body)


def last_number(text: str) -> int | None:
    """The last whole number in a text."""
    found = re.findall(r"-?\d{1,9}", text)
    return int(found[-1]) if found else None
