"""Processes in which code of the user's runs: framing, output, and the promise that nothing outlives the controller.

::

    OwnedProcess (owned.py)        a Python module in a session of its own: reward workers, templates
    Template (forking.py)          one such process that has imported the user's file, and forks a process an episode
        └─ template.py             its inside: load once, fork on request, reap, kill what is left behind
    ForkedProcess (forked.py)      the process of an episode
        └─ serving.py              its inside: one instance, one call after the other
"""
