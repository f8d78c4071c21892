"""Every key of a chain: several runs, one after the other, later ones from the models of earlier ones.

::

    stages:
      - {name: sft, flow: sft, config: sft.yaml}
      - {name: reward, flow: reward-model, config: reward.yaml, overrides: ["model.model_name_or_path=run:{sft}"]}

``run:{sft}`` is the model that the stage ``sft`` makes; ``chain_plan`` puts the id of its run in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field, model_validator

from rlhf_core.config.base import Section
from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

FlowName: TypeAlias = Literal["train", "sft", "reward-model", "dpo"]


class StageConfig(Section):
    """One run of a chain."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    """Its run is called ``{chain_id}-{name}``; letters, digits, ``.``, ``_``, ``-``."""
    flow: FlowName
    """What it does: sft, reward-model, dpo, or train (by rewards)."""
    config: str | dict[str, Any]
    """Its configuration: a file beside the chain's, the name of one in ``configs/``, or the sections themselves. Where it names
    a model, ``run:{name}`` and ``run:{name}@best`` mean that of an earlier stage."""
    overrides: tuple[str, ...] = ()
    """``section.key=value``, on top of ``config`` and ``common``."""


class ChainConfig(Section):
    """A chain of runs."""

    common: tuple[str, ...] = ()
    """``section.key=value``, on top of every stage's ``config``: a key that all of them have, such as ``storage.root``."""
    stages: tuple[StageConfig, ...]
    """The runs, in their order."""

    @model_validator(mode="after")
    def _check_stages(self) -> ChainConfig:
        if not self.stages:
            raise ConfigError("stages=[] is no chain: list at least one run")
        names = [stage.name for stage in self.stages]
        twice = [f"stages.{i}.name={name!r} stands twice" for i, name in enumerate(names) if name in names[:i]]
        if twice:
            raise ConfigError("\n".join(f"{problem}: give each stage a name of its own" for problem in twice))
        return self

    def with_overrides(self, overrides: Iterable[str]) -> ChainConfig:
        """The chain with keys of its stages set on top of everything else.

        Args:
            overrides: ``section.key=value`` for every stage, or ``NAME:section.key=value`` for one.

        Raises:
            ConfigError: an override is for a stage that there is not.
        """
        names = [stage.name for stage in self.stages]
        on_top: dict[str, list[str]] = {name: [] for name in names}
        for override in overrides:
            name, colon, own = override.partition(":")
            if not colon or "=" in name:  # the colon belongs to the value
                for of_stage in on_top.values():
                    of_stage.append(override)
            elif name.removeprefix("--") in names:
                on_top[name.removeprefix("--")].append(own)
            else:
                raise ConfigError(f"override {override!r}: there is no stage {name!r}; there are {', '.join(names)}")
        stages = tuple(
            stage.model_copy(update={"overrides": (*stage.overrides, *on_top[stage.name])}) for stage in self.stages
        )
        return self.model_copy(update={"stages": stages})
