"""The lease on a run's processes and their slots: they outlive a crash of their controller, but not its disappearance."""

from __future__ import annotations

import os
import threading
import time

import ray

from rlhf_core.cluster.bundles import release

CHECK_SECONDS = 1.0


class Keeper:
    """Detached Ray actor that ends the run's other actors, and gives its slots back, once nobody has renewed the lease for
    ``seconds``."""

    def __init__(self, namespace: str, seconds: float) -> None:
        self._namespace = namespace
        self._seconds = seconds
        self._names: set[str] = set()
        self._deadline = time.monotonic() + seconds
        threading.Thread(target=self._watch, daemon=True).start()

    def renew(self, names: list[str]) -> float:
        """Keep these actors for another term. Returns its seconds."""
        self._names = set(names)
        self._deadline = time.monotonic() + self._seconds
        return self._seconds

    def _watch(self) -> None:
        while time.monotonic() < self._deadline:
            time.sleep(CHECK_SECONDS)
        for name in self._names:
            try:
                ray.kill(ray.get_actor(name, namespace=self._namespace))
            except ValueError:
                continue  # gone already
        release(self._namespace)
        os._exit(0)  # ray's exit_actor only works on the thread of a call
