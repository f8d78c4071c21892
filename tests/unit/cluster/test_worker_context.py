"""What a worker is told of its models."""

import pickle

import pytest
from minimal_config import config

from rlhf_core.cluster.context import WorkerContext
from rlhf_core.data import models_of, pin_models
from rlhf_core.errors import ConfigError
from rlhf_core.storage import CheckpointStore, RunStore


def context(tmp_path, *overrides):
    checked = config(f"storage.root={tmp_path / 'runs'}", *overrides)
    models = pin_models(models_of(checked), checked.storage)
    made = WorkerContext("run", checked, "cpu", str(tmp_path), str(tmp_path / "models"), models)
    return pickle.loads(pickle.dumps(made))


def make_source(tmp_path):
    (tmp_path / "staging" / "hf").mkdir(parents=True)
    (tmp_path / "staging" / "hf" / "config.json").write_text("{}")
    run = RunStore("source", str(tmp_path / "runs"))
    run.write_run({})
    checkpoints = CheckpointStore(run)
    checkpoints.commit(1, {}, checkpoints.add_files(1, tmp_path / "staging"))


def test_a_role_is_what_the_process_can_load(tmp_path):
    """A checkpoint of another run as a folder of this machine, a name as it is."""
    make_source(tmp_path)

    told = context(
        tmp_path, "actor.model_name_or_path=run:source", "algo.kl.init_coef=1", "ref.model_name_or_path=org/m"
    )

    assert told.model("reference") == "org/m"
    assert told.model("policy").startswith(f"{tmp_path}/models/run-source-v00000001-")


def test_a_role_that_the_run_does_not_have_is_an_error_that_names_those_it_has(tmp_path):
    with pytest.raises(ConfigError, match="run run has no reference model; it has policy"):
        context(tmp_path).model("reference")
