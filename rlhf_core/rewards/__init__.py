"""How answers become rewards: one interface, typed results, user code kept in killable processes.

::

    RewardConfig ─ make.py ─▶ WeightedSum (combine.py)          one result per sample, parts logged as reward/<name>,
                                 │                              each on its running scale if asked for (normalise.py)
        ┌────────────────────────┼──────────────────────────┐
    FunctionSource           HttpSource                 ModelSource (model_source.py)
    (function_source.py)     (http_source.py)               │ token ids (model_text.py)
        │ calls                  │ the next server          ranks: whoever makes the source knows where they run
    WorkerPool (pool.py)         │ (http_servers.py)
        │ a thread a slot        │
    WorkerProcess (process.py)   │ hard limit, process group, lifeline
    ════╪══ framed JSON (wire.py)╪═══ JSON of OpenRLHF's reward servers (http_call.py)
    worker.py                 a server
    runs the user's function (functions.py), makes its answer typed (answers.py), as is done with a server's
"""

from rlhf_core.rewards.combine import Part, WeightedSum
from rlhf_core.rewards.contract import group_wise
from rlhf_core.rewards.make import check_functions, check_reward_config, check_servers, make_reward_source
from rlhf_core.rewards.request import reward_request
from rlhf_core.rewards.source import RewardSource

__all__ = [
    "Part",
    "RewardSource",
    "WeightedSum",
    "check_functions",
    "check_reward_config",
    "check_servers",
    "group_wise",
    "make_reward_source",
    "reward_request",
]
