"""Prefect flows: the order of steps, nothing else."""
