"""Rules across the fields of a supervised run: each its own function, each message naming key, value and remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.config import rules
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
    step, ranks = config.train.batch_size, config.model.world_size
    if step % ranks:
        yield (
            f"train.batch_size={step} does not divide over {ranks} ranks (model.num_nodes × model.num_gpus_per_node): "
            "choose a multiple of them"
        )


def muon_is_not_clipped(config: SupervisedConfig) -> Iterator[str]:
    """Muon's updates are orthogonal matrices whatever the size of the gradients."""
    yield from rules.clipping_problems(config, "model")


def universal_is_whole(config: SupervisedConfig) -> Iterator[str]:
    """A universal checkpoint holds all that training goes on from."""
    yield from rules.universal_problems(config)


def budget_holds_a_row(config: SupervisedConfig) -> Iterator[str]:
    """A micro-batch holds at least one row."""
    budget, longest = config.train.max_tokens_per_gpu, config.data.max_len
    if config.train.dynamic_batch_enable and budget < longest:
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


def no_credentials(config: SupervisedConfig) -> Iterator[str]:
    """The configuration is stored with the run and shown by trackers."""
    yield from rules.credential_problems(config)


def only_what_is_built(config: SupervisedConfig) -> Iterator[str]:
    """Refuse, never ignore, a key whose feature does not exist yet."""
    for key, feature in rules.NOT_BUILT.items():
        if key.startswith(SHARED) and rules.value_at(config, key) != rules.default_at(config, key):
            yield f"{key}={rules.value_at(config, key)!r}: {feature} is not available in this version; remove the key"


SHARED = ("ds.", "ckpt.", "logger.")

RULES: tuple[Callable[[SupervisedConfig], Iterator[str]], ...] = (
    only_what_is_built,
    muon_is_not_clipped,
    universal_is_whole,
    steps_divide,
    budget_holds_a_row,
    templates_agree,
    probabilities_match,
    evaluation_has_data,
    best_metric_exists,
    run_models_are_named,
    registered_model_is_named,
    label_smoothing_is_dpo,
    no_credentials,
)
