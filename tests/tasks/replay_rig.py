"""A replay in one process, of a run in one process: see ``filling_rig``."""

from filling_rig import Rig

from rlhf_core.cluster.replay import facts_of, new_replay
from rlhf_core.config.replay import replay_config
from rlhf_core.storage import RunStore
from tasks.opening import run_document
from tasks.plan import make_plan


def record(rig):
    """Write the rig's run.json. Returns the rig."""
    rig.store.write_run(run_document(rig.config, rig.run_id, rig.plan, None))
    return rig


class ReplayRig(Rig):
    """A replay of a recorded run that can be killed and started again.

    Args:
        monkeypatch: pytest's.
        source: the rig of the run.
        changes: as ``rlhf replay --set`` takes them.
        iterations: of the source: (first, last).
        script: of the rewards, where answers are scored anew.
        run_id: of the replay.
    """

    def __init__(self, monkeypatch, source, *changes, iterations=None, script=None, run_id="replay"):
        self.run_id = run_id
        self._monkeypatch, self._script = monkeypatch, script or source._script
        body, root = source.store.read_run(), source.store.root
        self.config = replay_config(body, source.store.url, {"root": root}, changes, iterations)
        self.store = RunStore(self.run_id, root)
        self.prompts = source.prompts
        self.replay, _ = new_replay(self.config, self.run_id)
        self.plan = make_plan(self.config, facts_of(body), slice(self.replay.first, self.replay.last + 1))
        self._act_as_ranks()
