"""The logic of the system; knows nothing of Prefect."""

__version__ = "0.1.0"
