"""How answers become rewards: one interface, typed results, user code kept in killable processes.

::

    RewardConfig ─ make.py ─▶ WeightedSum (combine.py)          one result per sample, parts logged as reward/<name>
                                 │ one part per function
                              FunctionSource (function_source.py)   batches, retries, one bad sample alone
                                 │ calls
                              WorkerPool (pool.py)                  a thread a slot, one call at a time
                                 │
                              WorkerProcess (process.py)            hard limit, process group, lifeline
                       ══════════╪══════════ framed JSON (wire.py)
                              worker.py                             runs the user's function (functions.py),
                                                                    makes its answer typed (answers.py)

A server or a trained model is another ``RewardSource``: a part of the same ``WeightedSum`` that knows nothing of
the pool.
"""

from rlhf_core.rewards.combine import Part, WeightedSum
from rlhf_core.rewards.contract import group_wise
from rlhf_core.rewards.make import check_reward_config, make_reward_source
from rlhf_core.rewards.source import RewardSource

__all__ = ["Part", "RewardSource", "WeightedSum", "check_reward_config", "group_wise", "make_reward_source"]
