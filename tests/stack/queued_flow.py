"""A run that has a child, as iterations are, and goes on until a file is there."""

import asyncio
from pathlib import Path

from prefect import flow

from flows.identity import run_child


@flow(name="queued-child", persist_result=False)
async def child(folder: str, name: str) -> None:
    (Path(folder) / f"{name}.child").touch()


@flow(name="queued", persist_result=False)
async def parent(folder: str, name: str) -> None:
    await run_child(child, "child", f"{folder}/{name}", f"child of {name}", {"folder": folder, "name": name})
    (Path(folder) / f"{name}.running").touch()
    while not (Path(folder) / "go").exists():
        await asyncio.sleep(0.1)
