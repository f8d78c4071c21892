"""A pool of long-lived worker processes. One thread a slot keeps one worker alive and hands it one call at a time.

::

    any event loop ── call() ──▶ queue ──▶ slot thread ──▶ worker process
                                             └─ lost it? start another, then answer

Threads, because a slot only ever waits: the pool then belongs to no event loop, so one may start it and another use it.
They start with the first call and end in ``close``; they are daemons, and workers die with this process by themselves.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.processes.wire import encode
from rlhf_core.rewards.process import CallKind, CallOutcome, LostWorkerError, WorkerProcess
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.rewards.contract import FunctionSpec

log = get_logger(__name__)

START_TIMEOUT = 300.0  # seconds for importing the user's file: it may import a deep-learning framework
START_ATTEMPTS = 3  # a worker may be killed while it loads, for want of memory; three in a row is no accident
IDLE_CHECK = 1.0  # seconds after which an idle slot looks whether its worker still lives

Job = tuple[bytes, "Future[CallOutcome]"]


class _ClosedError(Exception):
    """The pool was closed while a slot worked."""


class WorkerPool:
    """Runs the functions of ``specs`` in ``num_workers`` processes; every call has the same time limit."""

    def __init__(self, specs: Sequence[FunctionSpec], *, num_workers: int, timeout: float) -> None:
        self.num_workers = num_workers
        self._specs = specs
        self._timeout = timeout
        self._lock = threading.RLock()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._pending: set[Future[CallOutcome]] = set()
        self._group_wise: Future[list[bool]] = Future()
        self._workers: dict[int, WorkerProcess] = {}  # by slot
        self._threads: list[threading.Thread] = []
        self._failure: RewardError | None = None  # set once: the pool takes no more calls

    @property
    def worker_count(self) -> int:
        """Processes that are alive now; ``num_workers`` whenever no call is failing at this moment."""
        with self._lock:
            return sum(worker.alive for worker in self._workers.values())

    async def group_wise(self) -> list[bool]:
        """Start the workers if need be; per function, whether it is group-wise. ``RewardError`` if none can start."""
        self._start()
        return await asyncio.shield(asyncio.wrap_future(self._group_wise))

    async def call(self, function: int, columns: dict[str, list[Any]]) -> CallOutcome:
        """Run one call of the function with this index. The limit starts when a worker takes it, not in the queue."""
        self._start()
        try:
            message = encode({"function": function} | columns)
        except (TypeError, ValueError, RecursionError) as error:
            return CallOutcome(CallKind.RAISED, error=f"the sample cannot be sent as JSON: {error}")
        future: Future[CallOutcome] = Future()
        with self._lock:
            self._check_open()
            self._pending.add(future)
        future.add_done_callback(self._forget)
        self._jobs.put((message, future))
        return await asyncio.wrap_future(future)

    async def close(self) -> None:
        """Kill all workers, running calls included. A second call does nothing."""
        self._fail(RewardError("the reward pool is closed"))
        await asyncio.to_thread(self._join)

    # --- the slots ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        with self._lock:
            self._check_open()
            if self._threads:
                return
            for slot in range(self.num_workers):
                thread = threading.Thread(target=self._serve, args=(slot,), name=f"reward-{slot}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, slot: int) -> None:
        """The life of a slot."""
        try:
            worker = self._load(slot, self._spawn(slot))
            while True:
                job = self._next_job()
                if not worker.alive:
                    worker = self._load(slot, self._replace(slot))
                if job is not None and self._claim(job[1]):
                    worker = self._run(slot, worker, job)
        except _ClosedError:
            pass
        except RewardError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - a thread that ends in silence would leave its callers waiting
            self._fail(RewardError(f"a reward worker cannot be kept running: {error!r}"))
        finally:
            if slot in self._workers:
                self._workers[slot].kill()

    def _run(self, slot: int, worker: WorkerProcess, job: Job) -> WorkerProcess:
        """Run a call; the worker for the next one. A lost worker's successor is started before the answer is given."""
        message, future = job
        outcome = worker.call(message, self._timeout)
        if worker.alive:
            self._resolve(future, outcome)
            return worker
        log.warning("reward worker %d was lost: %s", worker.pid, outcome.error)
        successor = self._replace(slot)
        self._resolve(future, outcome)
        return self._load(slot, successor)

    def _load(self, slot: int, worker: WorkerProcess) -> WorkerProcess:
        """A worker that has loaded the functions: this one, or one of its successors."""
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                group_wise = worker.load(self._specs, START_TIMEOUT)
            except ConfigError as error:
                raise RewardError(str(error)) from error
            except LostWorkerError as error:
                if attempt == START_ATTEMPTS:
                    raise RewardError(f"no reward worker can start, after {attempt} attempts: {error}") from error
                worker = self._replace(slot)
            else:
                with self._lock:
                    if not self._group_wise.done():
                        self._group_wise.set_result(group_wise)
                return worker
        raise AssertionError("unreachable")

    def _spawn(self, slot: int) -> WorkerProcess:
        with self._lock:  # a worker that starts while the pool closes would be missed
            if self._failure is not None:
                raise _ClosedError
            self._workers[slot] = WorkerProcess()
            return self._workers[slot]

    def _replace(self, slot: int) -> WorkerProcess:
        self._workers[slot].kill()
        return self._spawn(slot)

    def _next_job(self) -> Job | None:
        """A job, or None after a while without one."""
        try:
            job = self._jobs.get(timeout=IDLE_CHECK)
        except queue.Empty:
            job = None
        if self._failure is not None:
            raise _ClosedError
        return job

    # --- the calls in flight -----------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._failure is not None:
            raise RewardError(str(self._failure))

    def _claim(self, future: Future[CallOutcome]) -> bool:
        with self._lock:
            return not future.done() and future.set_running_or_notify_cancel()

    def _resolve(self, future: Future[CallOutcome], outcome: CallOutcome) -> None:
        with self._lock:
            if not future.done():
                future.set_result(outcome)

    def _forget(self, future: Future[CallOutcome]) -> None:
        with self._lock:
            self._pending.discard(future)

    def _fail(self, error: RewardError) -> None:
        """Take no more calls: kill the workers, and give the error to whoever waits."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            for worker in self._workers.values():
                worker.signal_group()
            waiting: list[Future[Any]] = [*self._pending, self._group_wise]
            for future in waiting:
                if not future.done():
                    future.set_exception(error)
        for _ in self._threads:
            self._jobs.put(None)

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()
