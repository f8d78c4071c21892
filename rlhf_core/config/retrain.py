"""Every key of a retraining: a training run again and again, each time from the champion and on new prompts.

::

    config: grpo.yaml                  # what a turn trains, as `rlhf train` takes it
    overrides: ["eval.steps=5"]
    name: support-bot
    margin: 0.02
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from rlhf_core.config.base import NonNegativeFloat, Section


class ApprovalConfig(Section):
    """A human's word before a promotion."""

    enable: bool = False
    """Ask before the champion is replaced: the flow run pauses, and its page in the Prefect UI has a form."""
    timeout: PositiveFloat = 86400
    """Seconds to wait for an answer; then the promotion is refused."""


class RetrainConfig(Section):
    """A retraining."""

    config: str | dict[str, Any]
    """What a turn trains: a file beside this one, the name of one in ``configs/``, or the sections themselves. Its own
    ``actor.model_name_or_path`` is where the first turn starts, as long as the registry has no model."""
    overrides: tuple[str, ...] = ()
    """``section.key=value``, on top of ``config``."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,100}$")]
    """Names the retraining: its log lies at ``{storage.root}/{name}``, its turns are the runs ``{name}-0001``,
    ``{name}-0002``, ..."""
    registered_model: str | None = None
    """The model of MLflow's registry whose champion it replaces; default: ``name``."""
    metric: Literal["eval/score_mean", "eval/reward_mean"] = "eval/score_mean"
    """What is compared, prompt by prompt, on ``eval.dataset`` of the training configuration."""
    margin: NonNegativeFloat = 0.0
    """A challenger is promoted if it is better than the champion by at least so much (and better at all)."""
    standard_errors: NonNegativeFloat = 0.0
    """And by at least so many standard errors of the paired differences; 2 keeps luck out, with 0 it is only reported."""
    min_new_prompts: PositiveInt = 1
    """With fewer new prompts a turn ends at once, and nothing is trained."""
    approval: ApprovalConfig = ApprovalConfig()
    """A human's word before a promotion."""

    @property
    def model(self) -> str:
        """The registered model."""
        return self.registered_model or self.name
