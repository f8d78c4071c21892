"""Questions to the trajectories of one run or many, answered by DuckDB.

::

    where, columns, order, limit ─▶ SQL ─▶ DuckDB ─ columns, filter ─▶ TrajectoryDataset ─ batches ─▶ DuckDB ─▶ pa.Table

DuckDB sees one table, ``trajectories``, and nothing else: no files, no network, no variables of this program, and no
statement that is not a SELECT.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.errors import ConfigError
from rlhf_core.storage.query.readable import COLUMNS, READABLE
from rlhf_core.storage.run_store import RunStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import duckdb
    import pyarrow as pa

    from rlhf_core.storage.query.dataset import TrajectoryDataset

TABLE = "trajectories"
_SANDBOX: dict[str, str | bool | int | float | list[str]] = {
    "enable_external_access": False,  # no files, no network, no extensions
    "python_enable_replacements": False,  # a name in a query is never a variable of ours
    "lock_configuration": True,
    "threads": 1,  # the rows come from one generator, and keep its order
}


def trajectories(
    runs: RunStore | Iterable[RunStore],
    iteration: int | None = None,
    where: str | None = None,
    limit: int | None = None,
    columns: Sequence[str] | None = None,
    *,
    order_by: str | None = None,
    skip_damaged: bool = False,
) -> pa.Table:
    """Trajectories of complete rollouts, with their rewards where the reward stage is complete too.

    Args:
        runs: One run, or several as one dataset.
        iteration: Only the batch of this one; default: all, in order.
        where: A condition in SQL over ``COLUMNS``, such as ``"reward < 0 and stop_reason = 'length'"``.
        limit: At most so many rows, the first ones.
        columns: Which of ``COLUMNS``, in this order; default: those that people read.
        order_by: In SQL, such as ``"reward desc, iteration"``; default: run after run, as they were published.
        skip_damaged: Leave out what is missing or damaged, with a warning that names it; default: an error.

    Raises:
        ConfigError: a bad condition or an unknown column. The message names the columns there are.
        CorruptShardError: a shard is missing or damaged. It names the object.
        StorageError: a newer version of this software wrote one of the runs.
    """
    wanted = list(READABLE) if columns is None else list(columns)
    if unknown := [name for name in wanted if name not in COLUMNS]:
        raise ConfigError(f"there is no column {', '.join(unknown)}; columns are {', '.join(COLUMNS)}")
    sql = f"SELECT {', '.join(_quoted(name) for name in wanted)} FROM {TABLE}"
    if where is not None:
        _check_expression(where)
        sql += f" WHERE (\n{where}\n)"
    if order_by is not None:
        sql += f" ORDER BY {order_by}\n"
    if limit is not None:
        sql += f" LIMIT {int(limit)}"
    asked = ", ".join(f"{name} {text!r}" for name, text in (("where", where), ("order_by", order_by)) if text)
    return _answer(_dataset(runs, iteration, skip_damaged), sql, asked)


def query_trajectories(
    runs: RunStore | Iterable[RunStore], sql: str, iteration: int | None = None, *, skip_damaged: bool = False
) -> pa.Table:
    """The answer to one SELECT over the table ``trajectories``.

    Args:
        runs: One run, or several as one dataset.
        sql: Such as ``"select run_id, iteration, avg(reward) from trajectories group by all order by all"``.
        iteration: Only the batch of this one; default: all.
        skip_damaged: as ``trajectories``.

    Raises:
        ConfigError: no single SELECT, or one that cannot be answered.
        CorruptShardError: a shard is missing or damaged. It names the object.
        StorageError: a newer version of this software wrote one of the runs.
    """
    return _answer(_dataset(runs, iteration, skip_damaged), sql, f"sql {sql!r}")


def _dataset(runs: RunStore | Iterable[RunStore], iteration: int | None, skip_damaged: bool) -> TrajectoryDataset:
    from rlhf_core.storage.query.dataset import TrajectoryDataset

    return TrajectoryDataset([runs] if isinstance(runs, RunStore) else list(runs), iteration, skip_damaged)


def _answer(dataset: TrajectoryDataset, sql: str, asked: str) -> pa.Table:
    import duckdb  # heavy, and only needed by those who ask

    with duckdb.connect(":memory:", config=_SANDBOX) as connection:
        connection.register(TABLE, dataset)
        try:
            _check_select(connection, sql, asked)
            return connection.sql(sql).to_arrow_table()
        except duckdb.Error as error:
            if dataset.failure is not None:
                raise dataset.failure from None
            raise ConfigError(f"{asked}: {_reason(error)}") from error


def _check_select(connection: duckdb.DuckDBPyConnection, sql: str, asked: str) -> None:
    import duckdb

    statements = connection.extract_statements(sql)
    if [statement.type for statement in statements] != [duckdb.StatementType.SELECT]:
        raise ConfigError(f"{asked}: one SELECT is wanted, and nothing else")


def _check_expression(where: str) -> None:
    """Refuse what is not one condition, before it becomes part of a statement."""
    import duckdb

    try:
        duckdb.SQLExpression(where)
    except duckdb.Error as error:
        raise ConfigError(f"where {where!r}: {_reason(error)}") from error


def _reason(error: duckdb.Error) -> str:
    """What DuckDB says, without the drawing of the place in a statement that the user did not write."""
    said = " ".join(str(error).partition("\n\nLINE ")[0].split())
    return f"{said}; columns are {', '.join(COLUMNS)}" if "Referenced column" in said else said


def _quoted(name: str) -> str:
    return f'"{name}"'
