"""A shard through the log of a run beside raw Arrow IPC of the same table, and beside raw PUT and GET on S3.

::

    raw        pa.ipc.new_file ─▶ file (─▶ fsync) ─▶ memory_map ─▶ read_all
    table      encode ─▶ sha256 ─▶ temporary, fsync, rename ─▶ read, size and sha256 checked ─▶ decode
    records    list[Trajectory] ─▶ RunStore.publish_trajectories ─▶ RunStore.read_trajectories ─▶ list[Trajectory]

Same compression, same batches, and for both sides one core less for Arrow than there is: the log hashes on that core while
Arrow works. In memory (/dev/shm) and on a disk; there raw calls fsync too, because a shard that a power cut takes back is no
log. The sides alternate. The ratio is raw / table in seconds for write and read together, medians of the repeats, the worse one
of the folders; 0.9 is the number to hold. Records are built from the table, and taken apart into one, by what has no raw
counterpart: their figure is given too.

S3 (a SeaweedFS of its own on loopback, or ``--s3 s3://bucket/prefix`` with the usual variables of AWS): one put_object and one
get_object of the same bytes, as ``aws s3 cp`` of a small file, beside the same through the log: sha256, PUT, GET, sha256.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from benchmarks.report import finish
from rlhf_core.records import ActionRange, Part, SamplingParams, StopReason, Trajectory, VersionSpan
from rlhf_core.storage import RunStore, shards
from rlhf_core.storage.digest import sha256_of
from rlhf_core.storage.shards import schema
from rlhf_core.storage.shards.tables import BATCH_ROWS, decode_table, encode_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VOCABULARY = 49_152
SHORTEST, LONGEST = 1000, 4000  # tokens of a row, a quarter of them its prompt
TARGET = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--disk", help="a folder on the disk to measure; default: a temporary one")
    parser.add_argument("--s3", help="s3://bucket/prefix to measure; default: a server of the tests, on loopback")
    parser.add_argument("--threads", type=int, default=max(1, cores() - 1), help="of Arrow")
    arguments = parser.parse_args()
    pa.set_cpu_count(arguments.threads)
    rows = make_rows(arguments.rows)
    data = shards.encode_trajectories(rows).data
    table = decode_table(data, schema.TRAJECTORY)
    sides: dict[str, list[float]] = {}
    facts: dict[str, Any] = {
        "rows": len(rows),
        "raw_mb": round(table.nbytes / 1e6, 1),
        "shard_mb": round(len(data) / 1e6, 1),
        "arrow_threads": pa.cpu_count(),
        "target": TARGET,
    }
    ratios = {}
    for name, parent in (("memory", "/dev/shm"), ("disk", arguments.disk)):
        if name == "memory" and not Path(parent).is_dir():
            continue
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            local = LocalSides(table, rows, Path(folder), durable=name == "disk")
            times = alternate(local.calls, arguments.repeats)
        median = {side: statistics.median(repeats) for side, repeats in times.items()}
        raw = median["raw write"] + median["raw read"]
        ratios[name] = raw / (median["table write"] + median["table read"])
        facts[f"ratio_{name}"] = round(ratios[name], 3)
        facts[f"ratio_{name}_records"] = round(raw / (median["records write"] + median["records read"]), 3)
        sides |= {f"{name} {side}": repeats for side, repeats in times.items()}
    with s3_root(arguments.s3) as root:
        times = alternate(S3Sides(bytes(data), root).calls, arguments.repeats)
    median = {side: statistics.median(repeats) for side, repeats in times.items()}
    facts["ratio_s3"] = round((median["raw put"] + median["raw get"]) / (median["put"] + median["get"]), 3)
    sides |= {f"s3 {side}": repeats for side, repeats in times.items()}
    finish("shards", sides, min(ratios.values()), "ms", facts, arguments.json)


def cores() -> int:
    """Of this process."""
    return len(os.sched_getaffinity(0))


def make_rows(count: int) -> list[Trajectory]:
    """Answers with Zipf's tokens: they compress a little worse than text."""
    generator = np.random.default_rng(0)
    return [make_row(generator, index) for index in range(count)]


