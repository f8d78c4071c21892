"""A scheduler for tests, imported by vLLM's engine core: it pauses by itself when a request has spoken so many tokens."""

import json
from pathlib import Path


def write_halts(path, tokens):
    """Whole or not at all: the other side reads at any time."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(list(tokens)))
    partial.rename(path)


def halting_scheduler(vllm_config, **arguments):
    """The scheduler that the engine would have without us, with halts."""
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.scheduler import Scheduler

    names = vllm_config.additional_config
    path = Path(names["halts"])
    write_halts(path, ())
    own = resolve_obj_by_qualname(names["scheduler"]) if names["scheduler"] else Scheduler
    scheduler = own(vllm_config=vllm_config, **arguments)
    schedule = scheduler.schedule

    def halt_or_schedule(*args):
        halts = json.loads(path.read_text())
        if halts and any(request.num_output_tokens == halts[0] for request in scheduler.running):
            scheduler.set_pause_state(PauseState.PAUSED_ALL)
            write_halts(path, halts[1:])
        return schedule(*args)

    scheduler.schedule = halt_or_schedule
    return scheduler
