"""Where the prompts went."""

import dataclasses

import pytest

from rlhf_core.records import Ledger

ACCOUNT = Ledger(drawn=10, carried=2, trained=6, filtered=3, failed=2, buffered=1)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Ledger)])
def test_the_law_of_the_ledger(name):
    """drawn + carried == trained + filtered + failed + buffered"""
    broken = dataclasses.replace(ACCOUNT, **{name: getattr(ACCOUNT, name) + 1})

    assert ACCOUNT.balanced
    assert not broken.balanced


def test_iterations_add_up_and_what_waits_is_what_waits_at_the_end():
    first = Ledger(drawn=4, trained=2, filtered=1, buffered=1)
    second = Ledger(drawn=4, carried=1, trained=2, failed=1, buffered=2)

    total = first.then(second)

    assert total == Ledger(drawn=8, trained=4, filtered=1, failed=1, buffered=2)
    assert total.balanced


def test_a_group_that_is_lost_between_two_iterations_breaks_the_law_of_the_run():
    first = Ledger(drawn=4, trained=2, buffered=2)
    second = Ledger(drawn=4, carried=1, trained=2, buffered=3)

    assert first.balanced
    assert second.balanced
    assert not first.then(second).balanced
