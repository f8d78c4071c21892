"""Another reward for a run than its own, named by short words: what ``rlhf replay RUN --rescore`` takes.

    digits, length?target=40 …           a built-in; what stands behind ? are its arguments
    path.py, path.py:fn, package.mod:fn  a function, as ``reward.functions``; arguments as there
    http://host:port/get_reward          a reward server, as ``reward.remote_url``
    run:ID@best, a folder, org/name      a trained reward model, as ``reward.model_name_or_path``

Several are summed, each with weight 1. Everything else of the run's ``reward`` section (time limits, batch sizes) stays, and
``reward.key=value`` sets it. Rewards are taken as they are: the running normalisation belongs to a run in progress.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from rlhf_core.config import parse_config
from rlhf_core.config.load import apply_overrides
from rlhf_core.config.model_spec import is_run_model
from rlhf_core.errors import ConfigError
from rlhf_core.rewards.builtins import BUILTINS
from rlhf_core.rewards.functions import default_name
from rlhf_core.storage.digest import sha256_of_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlhf_core.config import Config

SOURCES = ("functions", "remote_url", "remote_token_env", "model_name_or_path")  # of the run's own, not taken over
_FUNCTION = re.compile(r"(?P<use>[^?]+\.py(:\w+)?|[\w.]+:\w+|\w+)(\?(?P<query>.*))?", re.DOTALL)
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def with_sources(config: Config, sources: Sequence[str], overrides: Sequence[str] = ()) -> Config:
    """The configuration of a run with another reward.

    Args:
        config: of the run.
        sources: see the top of this module.
        overrides: ``reward.key=value``, on top.

    Raises:
        ConfigError: a source is nothing of that kind, or an override is of another section.
    """
    if not sources:
        raise ConfigError("no reward to score with: name a function, a server or a model")
    strange = [override for override in overrides if not override.removeprefix("--").startswith("reward.")]
    if strange:
        raise ConfigError(f"{', '.join(strange)}: scoring again only takes reward.key=value")
    tree = config.model_dump(mode="json", exclude={"replay"})
    reward = {name: value for name, value in tree["reward"].items() if name not in SOURCES}
    reward |= {"normalize_enable": False, "functions": [], "remote_url": []}
    for source in sources:
        _add(source, reward)
    return parse_config({**tree, "reward": reward}, overrides, source=f"the reward {', '.join(sources)}")


def scorer_of(config: Config, model: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the rewards depend on, as JSON: sources, arguments, weights, and digests of the user's files.

    Args:
        config: of ``with_sources``.
        model: the pinned reward model, as run.json records one.
    """
    reward = config.reward
    scorer: dict[str, Any] = {
        "functions": [{**function.model_dump(mode="json"), **_code(function.use)} for function in reward.functions]
    }
    if reward.remote_url:
        files = {url: _code(url) for url in reward.remote_url if "://" not in url}
        scorer |= {"remote_url": list(reward.remote_url), "remote_weight": reward.remote_weight, "files": files}
    if model is not None:
        scorer |= {"model": dict(model), "model_weight": reward.model_weight, "model_max_len": reward.model_max_len}
    return scorer


def default_rescoring_name(config: Config, scorer_digest: str) -> str:
    """Readable, and another one for every other scorer: the same command again goes on, a changed file begins anew."""
    names = [function.name or default_name(function.use) for function in config.reward.functions]
    names += ["remote"] if config.reward.remote_url else []
    names += ["model"] if config.reward.model_name_or_path is not None else []
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(names)).strip("-._")[:60] or "reward"
    return f"{readable}-{scorer_digest[:8]}"


def _add(source: str, reward: dict[str, Any]) -> None:
    function = _FUNCTION.fullmatch(source)
    if is_run_model(source) or Path(source).is_dir():
        _set_model(source, reward)
    elif re.match(r"https?://", source):
        reward["remote_url"].append(source)
    elif function is not None and (function["use"] in BUILTINS or not function["use"].isidentifier()):
        args = _arguments(function["query"] or "", source)
        reward["functions"].append({"use": function["use"], "args": args})
    elif _HUB_ID.fullmatch(source) and not Path(source).exists():
        _set_model(source, reward)
    else:
        raise ConfigError(
            f"{source!r} is no reward: give a built-in ({', '.join(BUILTINS)}), path.py or path.py:function, the URL of a "
            "reward server, or a reward model (run:ID, a folder, a hub id)"
        )


def _arguments(query: str, source: str) -> dict[str, Any]:
    """``target=40&unit=words`` with values as YAML reads them."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise ConfigError(f"{source!r}: arguments are written as name=value, with & between them") from None
    return {name: apply_overrides({}, [f"value={text}"])["value"] for name, text in pairs}


def _set_model(source: str, reward: dict[str, Any]) -> None:
    if reward.get("model_name_or_path") is not None:
        raise ConfigError(f"{source!r} is a second reward model beside {reward['model_name_or_path']!r}: name one")
    reward["model_name_or_path"] = source


def _code(use: str) -> dict[str, str]:
    """``sha256`` of the file that holds a function; nothing for one of a package."""
    file = use if use.endswith(".py") else use.rpartition(":")[0]
    if not file.endswith(".py"):
        return {}
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(f"{use!r}: no such file: {path.resolve()}")
    return {"sha256": sha256_of_file(path)}
