"""What a run tells Prometheus: the families, their values, and the endpoint.

::

    RunMetrics ◀── set, add, observe ── the run's process
        │
        └──▶ GET http://127.0.0.1:PORT/metrics      every sample with run_id, pipeline and algorithm
             $RLHF_HOME/prometheus/{run_id}.json    where that is, for Prometheus' file_sd_configs

Where $RLHF_METRICS_TOKEN is set, a scrape must bring it (Authorization: Bearer).

Names follow Prometheus' conventions: base units, the unit last, ``_total`` on counters. Counters begin at 0 with each attempt.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import Metric

from rlhf_core.telemetry.families import FAMILIES
from rlhf_core.telemetry.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from typing import Any

    from prometheus_client.registry import Collector

logger = get_logger(__name__)

TOKEN = "RLHF_METRICS_TOKEN"


class RunMetrics:
    """The values of ``FAMILIES``. May be used by any thread.

    Args:
        labels: of every sample.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._values: dict[str, dict[tuple[str, ...], list[float]]] = {name: {} for name in FAMILIES}
        self._lock = threading.Lock()

    def set(self, name: str, value: float, **labels: str) -> None:
        """The value of a gauge; or of a counter that somebody else counts."""
        with self._lock:
            self._values[name][self._key(name, labels)] = [value]

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """More of a counter, or of a gauge (less, if negative)."""
        with self._lock:
            held = self._values[name].setdefault(self._key(name, labels), [0.0])
            held[0] += value

    def observe(self, name: str, sum: float, count: float = 1.0, **labels: str) -> None:
        """More of a summary: so much in all, of so many."""
        with self._lock:
            held = self._values[name].setdefault(self._key(name, labels), [0.0, 0.0])
            held[0] += sum
            held[1] += count

    def forget(self, *names: str) -> None:
        """These have no value until they are set again."""
        with self._lock:
            for name in names:
                self._values[name].clear()

    def collect(self) -> Iterator[Metric]:
        """Every family, as ``prometheus_client`` asks for them; those without a value too."""
        with self._lock:
            values = {name: dict(samples) for name, samples in self._values.items()}
        for name, family in FAMILIES.items():
            metric = Metric(name.removesuffix("_total"), family.help, family.kind)
            for key, value in values[name].items():
                labels = {**self._labels, **dict(zip(family.labels, key, strict=True))}
                if family.kind == "summary":
                    metric.add_sample(f"{name}_sum", labels, value[0])
                    metric.add_sample(f"{name}_count", labels, value[1])
                else:
                    metric.add_sample(name, labels, value[0])
            yield metric

    def _key(self, name: str, labels: Mapping[str, str]) -> tuple[str, ...]:
        wanted = FAMILIES[name].labels
        if set(wanted) != labels.keys():
            raise ValueError(f"{name} has the labels {wanted}, not {tuple(labels)}")
        return tuple(labels[label] for label in wanted)


@dataclass
class Endpoint:
    """A listening server, and the file that says where. ``close`` it."""

    server: ThreadingHTTPServer
    found_by: Path

    @classmethod
    def open(cls, metrics: RunMetrics, host: str, port: int, found_by: Path) -> Endpoint:
        """Listen from now on.

        Args:
            metrics: what is told.
            host: address.
            port: 0: any free one; so it is where another process, such as that of another run, has the port.
            found_by: the file for Prometheus.

        Raises:
            OSError: this machine has no such address.
        """

        class Handler(_Handler):
            source = metrics
            token = os.environ.get(TOKEN)

        try:
            server = ThreadingHTTPServer((host, port), Handler)
        except PermissionError:
            raise
        except OSError:
            if port == 0:
                raise
            server = ThreadingHTTPServer((host, 0), Handler)
            logger.warning(
                "port %d is taken: Prometheus finds this run at port %d (%s)", port, server.server_port, found_by
            )
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, name="prometheus", daemon=True).start()
        found_by.parent.mkdir(parents=True, exist_ok=True)
        waiting = found_by.with_suffix(".new")
        waiting.write_text(json.dumps([{"targets": [f"{host}:{server.server_port}"]}]))
        waiting.replace(found_by)
        return cls(server, found_by)

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self.server.server_address[:2]
        return f"http://{host!s}:{port}/metrics"

    def close(self) -> None:
        """Listen no longer. The file goes too: a run that is killed leaves it, and Prometheus sees that it is down."""
        with contextlib.suppress(FileNotFoundError):
            self.found_by.unlink()
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    source: Collector
    token: str | None

    def do_GET(self) -> None:
        """``/metrics``, for whoever has the token, if there is one."""
        given = self.headers.get("Authorization", "").encode()
        if self.token is not None and not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            self.send_error(401, "the bearer token is missing or wrong")
            return
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "only /metrics is here")
            return
        body = generate_latest(self.source)
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE_LATEST)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape is no event."""
