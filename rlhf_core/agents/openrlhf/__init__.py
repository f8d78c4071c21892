"""Executors of users in OpenRLHF's style: our side of their process (executor.py), and its inside (process.py)."""
