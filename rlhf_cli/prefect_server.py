"""The Prefect server of the local stack: ``python -m rlhf_cli.prefect_server server start …`` is ``prefect server start …``.

Prefect's API reads, then writes, in one DEFERRED transaction. If another writer commits in between, SQLite refuses the write at
once, whatever its timeout; the server answers 503 and the client sleeps for seconds. A transaction that is IMMEDIATE waits its
turn instead. With another database than SQLite nothing differs.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from prefect.cli import app
from prefect.server.database.configurations import AioSqliteConfiguration

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction

_begin = AioSqliteConfiguration.begin_transaction


@asynccontextmanager
async def _begin_immediate(
    self: AioSqliteConfiguration,
    session: AsyncSession,
    with_for_update: bool = False,
) -> AsyncIterator[AsyncSessionTransaction]:
    async with _begin(self, session, with_for_update=True) as transaction:
        yield transaction


def main() -> None:
    """Run Prefect's command line with transactions that wait for each other."""
    AioSqliteConfiguration.begin_transaction = _begin_immediate  # type: ignore[method-assign]  # internal: version pinned
    app()


if __name__ == "__main__":
    main()
