"""Rules across the fields of a supervised run: each its own function, each message naming key, value and remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.config import parallel_rules, rules
from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rlhf_core.config.supervised import SupervisedConfig


def check(config: SupervisedConfig) -> None:
    """Raise ``ConfigError`` with every violated rule, so that one try shows all of them."""
    problems = [problem for rule in RULES for problem in rule(config)]
    if problems:
        raise ConfigError("\n".join(problems))


def steps_divide(config: SupervisedConfig) -> Iterator[str]:
    """A step is a whole number of examples per rank."""
    step, together = config.train.batch_size, config.ds.ranks_together
    groups = max(config.model.world_size // together, 1)
    if step % groups:
        each = "ranks" if together == 1 else f"groups of {together} ranks"
        yield (
            f"train.batch_size={step} does not divide over {groups} {each} (model.num_nodes × model.num_gpus_per_node): "
            "choose a multiple of them"
        )


def rows_divide(config: SupervisedConfig) -> Iterator[str]:
    """Sequence parallelism."""
    yield from parallel_rules.sequence_problems(config.ds, {"model": config.model.world_size})


def layers_divide(config: SupervisedConfig) -> Iterator[str]:
    """Tensor parallelism."""
    yield from parallel_rules.tensor_problems(config, {"model": config.model.world_size}, "model")


def copies_are_of_shards(config: SupervisedConfig) -> Iterator[str]:
    """hpZ."""
    yield from parallel_rules.secondary_shard_problems(config.ds, {"model": config.model.world_size})


def offload_has_shards(config: SupervisedConfig) -> Iterator[str]:
    """Optimizer offload."""
    yield from parallel_rules.offload_problems(config, "model")


def muon_is_not_clipped(config: SupervisedConfig) -> Iterator[str]:
    """Muon's updates are orthogonal matrices whatever the size of the gradients."""
    yield from rules.clipping_problems(config, "model")


def packed_samples_stay_apart(config: SupervisedConfig) -> Iterator[str]:
    """Attention computes each sample of a packed row by itself."""
    yield from rules.packing_problems(config)


def universal_is_whole(config: SupervisedConfig) -> Iterator[str]:
    """A universal checkpoint holds all that training goes on from."""
    yield from rules.universal_problems(config)


def adapters_are_whole(config: SupervisedConfig) -> Iterator[str]:
    """Adapters, and what stands in 4 bits below them."""
    yield from rules.adapter_problems(config)


def budget_holds_a_row(config: SupervisedConfig) -> Iterator[str]:
    """A micro-batch holds at least one row."""
    budget, longest = config.train.max_tokens_per_gpu, config.data.max_len
    if config.train.dynamic_batch_enable and config.ds.ranks_per_row * budget < longest:
        yield f"train.max_tokens_per_gpu={budget} cannot hold one row of data.max_len={longest}: raise it"


def templates_agree(config: SupervisedConfig) -> Iterator[str]:
    """Either a chat template or a plain one."""
    yield from rules.template_problems(config.data)


def probabilities_match(config: SupervisedConfig) -> Iterator[str]:
    """One weight per dataset."""
    yield from rules.probability_problems("data.probs", config.data.probs, "data.dataset", config.data.dataset)


def evaluation_has_data(config: SupervisedConfig) -> Iterator[str]:
    """Evaluating needs held-out examples; 0 means neither 'never' nor 'always'."""
    if config.eval.steps > 0 and not config.eval.dataset:
        yield f"eval.steps={config.eval.steps} without eval.dataset: name the held-out examples"
    yield from rules.step_problems(config)


def best_metric_exists(config: SupervisedConfig) -> Iterator[str]:
    """The best checkpoint is found by an evaluation."""
    yield from rules.best_metric_problems(config)


def run_models_are_named(config: SupervisedConfig) -> Iterator[str]:
    """A ``run:`` name has one of its forms."""
    yield from rules.run_model_problems(config, "model.model_name_or_path", "dpo.ref_model_name_or_path")


def registered_model_is_named(config: SupervisedConfig) -> Iterator[str]:
    """MLflow's own limits."""
    yield from rules.registered_model_problems(config)


def label_smoothing_is_dpo(config: SupervisedConfig) -> Iterator[str]:
    """IPO has no likelihood to smooth."""
    if config.dpo.loss == "ipo" and config.dpo.label_smoothing > 0:
        yield f"dpo.label_smoothing={config.dpo.label_smoothing} has no meaning with dpo.loss='ipo': set it to 0"


def metrics_have_a_place(config: SupervisedConfig) -> Iterator[str]:
    """A logger that could not write, or a key that does nothing."""
    yield from rules.logger_problems(config)


def no_credentials(config: SupervisedConfig) -> Iterator[str]:
    """The configuration is stored with the run and shown by trackers."""
    yield from rules.credential_problems(config)


def nothing_sleeps(config: SupervisedConfig) -> Iterator[str]:
    """Training states leave a GPU to the engines of a run by rewards; here nobody else would use it."""
    if config.ds.enable_sleep:
        yield "ds.enable_sleep: no engine shares the GPUs of a supervised run: remove it"


RULES: tuple[Callable[[SupervisedConfig], Iterator[str]], ...] = (
    nothing_sleeps,
    muon_is_not_clipped,
    rows_divide,
    layers_divide,
    copies_are_of_shards,
    offload_has_shards,
    packed_samples_stay_apart,
    universal_is_whole,
    adapters_are_whole,
    steps_divide,
    budget_holds_a_row,
    templates_agree,
    probabilities_match,
    evaluation_has_data,
    best_metric_exists,
    run_models_are_named,
    registered_model_is_named,
    metrics_have_a_place,
    label_smoothing_is_dpo,
    no_credentials,
)
