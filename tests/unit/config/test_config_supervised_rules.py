"""Every rule across fields of a supervised run: the message names the key, the value and what to do."""

import copy

import pytest

from rlhf_core.config import parse_supervised_config
from rlhf_core.config.supervised_rules import RULES
from rlhf_core.errors import ConfigError

MINIMAL = {"model": {"model_name_or_path": "builtin:tiny"}, "data": {"dataset": "chats.jsonl"}}


def config(*overrides):
    return parse_supervised_config(copy.deepcopy(MINIMAL), overrides)


CASES = {
    # rule -> [(overrides, fragments of the message)]
    "nothing_sleeps": [(["ds.enable_sleep=true"], ["ds.enable_sleep", "no engine shares the GPUs", "remove it"])],
    "packed_samples_stay_apart": [
        (["ds.packing_samples=true", "ds.attn_implementation=eager"], ["ds.packing_samples", "use sdpa or"]),
    ],
    "rows_divide": [
        (
            ["ds.packing_samples=true", "ds.sequence_parallel_size=2"],
            ["ds.sequence_parallel_size=2", "the 1 ranks of model.num_nodes", "use a divisor"],
        ),
    ],
    "layers_divide": [
        (
            ["ds.tensor_parallel_size=2", "model.optim=muon"],
            [
                "ds.tensor_parallel_size=2 does not divide the 1 ranks of model.num_nodes × model.num_gpus_per_node",
                "model.optim='muon', which orthogonalises whole matrices: use adam",
            ],
        ),
    ],
    "copies_are_of_shards": [
        (["ds.zpg=2", "model.num_gpus_per_node=2"], ["ds.zpg=2", "set ds.zero_stage=3 (it is 2)"]),
    ],
    "offload_has_shards": [
        (["ds.adam_offload=true", "model.optim=muon"], ["ds.adam_offload=true", "model.optim='muon'", "use adam"]),
    ],
    "universal_is_whole": [
        (["ds.use_universal_ckpt=true", "ds.param_dtype=fp16"], ["ds.use_universal_ckpt", "use bf16 or fp32"]),
    ],
    "adapters_are_whole": [
        (["ds.load_in_4bit=true"], ["ds.load_in_4bit freezes the model", "ds.lora.rank=0", "set ds.lora.rank"]),
        (
            ["ds.load_in_4bit=true", "ds.lora.rank=8", "ds.param_dtype=fp16"],
            ["ds.load_in_4bit computes in bf16", "ds.param_dtype='fp16'"],
        ),
        (
            ["ds.load_in_4bit=true", "ds.lora.rank=8", "ds.zero_stage=3"],
            ["ds.load_in_4bit keeps the packed weights whole", "ds.zero_stage=3", "use 2"],
        ),
        (
            ["ds.lora.rank=8", "ds.tensor_parallel_size=2"],
            ["ds.lora.rank=8", "ds.tensor_parallel_size=2", "use ds.zero_stage=3"],
        ),
    ],
    "muon_is_not_clipped": [
        (["model.optim=muon", "model.max_norm=0.5"], ["model.max_norm=0.5", "model.optim='muon'", "remove it"]),
    ],
    "steps_divide": [
        (
            ["train.batch_size=4", "model.num_gpus_per_node=8"],
            ["train.batch_size=4", "8 ranks (model.num_nodes × model.num_gpus_per_node)", "choose a multiple"],
        ),
    ],
    "budget_holds_a_row": [
        (
            ["train.dynamic_batch_enable=true", "train.max_tokens_per_gpu=100"],
            ["train.max_tokens_per_gpu=100", "data.max_len=2048", "raise it"],
        ),
    ],
    "templates_agree": [
        (["data.system_prompt=Hi"], ["data.system_prompt", "data.apply_chat_template=true"]),
        (["data.input_template=Hi"], ["data.input_template='Hi'", "exactly one '{}'"]),
    ],
    "probabilities_match": [
        (["data.probs=[0.5, 0.5]"], ["data.probs", "1 datasets in data.dataset", "one weight each"]),
        (["data.probs=[0]"], ["data.probs", "not all 0"]),
    ],
    "evaluation_has_data": [
        (["eval.steps=5"], ["eval.steps=5", "eval.dataset", "name the held-out examples"]),
        (["eval.steps=0"], ["eval.steps=0", "use -1"]),
        (["ckpt.save_steps=0"], ["ckpt.save_steps=0", "use -1"]),
    ],
    "best_metric_exists": [
        (["ckpt.best_metric_key=eval/loss"], ["'eval/loss' without eval.dataset", "name the held-out data"]),
        (["ckpt.best_metric_key=loss", "eval.dataset=h.jsonl"], ["'loss' is no metric", "begin with 'eval/'"]),
        (["ckpt.best_metric_mode=min"], ["ckpt.best_metric_mode='min'", "name the metric, or remove it"]),
    ],
    "run_models_are_named": [
        ([f"{key}=run:a@newest"], [f"{key}: 'run:a@newest'", "run:ID@best"])
        for key in ("model.model_name_or_path", "dpo.ref_model_name_or_path")
    ],
    "registered_model_is_named": [
        (["logger.mlflow_model=a/b"], ["logger.mlflow_model='a/b' cannot name a registered model", "without / :"]),
        (["logger.mlflow_model=' '"], ["logger.mlflow_model=' '", "up to 256 characters"]),
    ],
    "metrics_have_a_place": [
        (
            ["logger.tensorboard_dir=s3://bucket/curves"],
            ["logger.tensorboard_dir='s3://bucket/curves'", "name a folder"],
        ),
        (
            ["logger.wandb.mode=offline"],
            ["logger.wandb.org, .group and .mode", "without logger.wandb.project", "remove them"],
        ),
        (["logger.prometheus_host=0.0.0.0"], ["logger.prometheus_host='0.0.0.0'", "set the port, or 0"]),
    ],
    "label_smoothing_is_dpo": [
        (["dpo.loss=ipo", "dpo.label_smoothing=0.1"], ["dpo.label_smoothing=0.1", "dpo.loss='ipo'", "set it to 0"]),
    ],
    "no_credentials": [
        (["storage.options.secret=hush"], ["storage.options.secret is a credential", "the environment"]),
        (["storage.root=s3://me:hush@host/runs"], ["storage.root is a URL with a user", "the environment"]),
    ],
}
ROWS = [pytest.param(*row, id=f"{rule}-{i}") for rule, rows in CASES.items() for i, row in enumerate(rows)]


@pytest.mark.parametrize(("overrides", "fragments"), ROWS)
def test_a_broken_rule_names_key_value_and_remedy(overrides, fragments):
    with pytest.raises(ConfigError) as caught:
        config(*overrides)

    assert [part for part in fragments if part not in str(caught.value)] == []
    assert "hush" not in str(caught.value)


def test_every_rule_has_a_case():
    assert {rule.__name__ for rule in RULES} == set(CASES)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.optim=muon"],
        ["dpo.label_smoothing=0.1"],
        ["eval.dataset=h.jsonl", "ckpt.best_metric_key=eval/loss", "ckpt.best_metric_mode=min"],
        ["train.batch_size=16", "model.num_gpus_per_node=8"],
    ],
)
def test_what_fits_together_is_accepted(overrides):
    config(*overrides)
