"""Names of models that runs made."""

import pytest

from rlhf_core.config.model_spec import is_run_model, parse_run_model
from rlhf_core.errors import ConfigError


@pytest.mark.parametrize(
    ("spec", "root", "run_id", "which"),
    [
        ("run:first", None, "first", "latest"),
        ("run:first@latest", None, "first", "latest"),
        ("run:first@best", None, "first", "best"),
        ("run:first.v-2_0@12", None, "first.v-2_0", 12),
        ("run:s3://bucket/runs/first@best", "s3://bucket/runs", "first", "best"),
        ("run:s3://bucket/first", "s3://bucket", "first", "latest"),
        ("run:file:///srv/runs/first@3", "file:///srv/runs", "first", 3),
    ],
)
def test_the_parts_of_a_name(spec, root, run_id, which):
    found = parse_run_model(spec)

    assert is_run_model(spec)
    assert (found.spec, found.root, found.run_id, found.which) == (spec, root, run_id, which)


@pytest.mark.parametrize(
    "spec",
    [
        "run:",
        "run:@best",
        "run:first@",
        "run:first@newest",
        "run:first@-1",
        "run:a b",
        "run:runs/first",
        "run:first@1@2",
    ],
)
def test_a_malformed_name_is_refused_with_the_forms_there_are(spec):
    with pytest.raises(ConfigError, match=r"names no run's model: write run:ID, run:ID@best"):
        parse_run_model(spec)


def test_a_credential_in_the_url_is_refused_and_not_repeated():
    """CASE 119"""
    with pytest.raises(ConfigError, match="user or password") as caught:
        parse_run_model("run:s3://me:hush@host/runs/first@best")

    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("name", ["org/model", "builtin:tiny", "./run:first", "runs/first"])
def test_other_names_are_no_runs(name):
    assert not is_run_model(name)
