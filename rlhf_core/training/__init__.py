"""DeepSpeed engines, one object per rank: the policy that learns, the frozen reference. The only place with deepspeed.

::

    rows ─▶ plan (every rank, the same) ─▶ collate ─▶ TokenScorer ─▶ log-probs ─▶ objective ─▶ backward ─▶ step
            batching.plan                             model.py                    objective.py  policy.py

Import a module of this package inside the worker process: torch, transformers and deepspeed take seconds.
"""