def make_row(generator: np.random.Generator, index: int) -> Trajectory:
    length = int(generator.integers(SHORTEST, LONGEST + 1))
    start = length // 4
    logprobs = np.zeros(length, np.float32)
    logprobs[start:] = -generator.exponential(0.5, length - start)
    return Trajectory(
        run_id="benchmark",
        iteration=0,
        prompt_id=f"prompts:{index // 8}",
        group_id=f"0000-{index // 8:08d}",
        sample_index=index % 8,
        datasource="prompts",
        prompt=f"Question {index // 8}: " + " ".join(map(str, generator.integers(0, 1000, 60))),
        label=str(index),
        token_ids=np.minimum(generator.zipf(1.3, length), VOCABULARY - 1).astype(np.int32),
        action_ranges=(ActionRange(start, length),),
        rollout_logprobs=logprobs,
        version_spans=(VersionSpan(start, length, 0),),
        stop_reason=StopReason.EOS,
        sampling=SamplingParams(max_tokens=LONGEST, seed=index),
        answer=" ".join(map(str, generator.integers(0, 1000, 60))),
        metrics={"turns": 1.0},
    )


class LocalSides:
    """The three ways to a folder and back."""

    def __init__(self, table: pa.Table, rows: list[Trajectory], folder: Path, durable: bool) -> None:
        self._table, self._rows, self._durable = table, rows, durable
        self._raw = str(folder / "raw.arrow")
        self._store = RunStore("benchmark", str(folder))
        self._published: dict[str, Part] = {}
        self.calls: dict[str, Callable[[], object]] = {
            "raw write": self._write_raw,
            "table write": self._write_table,
            "records write": self._write_records,
            "raw read": self._read_raw,
            "table read": lambda: self._store.read_table(self._published["table"], schema.TRAJECTORY),
            "records read": lambda: self._store.read_trajectories([self._published["records"]]),
        }

    def _write_raw(self) -> None:
        options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1))
        with pa.OSFile(self._raw, "wb") as file, pa.ipc.new_file(file, self._table.schema, options=options) as writer:
            writer.write_table(self._table, max_chunksize=BATCH_ROWS)
        if self._durable:
            descriptor = os.open(self._raw, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    def _read_raw(self) -> pa.Table:
        with pa.memory_map(self._raw) as file:
            return pa.ipc.open_file(file).read_all()

    def _write_table(self) -> None:
        shard = encode_table(self._table)
        self._store.objects.put("table.arrow", shard.data)
        self._published["table"] = Part("table.arrow", len(self._table), 0, len(shard.data), shard.sha256)

    def _write_records(self) -> None:
        self._published["records"] = self._store.publish_trajectories(0, self._rows)


class S3Sides:
    """The two ways to a bucket and back."""

    def __init__(self, data: bytes, root: str) -> None:
        import botocore.config
        import botocore.session

        self._data = data
        self._bucket, _, self._prefix = root.removeprefix("s3://").partition("/")
        self._store = RunStore("benchmark", root)
        self._part = Part("shard.arrow", 0, 0, 0, "")
        config = botocore.config.Config(s3={"addressing_style": "path"})
        self._client = botocore.session.Session().create_client("s3", config=config)
        self.calls: dict[str, Callable[[], object]] = {
            "raw put": lambda: self._client.put_object(Bucket=self._bucket, Key=self._key, Body=self._data),
            "put": self._put,
            "raw get": lambda: self._client.get_object(Bucket=self._bucket, Key=self._key)["Body"].read(),
            "get": lambda: self._store.read_part(self._part),
        }

    @property
    def _key(self) -> str:
        return f"{self._prefix}/raw.arrow"

    def _put(self) -> None:
        self._part = Part("shard.arrow", 0, 0, len(self._data), sha256_of(self._data))
        self._store.objects.put(self._part.path, self._data)


@contextmanager
def s3_root(given: str | None) -> Iterator[str]:
    """The URL to measure, with a server behind it."""
    if given is not None:
        yield given
        return
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    try:
        from s3_server import S3Server  # type: ignore[import-not-found]
    except ImportError:
        raise SystemExit("run this from a checkout, which holds a server, or name a bucket: --s3 s3://…") from None
    folder = tempfile.mkdtemp(prefix="rlhf-s3-")
    try:
        with S3Server(Path(folder)) as server:
            os.environ |= server.environment
            yield f"s3://{server.bucket}/benchmark"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def alternate(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each call; the first round warms up."""
    sides: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            result = call()
            sides[name].append(1000 * (time.perf_counter() - start))
            del result
    return {name: timed[1:] for name, timed in sides.items()}


if __name__ == "__main__":
    main()
