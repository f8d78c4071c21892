"""What is masked in texts for people, and what is not."""

from __future__ import annotations

import copy
import pickle

import pytest

from rlhf_core import redaction
from rlhf_core.errors import StorageError, WorkerError
from rlhf_core.redaction import holds_secret, names_credential, redact, remember

SECRET = "hush-hush-0123"


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    monkeypatch.setattr(redaction, "_remembered", set())


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PREFECT_API_AUTH_STRING", "my_password", "ApiKey"]
)
def test_values_of_variables_that_are_named_like_secrets(monkeypatch, name):
    monkeypatch.setenv(name, SECRET)

    assert redact(f"refused: {SECRET}!") == "refused: ***!"


@pytest.mark.parametrize(
    "name", ["RAY_AUTH_TOKEN_PATH", "TOKENIZERS_PARALLELISM", "SSL_KEY_FILE", "AWS_ACCESS_KEY_ID", "HOME", "KEYBOARD"]
)
def test_other_values_stay(monkeypatch, name):
    monkeypatch.setenv(name, SECRET)

    assert redact(f"refused: {SECRET}!") == f"refused: {SECRET}!"


def test_a_short_value_is_a_word_that_texts_are_full_of(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "the")

    assert redact("the end") == "the end"


def test_of_two_secrets_the_longer_is_masked_whole(monkeypatch):
    monkeypatch.setenv("A_TOKEN", SECRET)
    monkeypatch.setenv("B_TOKEN", f"{SECRET}-and-more")

    assert redact(f"{SECRET}-and-more, {SECRET}") == "***, ***"


def test_what_the_process_was_told_of():
    remember(SECRET)

    assert holds_secret(f"x{SECRET}x")
    assert redact(f"x{SECRET}x") == "x***x"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("at https://me:hush@host/r", "at https://***@host/r"),
        ("{'Authorization': 'Bearer hush'}", "{'Authorization': 'Bearer ***'}"),
        ("authorization: basic aHVzaA==", "authorization: basic ***"),
        ("https://host/x?a=1&X-Amz-Signature=hush&b=2", "https://host/x?a=1&X-Amz-Signature=***&b=2"),
        ("https://host/x?api_key=hush", "https://host/x?api_key=***"),
        (
            "basic arithmetic, the bearer of news, me@host, a?b=c",
            "basic arithmetic, the bearer of news, me@host, a?b=c",
        ),
    ],
)
def test_what_looks_like_a_secret(text, masked):
    assert redact(text) == masked


@pytest.mark.parametrize(
    ("name", "expected"), [("SSECustomerKey", True), ("SSEKMSKeyId", False), ("max_tokens", False)]
)
def test_names(name, expected):
    assert names_credential(name) is expected


@pytest.mark.parametrize("kind", [WorkerError, StorageError])
def test_an_error_quotes_no_secret_wherever_it_is_carried(monkeypatch, kind):
    monkeypatch.setenv("S3_SECRET_KEY", SECRET)
    error = kind(f"the store said: {SECRET}")

    assert str(error) == str(copy.copy(error)) == str(pickle.loads(pickle.dumps(error))) == "the store said: ***"
