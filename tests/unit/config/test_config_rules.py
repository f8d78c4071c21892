"""Every rule across fields: the message names the key, the value and what to do."""

import pytest
from config_samples import config

from rlhf_core.config.parallel_rules import PARALLEL_RULES
from rlhf_core.config.pipeline_rules import PIPELINE_RULES
from rlhf_core.config.rules import RULES
from rlhf_core.errors import ConfigError

CASES = {
    # rule -> [(overrides, fragments of the message)]
    "packed_samples_stay_apart": [
        (
            ["ds.packing_samples=true", "ds.attn_implementation=eager"],
            ["ds.packing_samples", "ds.attn_implementation='eager'", "use sdpa or flash_attention_2"],
        ),
    ],
    "adapters_are_whole": [
        (["ds.lora.rank=8", "ds.lora.target_modules=[]"], ["ds.lora.target_modules=[] trains nothing", "all-linear"]),
        (
            ["ds.lora.rank=8", "ds.lora.dropout=0.1"],
            ["ds.lora.dropout=0.1", "no ratio of them is 1 before a step", "set it to 0"],
        ),
        (
            ["ds.lora.rank=8", "ds.load_in_4bit=true", "data.max_images_per_prompt=2"],
            ["ds.load_in_4bit", "data.max_images_per_prompt=2", "remove ds.load_in_4bit"],
        ),
    ],
    "algorithms_exist": [
        (["algo.advantage.estimator=grpo"], ["algo.advantage.estimator='grpo'", "use one of gae, ", "'path.py:name'"]),
        (
            ["actor.policy_loss_type=ppp"],
            ["actor.policy_loss_type='ppp'", "use one of ppo, gspo, cispo", "path.py:name"],
        ),
    ],
    "critic_is_wanted": [
        (
            ["algo.advantage.estimator=gae", "critic.enable=false"],
            ["'gae' needs the critic's values", "remove critic.enable"],
        ),
        (
            ["critic.enable=true"],
            ["critic.enable=true", "'group_norm' does not look at values", "remove it, or use gae"],
        ),
    ],
    "critic_keys_have_a_critic": [
        (
            ["critic.model_name_or_path=org/m"],
            ["critic.model_name_or_path='org/m'", "'group_norm'", "remove it, use gae"],
        ),
        (
            ["algo.advantage.bootstrap_truncated=true", "algo.advantage.estimator=own.py:mine"],
            ["algo.advantage.bootstrap_truncated=True", "'own.py:mine'", "set critic.enable=true"],
        ),
    ],
    "group_estimators_need_groups": [
        ([f"algo.advantage.estimator={name}", "rollout.n_samples_per_prompt=1"], [f"'{name}'", "=1", "2 or more"])
        for name in ("reinforce_baseline", "rloo", "group_norm", "dr_grpo")
    ],
    "gamma_is_one": [
        (["algo.advantage.gamma=0.9"], ["algo.advantage.gamma=0.9", "'group_norm'", "set it to 1"]),
    ],
    "freezing_leaves_iterations": [
        (
            ["algo.advantage.estimator=gae", "critic.freezing_steps=4", "train.max_iterations=4"],
            ["critic.freezing_steps=4", "train.max_iterations=4", "lower it"],
        ),
    ],
    "images_are_seen": [
        (
            ["data.max_images_per_prompt=2", "reward.model_name_or_path=org/m"],
            [
                "data.max_images_per_prompt=2",
                "a trained reward model reads text only",
                "remove reward.model_name_or_path",
            ],
        ),
        (["data.max_images_per_prompt=2", "ds.packing_samples=true"], ["packs text only", "remove ds.packing_samples"]),
        (["actor.freeze_visual_encoder=true"], ["actor.freeze_visual_encoder", "set data.max_images_per_prompt"]),
    ],
    "universal_is_whole": [
        (["ds.use_universal_ckpt=true", "ds.param_dtype=fp16"], ["ds.use_universal_ckpt", "use bf16 or fp32"]),
    ],
    "muon_is_not_clipped": [
        (["actor.optim=muon", "actor.max_norm=0.5"], ["actor.max_norm=0.5", "actor.optim='muon'", "remove it"]),
        (["critic.optim=muon", "critic.max_norm=2"], ["critic.max_norm=2", "critic.optim='muon'", "remove it"]),
    ],
    "steps_divide": [
        (["train.batch_size=100"], ["train.batch_size=100", "= 1024", "choose a divisor"]),
        (["train.batch_size=2048"], ["train.batch_size=2048", "= 1024", "choose a divisor"]),
        (
            ["train.batch_size=4", "actor.num_gpus_per_node=8"],
            ["train.batch_size=4", "8 ranks (actor.num_nodes × actor.num_gpus_per_node)", "choose a multiple"],
        ),
        (
            ["train.batch_size=4", "critic.num_gpus_per_node=8", "algo.advantage.estimator=gae"],
            ["train.batch_size=4", "8 ranks (critic.num_nodes × critic.num_gpus_per_node)", "choose a multiple"],
        ),
    ],
    "filtering_can_keep": [
        (["algo.dynamic_filtering_range=[1, 0]"], ["algo.dynamic_filtering_range=(1.0, 0.0)", "give (low, high)"]),
        (
            [
                "algo.dynamic_filtering_enable=true",
                "rollout.n_samples_per_prompt=1",
                "algo.advantage.estimator=reinforce",
            ],
            ["algo.dynamic_filtering_enable", "rollout.n_samples_per_prompt=1", "2 or more"],
        ),
    ],
    "rounds_can_fill": [
        (
            ["rollout.vllm_generate_batch_size=8", "algo.dynamic_filtering_max_rounds=15"],
            ["max_rounds=15", "vllm_generate_batch_size=8", "rollout.batch_size=128", "raise"],
        ),
    ],
    "lengths_fit": [
        (["rollout.max_new_tokens=2048"], ["rollout.max_new_tokens=2048", "data.max_len=2048", "raise data.max_len"]),
        (["vllm.max_model_len=1024"], ["vllm.max_model_len=1024", "data.max_len=2048", "raise it"]),
        (["rollout.min_new_tokens=2000"], ["rollout.min_new_tokens=2000", "rollout.max_new_tokens=1024", "lower it"]),
        (
            ["train.dynamic_batch_enable=true", "train.max_tokens_per_gpu=100"],
            ["train.max_tokens_per_gpu=100", "data.max_len=2048", "raise it"],
        ),
        (
            ["train.dynamic_batch_enable=true", "rollout.max_tokens_per_gpu=100"],
            ["rollout.max_tokens_per_gpu=100", "one sample of 2048 tokens", "raise it"],
        ),
        (
            [
                "train.dynamic_batch_enable=true",
                "train.max_tokens_per_gpu=2048",
                "algo.advantage.estimator=gae",
                "algo.advantage.bootstrap_truncated=true",
            ],
            ["rollout.max_tokens_per_gpu=2048", "one sample of 2049 tokens", "raise it"],
        ),
    ],
    "reward_source_exists": [
        (["reward.functions=[]"], ["no reward source", "set reward.functions, reward.remote_url or reward.model_name"]),
        (["reward.remote_url=r.py"], ["reward.remote_url=r.py names a file beside other sources", "list the file"]),
        *[
            (["reward.functions=[]", f"reward.remote_url={urls}"], [f"reward.remote_url={urls} names a file", "list"])
            for urls in ("a.py,b.py", "a.py,http://a")
        ],
        *[
            ([f"reward.remote_url={url}"], [f"reward.remote_url={url}", "use http://host:port/path"])
            for url in ("ftp://a/b", "http://", "http://a:port", "http://[::1", "http://a:70000")
        ],
        (["reward.remote_token_env=TOKEN"], ["reward.remote_token_env='TOKEN' without a URL", "remove it"]),
        (["reward.clip_range=[1, -1]"], ["reward.clip_range=(1.0, -1.0)", "give (low, high)"]),
        (
            ["reward.overlong_buffer_len=2000"],
            ["reward.overlong_buffer_len=2000", "rollout.max_new_tokens=1024", "lower it"],
        ),
    ],
    "kl_loss_needs_reference": [
        (["algo.kl.use_loss=true"], ["algo.kl.use_loss", "set algo.kl.init_coef > 0"]),
        (["algo.kl.target=6"], ["algo.kl.target", "set algo.kl.init_coef > 0"]),
        (["ref.model_name_or_path=m"], ["ref.model_name_or_path", "algo.kl.init_coef=0", "set it > 0"]),
    ],
    "correction_range": [
        (
            ["algo.advantage.is_correction_threshold=[5, 0.5]"],
            ["algo.advantage.is_correction_threshold=(5.0, 0.5)", "give (low, high)"],
        ),
    ],
    "probabilities_match": [
        (["data.prompt_probs=0.5,0.5"], ["data.prompt_probs=(0.5, 0.5)", "1 datasets", "give one weight each"]),
        (["data.prompt_probs=[-1]"], ["data.prompt_probs=(-1.0,)", "must not be negative"]),
        (["data.prompt_probs=[0]"], ["data.prompt_probs=(0.0,)", "not all 0"]),
    ],
    "templates_agree": [
        (
            ["data.apply_chat_template=true", "data.input_template='Q {}'"],
            ["data.input_template and data.apply_chat_template", "choose one"],
        ),
        # CASE 113: braces in a template
        (["data.input_template='{\"q\": {}} {}'"], ["data.input_template='{\"q\": {}} {}'", "exactly one '{}'"]),
        (["data.system_prompt=Hi"], ["data.system_prompt", "data.apply_chat_template=true"]),
        (["data.tokenizer_chat_template=Hi"], ["data.tokenizer_chat_template", "data.apply_chat_template=true"]),
    ],
    "evaluation_is_complete": [
        (["eval.steps=5"], ["eval.steps=5", "eval.dataset", "name the held-out prompts"]),
        (["eval.pass_k=[1, 4]"], ["eval.pass_k=[4]", "eval.n_samples_per_prompt >= 4"]),
        (["eval.n_samples_per_prompt=4"], ["eval.n_samples_per_prompt=4", "set eval.temperature > 0"]),
    ],
    "best_metric_exists": [
        (["ckpt.best_metric_key=eval/score_mean"], ["'eval/score_mean' without eval.dataset", "name the held-out"]),
        (
            ["ckpt.best_metric_key=reward/mean", "eval.dataset=h.jsonl"],
            ["ckpt.best_metric_key='reward/mean'", "begin with 'eval/'", "eval/score_mean"],
        ),
        (
            ["ckpt.best_metric_key=eval/pass@4", "eval.dataset=h.jsonl"],
            ["ckpt.best_metric_key='eval/pass@4'", "reports pass@1:", "set eval.pass_k"],
        ),
        (
            ["ckpt.best_metric_key=eval/sums/pass@8", "eval.dataset=h", "eval.pass_k=[1]"],
            ["ckpt.best_metric_key='eval/sums/pass@8'", "reports pass@1:"],
        ),
        (["ckpt.best_metric_mode=min"], ["ckpt.best_metric_mode='min'", "name the metric, or remove it"]),
    ],
    "run_models_are_named": [
        ([f"{key}=run:a@newest"], [f"{key}: 'run:a@newest'", "run:ID@best"])
        for key in (f"{section}.model_name_or_path" for section in ("actor", "ref", "critic", "reward"))
    ],
    "replay_is_complete": [
        (["replay.iterations=[0, 2]"], ["replay.iterations=(0, 2) without replay.source", "name the run"]),
        (["replay.rewards=anew"], ["replay.rewards='anew' without replay.source", "name the run"]),
        (["replay.source=a", "replay.iterations=[3, 2]"], ["replay.iterations=[3, 2] are none", "[first, last]"]),
        (["replay.source=a", "eval.dataset=h.jsonl"], ["eval.dataset needs an engine", "remove it"]),
        (["replay.source=s3://me:hush@host/runs/a"], ["replay.source is a URL with a user", "the environment"]),
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
    "steps_are_positive": [
        (["eval.steps=0"], ["eval.steps=0", "use -1"]),
        (["ckpt.save_steps=0"], ["ckpt.save_steps=0", "use -1"]),
    ],
    "backends_match_device": [
        (["run.device=cpu", "vllm.sync_backend=nccl"], ["vllm.sync_backend='nccl'", "the run is on CPU", "use 'shm'"]),
        (["run.device=cpu", "vllm.sync_backend=ipc"], ["vllm.sync_backend='ipc'", "use 'shm'"]),
        (["run.device=cpu", "ds.attn_implementation=flash_attention_2"], ["'flash_attention_2'", "use 'sdpa'"]),
        (["run.device=cpu", "ds.param_dtype=fp16"], ["ds.param_dtype='fp16'", "use 'bf16' or 'fp32'"]),
        (
            ["run.device=cpu", "ds.lora.rank=8", "ds.load_in_4bit=true"],
            ["ds.load_in_4bit needs a CUDA GPU", "remove it"],
        ),
    ],
    "no_credentials": [
        (["data.only_rows=s3://me:hush@host/rows.json"], ["data.only_rows is a URL with a user"]),
        *(
            ([f"storage.options.{key}=hush"], [f"storage.options.{key} is a credential", "the environment"])
            for key in (
                "key",
                "secret",
                "token",
                "password",
                "sas_token",
                "account_key",
                "connection_string",
                "sharedKey",
            )
        ),
        (
            ["storage.options.client_kwargs.aws_secret_access_key=hush"],
            ["storage.options.client_kwargs.aws_secret_access_key", "the environment"],
        ),
        (["storage.options.s3_additional_kwargs.SSECustomerKey=hush"], ["SSECustomerKey is a credential"]),
        (["actor.model_name_or_path=run:s3://me:hush@host/runs/a"], ["actor.model_name_or_path", "the environment"]),
        (["storage.root=s3://me:hush@host/runs"], ["storage.root is a URL with a user", "the environment"]),
        (["logger.mlflow_uri=https://me:hush@host"], ["logger.mlflow_uri", "MLFLOW_TRACKING_PASSWORD"]),
        *[
            ([f"reward.remote_url={url}"], ["a user, a password or a key in it", "reward.remote_token_env"])
            for url in ("http://me:hush@host/r", "ftp://me:hush@host", "https://host/r?api_key=hush")
        ],
    ],
    "one_agent": [
        (
            ["agent.url=http://h/a", "train.agent_func_path=a.py"],
            ["train.agent_func_path and agent.url each choose who plays", "keep one of them"],
        ),
        (
            ["agent.tools=python", "data.apply_chat_template=true", "data.prompt_dataset=env:gym/FrozenLake-v1"],
            ["agent.tools and a env: dataset", "keep one"],
        ),
    ],
    "environments_are_not_mixed": [
        (
            ["data.prompt_dataset=[env:gym/FrozenLake-v1,p.jsonl]"],
            ["data.prompt_dataset=env:gym/FrozenLake-v1,p.jsonl mixes environments", "keep one kind"],
        ),
        (["eval.dataset=env:gym/FrozenLake-v1"], ["eval.dataset=env:gym/FrozenLake-v1 names environments"]),
        (
            ["data.prompt_dataset=env:gym/FrozenLake-v1", "eval.dataset=p.jsonl"],
            ["eval.dataset=p.jsonl is played in environments", "give a dataset with env:"],
        ),
    ],
    "agent_keys_have_an_agent": [
        (
            ["agent.max_turns=3"],
            ["agent.max_turns is set", "execution mode 'single_turn'", "use train.agent_func_path"],
        ),
        (["agent.args={a: 1}", "agent.url=http://h/a"], ["agent.args is set", "'url'", "remove it"]),
        (["agent.tool_format=json"], ["agent.tool_format is set", "use agent.tools"]),
    ],
    "turns_fit": [
        (
            ["train.agent_func_path=a.py", "agent.max_turn_tokens=2000"],
            ["agent.max_turn_tokens=2000", "rollout.max_new_tokens=1024", "lower it"],
        ),
    ],
    "tools_have_a_template": [(["agent.tools=python"], ["agent.tools needs data.apply_chat_template=true"])],
    "tools_answer_in_time": [
        (
            ["agent.tools=python", "agent.tool_timeout=30"],
            ["agent.tool_timeout=30 s", "agent.step_timeout=60 s", "raise it"],
        ),
    ],
    "tools_are_named": [
        (["agent.tools=search"], ["agent.tools='search'", "use 'python', or 'path.py:function'"]),
        (["agent.tools=a.py:f", "agent.sandbox={disk_mib: 9}"], ["agent.sandbox is set", "does not name 'python'"]),
    ],
    "agent_urls_can_be_used": [
        (["agent.url=localhost:80"], ["agent.url=localhost:80", "use http://host:port/path"]),
        (["agent.url=http://user:word@localhost/a"], ["agent.url has a URL with a user or password", "remove them"]),
        (
            ["agent.url=http://elsewhere/a", "agent.server.host=127.0.0.1"],
            ["agent.url=http://elsewhere/a is on another machine", "127.0.0.1", "set agent.server.host=0.0.0.0"],
        ),
    ],
}
ROWS = [pytest.param(*row, id=f"{rule}-{i}") for rule, rows in CASES.items() for i, row in enumerate(rows)]


@pytest.mark.parametrize(("overrides", "fragments"), ROWS)
def test_a_broken_rule_names_key_value_and_remedy(overrides, fragments):
    with pytest.raises(ConfigError) as caught:
        config(*overrides)

    assert [part for part in fragments if part not in str(caught.value)] == []


def test_every_rule_has_a_case():
    """Those of pipelines: ``test_pipeline_rules``; of models over many ranks: ``test_parallel_rules``."""
    assert {rule.__name__ for rule in RULES if rule not in (*PIPELINE_RULES, *PARALLEL_RULES)} == set(CASES)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algo.advantage.estimator=gae"],
        ["algo.advantage.estimator=gae", "critic.enable=true", "algo.advantage.bootstrap_truncated=true"],
        ["algo.advantage.estimator=own.py:mine", "critic.enable=true", "critic.model_name_or_path=org/m"],
        ["algo.advantage.estimator=own.py:mine", "actor.policy_loss_type=folder/own.py:loss"],
        ["critic.num_gpus_per_node=7"],  # there is no critic
        ["critic.freezing_steps=4", "train.max_iterations=4"],
        ["algo.advantage.estimator=gae", "critic.freezing_steps=3", "train.max_iterations=4"],
        ["algo.advantage.estimator=gae", "critic.freezing_steps=3"],
        ["actor.optim=muon", "critic.max_norm=2"],
    ],
)
def test_what_fits_together_is_accepted(overrides):
    config(*overrides)


