import pyarrow as pa
import pytest

from rlhf_core.errors import ConfigError
from rlhf_core.storage.predicate import parse

ROWS = pa.table(
    {
        "n": [0, 1, 2, 3],
        "reward": [-1.5, 0.0, None, 2.0],
        "stop_reason": ["eos", "length", "it's", "LENGTH"],
    }
)


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ("n = 1", [1]),
        ("n != 1", [0, 2, 3]),
        ("n <> 1", [0, 2, 3]),
        ("n<2", [0, 1]),
        ("n <= 2", [0, 1, 2]),
        ("n > 2", [3]),
        ("n >= 2", [2, 3]),
        ("reward < -1.0e0", [0]),
        ("reward = 0", [1]),
        ("n > .5", [1, 2, 3]),
        ("stop_reason = 'length'", [1]),
        ("stop_reason = 'it''s'", [2]),
        ("n in (0, 3)", [0, 3]),
        ("n not in (0, 3)", [1, 2]),
        ("stop_reason in ('eos')", [0]),
        ("stop_reason like 'l%'", [1]),
        ("stop_reason not like '%t%'", [0, 3]),
        ("reward is null", [2]),
        ("reward is not null", [0, 1, 3]),
        ("reward < 0 and stop_reason = 'eos'", [0]),
        ("n = 0 or n = 3 and n = 2", [0]),
        ("(n = 0 or n = 3) and n = 3", [3]),
        ("not n = 0", [1, 2, 3]),
        ("NOT (n = 0 OR n = 1) AND n IN (1, 2)", [2]),
        ("not reward < 1", [3]),
        ("reward not in (0.0)", [0, 3]),
        ("  n = 1  ", [1]),
    ],
)
def test_a_predicate_keeps_what_sql_keeps(where, kept):
    predicate = parse(where, ROWS.column_names)

    assert ROWS.filter(predicate.expression)["n"].to_pylist() == kept


def test_a_predicate_names_the_columns_it_looks_at():
    assert parse("n = 1 and (reward is null or n = 2)", ROWS.column_names).columns == {"n", "reward"}


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ("", "expected a column, found 'end'"),
        ("rewrad < 0", "there is no column 'rewrad'; columns are n, reward, stop_reason"),
        ("n", "expected 'in', found 'end'"),
        ("n = ", "expected a number or a 'text', found 'end'"),
        ("n = reward", "expected a number or a 'text', found 'reward'"),
        ("n = 1 n = 2", "unexpected 'n'"),
        ("(n = 1", r"expected '\)', found 'end'"),
        ("n in ()", r"expected a number or a 'text', found '\)'"),
        ("n = 1 and", "expected a column"),
        ("and = 1", "expected a column, found 'and'"),
        ('n = "1"', "cannot read '\"1\"'; texts stand in single quotes"),
        ("__import__('os')", "there is no column '__import__'"),
        ("n = 1; drop table x", "cannot read '; drop table x'"),
    ],
)
def test_a_bad_predicate_says_what_is_wrong(where, problem):
    with pytest.raises(ConfigError, match=problem):
        parse(where, ROWS.column_names)
