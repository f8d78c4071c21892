"""Controllers of runs whose processes only tell where they are: a process each, on the cluster at $RAY_ADDRESS.

    python slot_controller.py STORY

prints what it saw as one line of JSON. GPUs are numbers to Ray: it hands out those of a machine that has none.
"""

import json
import os
import sys
import time
from types import SimpleNamespace

import ray

from rlhf_core.cluster.bundles import living_groups
from rlhf_core.cluster.connect import connect
from rlhf_core.cluster.groups import ActorGroups, Member, run_members
from rlhf_core.cluster.placement import LIGHT_WORKERS, place
from rlhf_core.config import parse_config
from rlhf_core.errors import DeadlineError

MINIMAL = {
    "actor": {"model_name_or_path": "builtin:tiny", "num_gpus_per_node": 2},
    "data": {"prompt_dataset": "prompts.jsonl"},
    "reward": {"functions": [{"use": "digits"}]},
    "ref": {"num_gpus_per_node": 2},
    "algo": {"kl": {"init_coef": 0.1}},
}
SHARED = ("train.colocate_all=true", "vllm.num_engines=2")
WIDE = ("train.colocate_all=true", "vllm.tensor_parallel_size=2")
SECONDS = 30


class Process:
    """Of a run. Light workers have no index."""

    def __init__(self, context, index=None):
        pass

    def where(self):
        group = ray.util.get_current_placement_group()
        return {"gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "group": group and group.id.hex()}

    def workers(self):
        """The GPUs of actors that are started as vLLM's Ray executor starts its workers."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group, share = ray.util.get_current_placement_group(), float(os.environ["VLLM_RAY_PER_WORKER_GPUS"])
        self.kept = [
            ray.remote(Process)
            .options(
                num_cpus=0,
                num_gpus=share,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=int(index)),
            )
            .remote(None)
            for index in os.environ["VLLM_RAY_BUNDLE_INDICES"].split(",")
        ]
        return [worker["gpus"] for worker in ray.get([each.where.remote() for each in self.kept], timeout=SECONDS)]


def groups_of(run_id, *overrides):
    config = parse_config(MINIMAL, overrides)
    placement = place(config, connect(None))
    members = {
        role: Member(Process, member.count, member.environment)
        for role, member in run_members(config, placement, threads=1).items()
    }
    return ActorGroups(SimpleNamespace(run_id=run_id), members, placement)


def started(groups):
    """Where each process is."""
    groups.reserve(SECONDS)
    actors = {name: actor_of(groups, name) for name in groups.names}
    places = ray.get([actor.where.remote() for actor in actors.values()], timeout=SECONDS)
    return dict(zip(actors, places, strict=True))


def actor_of(groups, name):
    role, _, index = name.rpartition("-")
    return groups.actor(name) if name in LIGHT_WORKERS else groups.actor(role, int(index))


def table(run_id):
    """The run's placement groups."""
    found = living_groups(f"rlhf-{run_id}").values()
    return [[entry["placement_group_id"], entry["strategy"], entry["state"], entry["bundles"]] for entry in found]


def dies():
    """Starts, shows, and is killed; its keeper holds on."""
    groups = groups_of("run", *SHARED)
    places = started(groups)
    ray.get(groups.keeper(600).renew.remote(groups.names), timeout=SECONDS)
    return {"places": places, "table": table("run")}


def succeeds():
    """The next attempt on the same run, then one with other numbers, and the end."""
    same = groups_of("run", *SHARED)
    seen = {"places": started(same), "table": table("run")}

    wide = groups_of("run", *WIDE)
    seen["wide"] = {"places": started(wide), "table": table("run")}
    seen["wide"]["workers"] = ray.get(wide.actor("engine").workers.remote(), timeout=SECONDS)

    try:
        groups_of("other", *SHARED).reserve(1.0)
    except DeadlineError as error:
        seen["refused"] = {"message": str(error), "left": table("other")}

    wide.discard()
    seen["after"] = table("run")
    seen["next"] = {"places": started(groups_of("other", *SHARED)), "table": table("other")}
    return seen


def vanishes():
    """Nobody renews the lease on the processes of the last run."""
    groups = groups_of("other", *SHARED)
    ray.get(groups.keeper(0.1).renew.remote(groups.names), timeout=SECONDS)
    deadline = time.monotonic() + SECONDS
    while (table("other") or free_gpus() < 2.0) and time.monotonic() < deadline:
        time.sleep(0.1)  # the nodes tell what is free some time after a group is gone
    return {"table": table("other"), "free": free_gpus()}


def free_gpus():
    return ray.available_resources().get("GPU", 0.0)


if __name__ == "__main__":
    print(json.dumps({"dies": dies, "succeeds": succeeds, "vanishes": vanishes}[sys.argv[1]]()), flush=True)
    if sys.argv[1] == "dies":
        time.sleep(600)
