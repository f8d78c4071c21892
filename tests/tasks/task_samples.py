"""Runs whose log is real and whose processes do not exist."""

from minimal_config import config

from rlhf_core.cluster.rollout_worker import DataFacts
from rlhf_core.errors import LeaseError, RlhfError
from rlhf_core.records import Stage, StageManifest
from rlhf_core.storage import CheckpointStore, RunStore
from tasks.plan import RunPlan
from tasks.run import OpenRun


def facts(prompts, **changes):
    return DataFacts(**({"prompts": prompts, "dropped": 0, "fingerprint": "f"} | changes))


class Notebook:
    """A tracker that writes down what it is told."""

    name = "notebook"
    url = "http://tracker/run"

    def __init__(self, told=0):
        self.told = told
        self.starts, self.iterations, self.evaluations, self.checkpoints, self.ends = [], [], [], [], []
        self.best, self.kept, self.reports = [], [], []

    def start(self, run_id, config, tags):
        self.starts.append((run_id, config, tags))

    def logged_iterations(self):
        return self.told

    def log_iteration(self, iteration, metrics, inputs, ended_at):
        self.iterations.append((iteration, metrics, inputs, ended_at))
        self.told = iteration + 1

    def log_evaluation(self, version, metrics, ended_at):
        self.evaluations.append((version, metrics, ended_at))

    def log_checkpoint(self, record):
        self.checkpoints.append(record)

    def log_deleted(self, run_url, kept):
        self.kept.append(list(kept))

    def log_best(self, record):
        self.best.append(record)

    def log_report(self, page):
        self.reports.append(page)
        return f"{self.url}/report.html"

    def finish(self, succeeded):
        self.ends.append(succeeded)

    def close(self):
        self.ends.append("closed")


class Away(Notebook):
    """A tracker that does not answer."""

    def start(self, run_id, config, tags):
        raise RlhfError("the tracker is away")


class Holder:
    """A session whose lease is held, or lost."""

    lost = False

    def check_lease(self):
        if self.lost:
            raise LeaseError("the lease of run 'run' is lost")


def open_run(folder, *overrides, iterations=4, tracker=None, metric_trackers=()):
    checked = config(f"storage.root={folder}", *overrides)
    store = RunStore("run", str(folder))
    plan = RunPlan(prompts=8, dropped=0, fingerprint="f", iterations=iterations, total_steps=iterations)
    return OpenRun("run", checked, store, Holder(), plan, tracker or Notebook(), metric_trackers)


def complete(run, iteration, *, stages=tuple(Stage), checkpoint=False, evaluation=None):
    """Record an iteration as done; it ended at second 100 x (iteration + 1)."""
    stamp = {"started_at": 100.0 * (iteration + 1) - 5, "seconds": 5.0}
    bodies = {
        Stage.ROLLOUT: {"drawn": 8, "cursor_out": {"epoch": 0, "offset": 8 * (iteration + 1)}},
        Stage.REWARD: {"failures": {}},
        Stage.EXPERIENCE: {"ledger": {"drawn": 8, "trained": 7, "failed": 1}, "kl_coef": 0.1},
        Stage.UPDATE: {"digest": f"d{iteration}", "optimizer_steps": iteration + 1, "kl_coef_next": 0.1 + iteration},
    }
    for stage in stages:
        metrics = {f"{stage}/number": float(iteration)}
        body = {**stamp, **bodies[stage], "metrics": metrics}
        run.store.commit(StageManifest("run", iteration, stage, (), 0, 0, iteration, body=body))
    version = iteration + 1
    if checkpoint:
        CheckpointStore(run.store).commit(version, {"digest": f"d{iteration}", **stamp}, [])
    if evaluation is not None:
        run.store.write_evaluation(version, {"parts": [], "metrics": {"eval/score_mean": evaluation}, **stamp})
