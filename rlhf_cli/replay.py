"""``rlhf replay``: what can be made of a run's saved trajectories without any rollout engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_cli.arguments import AsJson, Root, Run, RunId
from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


# Mode -> the options that mean something with it.
MODES = {
    "--reproduce": ("--rewards", "--scratch", "--keep"),
    "--rescore": ("--set", "--name", "--iterations"),
    "--set": ("--iterations", "--run-id"),
}


def replay(
    run: Run,
    reproduce: Annotated[
        str | None, typer.Option(metavar="I..J", help="Do these iterations again, and compare every digest.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="What if: train again with this changed; may be repeated."),
    ] = None,
    rescore: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Score the answers with another reward, and compare: path.py:function, a built-in, the URL of a server, a "
            "reward model; may be repeated: their sum. --set reward.timeout=5 goes with it.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Of --rescore: names the new rewards; the same again goes on.")
    ] = None,
    iterations: Annotated[
        str | None, typer.Option(metavar="I..J", help="Of --set and --rescore: only these; default: all.")
    ] = None,
    run_id: RunId = None,
    score: Annotated[
        bool, typer.Option("--rewards", help="Of --reproduce: score the answers again too, and compare.")
    ] = False,
    scratch: Annotated[
        str | None, typer.Option(metavar="ROOT", help="Of --reproduce: where it works; default: beside the run.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Of --reproduce: do not remove what it made.")] = False,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Use a run's saved trajectories again: --reproduce, what if (--set), or --rescore. Nothing is generated."""
    given = {
        "--reproduce": reproduce,
        "--set": changes,
        "--rescore": rescore,
        "--name": name,
        "--iterations": iterations,
        "--run-id": run_id,
        "--rewards": score,
        "--scratch": scratch,
        "--keep": keep,
    }
    check_options([option for option, value in given.items() if value])
    if rescore is not None:
        from rlhf_cli.rescore import rescore_here

        rescore_here(
            run, rescore, iterations=iterations, name=name, overrides=changes or [], root=root, as_json=as_json
        )
    elif reproduce is not None:
        from rlhf_cli.replays import reproduce_here

        reproduce_here(run, reproduce, score=score, scratch_root=scratch, keep=keep, root=root, as_json=as_json)
    else:
        from rlhf_cli.replays import what_if_here

        what_if_here(run, changes or [], iterations, run_id=run_id, root=root, as_json=as_json)


def check_options(given: Sequence[str]) -> None:
    """Refuse a command line that names no mode, or with an option of another one."""
    mode = next((mode for mode in MODES if mode in given), None)
    if mode is None:
        raise ConfigError(
            "rlhf replay takes one of --reproduce I..J, --set KEY=VALUE and --rescore FILE: none is given"
        )
    strange = [option for option in given if option != mode and option not in MODES[mode]]
    if strange:
        raise ConfigError(f"{', '.join(strange)} cannot be used with {mode}, which takes {', '.join(MODES[mode])}")
