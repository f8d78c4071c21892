"""Where a run comes from: the runs that made its models, what those were trained on, and so on down to base models.

::

    ppo  ─┬─ policy ──▶ sft     ─▶ base model
          └─ reward ──▶ reward  ─▶ sft (the same one)

Only read: from ``run.json`` of each run, which records the exact checkpoint behind every model it used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.config.model_spec import parse_run_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rlhf_core.storage import RunStore

TRAJECTORIES = "trajectories"  # the role of the run that a replay trains on
GONE = "there is no such run any more"
MADE_ANEW = "its run was made anew since"
CIRCLE = "its records lead back to this run"

TRAINING = {"rlhf": "trained by rewards", "sft": "SFT", "reward_model": "reward model", "dpo": "DPO"}
ROLES = ("policy", "reference", "critic", "reward")  # in the order in which people think of them
DIGITS = 12  # of a fingerprint, that people see


@dataclass(frozen=True, slots=True)
class RunOrigin:
    """A run and the models it was made from."""

    run_id: str
    url: str
    kind: str  # rlhf, sft, reward_model or dpo
    datasets: tuple[str, ...]  # it was trained on, as its configuration names them
    fingerprint: str  # of what was read from them
    models: tuple[ModelOrigin, ...]


@dataclass(frozen=True, slots=True)
class ModelOrigin:
    """A model that a run used; or the run whose trajectories it trained on."""

    roles: tuple[str, ...]  # in that run: policy, reference, critic, reward; trajectories
    spec: str  # as its configuration names it
    url: str | None = None  # of the checkpoint; None: of no run, so a base model. Of trajectories: of the run
    version: int | None = None  # None of a base model, and of trajectories
    digest: str | None = None  # of its files
    run: RunOrigin | None = None  # that made it
    problem: str | None = None  # why there is none, although a run made it


def ancestry(store: RunStore) -> RunOrigin | None:
    """The tree of runs behind a run; None if there is no such run. A run that two others used is one object in it."""
    body = store.read_run()
    return None if body is None else _Walk().origin(store, body, ())


def draw(origin: RunOrigin) -> list[str]:
    """The tree as lines of text; a run that is in it twice is shown once."""
    return [_headline(origin), *_branches(origin, set())]


class _Walk:
    """Follows the records, each run once."""

    def __init__(self) -> None:
        self._known: dict[str, RunOrigin] = {}

    def origin(self, store: RunStore, body: Mapping[str, Any], below: Sequence[str]) -> RunOrigin:
        """``below``: URLs of the runs that were made from this one."""
        if store.url not in self._known:
            data, used_at, path = body["config"]["data"], body["created_at"], (*below, store.url)
            models = [self._model(roles, model, store, used_at, path) for roles, model in _by_model(body["models"])]
            if body.get("replay"):
                models.append(self._source(body["replay"], store, used_at, path))
            exports: Mapping[str, Any] = body.get("exports", {})
            models += [self._exported(dataset, made, store, path) for dataset, made in exports.items()]
            self._known[store.url] = RunOrigin(
                run_id=store.run_id,
                url=store.url,
                kind=body.get("kind", "rlhf"),
                datasets=tuple(data.get("dataset") or data["prompt_dataset"]),
                fingerprint=body["plan"]["fingerprint"],
                models=tuple(models),
            )
        return self._known[store.url]

    def _model(
        self, roles: tuple[str, ...], model: Mapping[str, Any], user: RunStore, used_at: str, below: Sequence[str]
    ) -> ModelOrigin:
        if "version" not in model:
            return ModelOrigin(roles, model["spec"])
        run, problem = self._run(_maker(model["spec"], user), used_at, below)
        return ModelOrigin(roles, model["spec"], model["url"], model["version"], model["digest"], run, problem)

    def _source(self, replay: Mapping[str, Any], user: RunStore, used_at: str, below: Sequence[str]) -> ModelOrigin:
        """Where a replay has its trajectories from."""
        first, last = replay["iterations"]
        root, _, run_id = replay["source_url"].rpartition("/")
        run, problem = self._run(user.neighbour(run_id, root), used_at, below)
        spec = f"iterations {first}..{last} of {run_id}"
        return ModelOrigin((TRAJECTORIES,), spec, replay["source_url"], run=run, problem=problem)

    def _exported(self, dataset: str, made: Mapping[str, Any], user: RunStore, below: Sequence[str]) -> ModelOrigin:
        """Where a dataset of ``rlhf export`` has its examples from."""
        first, last = made["iterations"]
        root, _, run_id = made["source_url"].rpartition("/")
        run, problem = self._run(user.neighbour(run_id, root), made["created_at"], below)
        altered = ", altered since" if made["altered"] else ""
        spec = f"{dataset}{altered}, from iterations {first}..{last} of {run_id}"
        return ModelOrigin((TRAJECTORIES,), spec, made["source_url"], run=run, problem=problem)

    def _run(self, maker: RunStore, used_at: str, below: Sequence[str]) -> tuple[RunOrigin | None, str | None]:
        """A run that another used; or why there is none."""
        body = maker.read_run()
        run = problem = None
        if body is None:
            problem = GONE
        elif body["created_at"] > used_at:  # ISO times, all in UTC
            problem = MADE_ANEW
        elif maker.url in below:
            problem = CIRCLE
        else:
            run = self.origin(maker, body, below)
        return run, problem


def _maker(spec: str, user: RunStore) -> RunStore:
    """The run that a ``run:`` name names. One without a URL lies beside the run that uses it."""
    named = parse_run_model(spec)
    return user.neighbour(named.run_id, named.root)


def _by_model(models: Mapping[str, Mapping[str, Any]]) -> list[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """(roles, model): roles that use the same checkpoint, or the same base model, together."""
    found: list[tuple[list[str], Mapping[str, Any]]] = []
    for role in sorted(models, key=lambda role: (ROLES.index(role) if role in ROLES else len(ROLES), role)):
        model = models[role]
        for roles, known in found:
            if known.get("url", known["spec"]) == model.get("url", model["spec"]):
                roles.append(role)
                break
        else:
            found.append(([role], model))
    return [(tuple(roles), model) for roles, model in found]


def _headline(origin: RunOrigin) -> str:
    return f"{origin.run_id}: {_trained(origin)} (fingerprint {origin.fingerprint[:DIGITS]})"


def _trained(origin: RunOrigin | None) -> str:
    return "" if origin is None else f"{TRAINING.get(origin.kind, origin.kind)} on {', '.join(origin.datasets)}"


def _branches(origin: RunOrigin, shown: set[str]) -> Iterator[str]:
    shown.add(origin.url)
    for model in origin.models:
        last = model is origin.models[-1]
        yield f"{'└─' if last else '├─'} {', '.join(model.roles)}: {_model_line(model, shown)}"
        if model.run is not None and model.run.url not in shown:
            yield from (f"{'   ' if last else '│  '}{line}" for line in _branches(model.run, shown))


def _model_line(model: ModelOrigin, shown: set[str]) -> str:
    if model.url is None:
        return model.spec
    if model.version is None:
        seen = model.run is not None and model.run.url in shown
        return f"{model.spec}{', see above' if seen else f' ({model.problem or _trained(model.run)})'}"
    if model.run is None:
        return f"version {model.version} of {model.spec} ({model.url}): {model.problem}"
    if model.run.url in shown:
        return f"version {model.version} of {model.run.run_id}, see above"
    return f"version {model.version} of {_headline(model.run)}"
