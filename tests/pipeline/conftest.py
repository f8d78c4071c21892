"""Real ranks, and an engine, that several modules share: each is started once for all of them."""

import json
import shutil
from types import SimpleNamespace

import pytest
import training_cases as cases


@pytest.fixture(scope="package")
def one_rank():
    pool = cases.RankPool(1)
    yield pool
    pool.close()


@pytest.fixture(scope="package")
def two_ranks():
    pool = cases.RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="package")
async def engine_rig(tiny_model, tmp_path_factory):
    """An engine that reads text, and computes the KV cache of requests in flight again when their weights change."""
    from engine_rig import EngineRig

    folder = tmp_path_factory.mktemp("models") / "two-eos"
    shutil.copytree(tiny_model, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 65], "temperature": 0.3}))
    rig = EngineRig(folder, sleep_level=2)
    await rig.engine.start(version=0)
    yield rig
    await rig.close()


@pytest.fixture(scope="package")
async def seeing(tmp_path_factory):
    """An engine that reads images, and its model as the trainer has it: who changes the model sends it to the engine."""
    import torch
    import vision_rows
    from engine_rig import HaltingSettings
    from transformers import AutoModelForImageTextToText

    from rlhf_core.data.tiny_vision_model import make_tiny_vision_model
    from rlhf_core.generation.engine import VllmEngine

    folder = str(make_tiny_vision_model(tmp_path_factory.mktemp("models") / "tiny-vlm"))
    settings = HaltingSettings(
        model=folder,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=64,
        device="cpu",
        sync_backend="shm",
        cpu_kv_cache_gib=0.25,
        cpu_threads=2,
        max_images=3,
    )
    album = vision_rows.Album()
    engine = VllmEngine(settings, album.load)
    await engine.start(version=0)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    yield SimpleNamespace(engine=engine, folder=folder, model=model, album=album)
    await engine.shutdown()