def test_one_try_shows_every_problem():
    with pytest.raises(ConfigError) as caught:
        config("eval.steps=0", "train.batch_size=100", "algo.kl.target=6")

    assert [
        word for word in ("eval.steps", "train.batch_size", "algo.kl.target") if word not in str(caught.value)
    ] == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["storage.options.secret=hush"],
        ["actor.model_name_or_path=run:s3://me:hush@host/runs/a"],
        ["storage.root=s3://me:hush@host/runs"],
        ["logger.wandb.key=hush"],
        ["logger.wandb.kee=hush"],
        ["storage.optoins={secret: hush}"],
    ],
)
def test_a_refused_credential_is_not_repeated(overrides):
    """CASE 119"""
    with pytest.raises(ConfigError) as caught:
        config(*overrides)

    assert "hush" not in str(caught.value)


def test_the_value_of_a_secret_is_refused_wherever_it_stands(monkeypatch):
    """CASE 119"""
    monkeypatch.setenv("JUDGE_API_KEY", "hush-hush-0123")

    with pytest.raises(ConfigError, match=r"reward\.functions\[0\]\.args\.header holds a secret that") as caught:
        config("reward.functions=[{use: digits, args: {header: 'x hush-hush-0123'}}]")

    assert "hush-hush" not in str(caught.value)


def test_harmless_storage_options_are_accepted():
    encryption = "s3_additional_kwargs: {ServerSideEncryption: aws:kms, SSEKMSKeyId: id, BucketKeyEnabled: true}"
    options = f"{{endpoint_url: 'http://host:9000', anon: true, client_kwargs: {{region_name: x}}, {encryption}}}"

    assert config(f"storage.options={options}").storage.options["anon"] is True


@pytest.mark.parametrize(
    "key", ["eval/score_mean", "eval/pass@1", "eval/sums/pass@4", "eval/pass@4_stderr", "eval/any_of_mine"]
)
def test_a_metric_that_an_evaluation_may_give_can_mark_the_best(key):
    overrides = ["eval.dataset=h.jsonl", "eval.n_samples_per_prompt=4", "eval.temperature=1"]

    assert config(f"ckpt.best_metric_key={key}", *overrides).ckpt.best_metric_key == key
