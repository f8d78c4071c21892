"""Environments: what a user writes, the process it runs in, and what it says.

::

    AgentInstanceBase (base.py)     the user's class; EnvironmentAgent (rows.py) is ours, for ``env:`` datasets
    Instance (instance.py)          around it, in its own process: answers made plain (answers.py, sampling.py)
    EnvironmentPool (pool.py)       one process an episode; also where functions and executors of users run
"""
