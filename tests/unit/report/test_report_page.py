"""The page of runs of every kind and in every state; what models and users write is text on it, never markup."""

import json
import re
import shutil
import tracemalloc
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from saved_run import save_run

from rlhf_core.errors import WorkerError
from rlhf_core.records import ImageRef, Stage, StageManifest
from rlhf_core.report import report_html
from rlhf_core.storage import (
    LeaseOwner,
    Restart,
    RunStore,
    acquire,
    begin_attempt,
    end_attempt,
    record_sync,
)

DATA = Path(__file__).parents[2] / "data"
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>'\"&amp;"
VOID = {"meta", "img", "link", "br", "input"}


class Page(HTMLParser):
    """Text, headings and tags of a page; complains about what is not closed."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.headings, self.texts, self.ids = [], [], [], [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if self.open and self.open[-1] in ("h1", "h2", "h3", "h4"):
            self.headings.append(self.open[-1])

    @property
    def text(self):
        return " ".join(self.texts)


def page_of(store, failure=None):
    return Page(report_html(store, failure))


def stamp(start, seconds=1.0):
    return {"started_at": start, "seconds": seconds}


def commit(store, iteration, stage, body):
    store.commit(StageManifest(store.run_id, iteration, stage, (), 0, 0, iteration, body=body))


def learn(store, iteration, ledger=None, **metrics):
    """The rest of an iteration whose rollout and rewards are there."""
    account = ledger or {"drawn": 2, "trained": 2}
    commit(
        store,
        iteration,
        Stage.EXPERIENCE,
        {**stamp(10 * iteration + 2), "metrics": {}, "ledger": account, "kl_coef": 0.0},
    )
    body = {
        **stamp(10 * iteration + 3),
        "digest": f"d{iteration}",
        "metrics": {"update/entropy": 1.0 + iteration, **metrics},
    }
    commit(store, iteration, Stage.UPDATE, body)


def test_what_a_model_writes_is_text(tmp_path):
    answers = [(EVIL, 1.0), ("\x00\x1b[31m\u202eabc", 0.5), ("مرحبا بالعالم", 0.0)]
    store = save_run(tmp_path, [[("g0", answers)]], change=lambda *_: {"prompt": EVIL, "messages": None})

    html = report_html(store)
    page = Page(html)

    html.encode()  # UTF-8
    assert EVIL in page.text
    assert not {"script", "iframe"} & {tag for tag, _ in page.tags}
    assert not [attributes for _, attributes in page.tags if any(name.startswith("on") for name in attributes)]
    assert "\x00" not in html
    assert "مرحبا بالعالم" in page.text
    assert all(attributes.get("dir") == "auto" for _, attributes in page.tags if attributes.get("class") == "text")


def test_nothing_is_fetched(tmp_path):
    html = report_html(save_run(tmp_path, [[("g0", [("https://example.org/x.js", 1.0)])]]))

    assert re.findall(r"""(?:src|href|action)=["'](?!#|data:)""", html) == []
    assert re.findall(r"url\((?!#)|@import", html) == []


def test_the_best_and_the_worst_of_an_iteration(tmp_path):
    store = save_run(tmp_path, [[(f"g{k}", [(f"answer-{k}-{j}", k + j / 10) for j in range(3)]) for k in range(4)]])

    page = page_of(store)

    shown = re.findall(r"answer-\d-\d", page.text)
    assert shown == [f"answer-{k}" for k in ("3-2", "3-1", "3-0", "0-2", "0-1", "0-0")]
    assert "best 3.2, worst 0 of 12" in page.text


def test_turns_of_a_conversation_and_images(tmp_path):
    made = {}

    def change(iteration, group, index):
        messages = [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "zoom", "arguments": "{}"}}]},
            {"role": "tool", "content": "<b>closer</b>"},
        ]
        return {"messages": messages, "images": (ImageRef("0" * 64, made["uri"], 0, 1),)}

    store = RunStore("run", str(tmp_path))
    picture = tmp_path / "p.png"
    Image.fromarray(np.full((300, 600, 3), 200, np.uint8)).save(picture)
    made["uri"] = store.put_image(picture.read_bytes())
    save_run(tmp_path, [[("g0", [("a square", 1.0)])]], change=change)

    page = page_of(store)

    [image] = [attributes for tag, attributes in page.tags if tag == "img"]
    assert image["src"].startswith("data:image/jpeg;base64,")
    assert image["alt"] == "image 1 of the prompt"
    assert len(image["src"]) < 5000
    assert "[image]What is it?" in page.text
    assert '→ {"name": "zoom", "arguments": "{}"}' in page.text
    assert "<b>closer</b>" in page.text


def test_headings_tables_and_regions_are_named(tmp_path):
    store = save_run(tmp_path, [[("g0", [("1", 1.0)])]] * 2)
    for iteration in range(2):
        learn(store, iteration)

    page = page_of(store)

    assert page.headings.count("h1") == 1
    assert [tag for tag, attributes in page.tags if tag == "th" and "scope" not in attributes] == []
    assert [tag for tag, attributes in page.tags if tag == "svg" and "aria-label" not in attributes] == []
    assert len(page.ids) == len(set(page.ids))
    assert {attributes["href"][1:] for tag, attributes in page.tags if tag == "a"} <= set(page.ids)


def test_ledger_sums_and_says_when_it_does_not_balance(tmp_path):
    store = save_run(tmp_path, [[("g0", [("1", 1.0)])]] * 2)
    learn(store, 0, {"drawn": 5, "trained": 3, "filtered": 1, "buffered": 1})
    learn(store, 1, {"drawn": 5, "carried": 1, "trained": 6})
    balanced = page_of(store).text
    lost = save_run(tmp_path, [[("g0", [("1", 1.0)])]], run_id="lost")
    learn(lost, 0, {"drawn": 5, "trained": 3})

    assert "Balanced in every iteration." in balanced
    assert re.search(r"the run\s+10\s+0\s+9\s+1\s+0\s+0", re.sub(r"\s+", " ", balanced))
    assert "Not balanced: prompts are lost or counted twice." in page_of(lost).text


def test_failures_with_their_reasons(tmp_path):
    store = save_run(tmp_path, [[("g0", [(None, None), ("1", None), ("2", 1.0)])]])
    (manifest, _) = store.stage(0, Stage.ROLLOUT)
    failed = RunStore("failed", str(tmp_path))
    shutil.copytree(tmp_path / "run", tmp_path / "failed")
    for stage, body in (
        (Stage.ROLLOUT, {"metrics": {"rollout/failed": 1.0}, "resumed_groups": 2}),
        (Stage.REWARD, {"failures": {f"it raised {EVIL}": 1}, "metrics": {}}),
    ):
        _rewrite(failed, stage, body)

    page = page_of(failed)

    assert manifest.rows == 3
    for expected in ("ValueError: no", f"it raised {EVIL}", "groups found published by an earlier attempt: 2"):
        assert expected in re.sub(r"\s+", " ", page.text)


def _rewrite(store, stage, body):
    """A copied run under another name, with another body of a stage."""
    from rlhf_core.storage.documents import decode_document, encode_document

    path = f"iterations/00000000/{stage}.json"
    old = json.loads(store.objects.read(path))
    fields = {name: value for name, value in old.items() if name not in ("checksum", "schema_version")}
    store.objects.put(path, encode_document({**fields, "run_id": store.run_id, "body": body}, "url"))
    run = decode_document(store.objects.read("run.json"), "url")
    store.objects.put("run.json", encode_document({**run, "run_id": store.run_id}, "url"))


@pytest.mark.parametrize("state", ["finished", "running", "failed", "stopped", "ending"])
def test_how_a_run_stands(tmp_path, state):
    store = save_run(tmp_path, [[("g0", [("1", 1.0)])]])
    learn(store, 0)
    first = begin_attempt(store, "node-1", 17, None)
    if state == "failed":
        end_attempt(store, first, WorkerError("rank 1 is gone"), [Restart(5.0, "engine-0 died")])
    if state == "running":
        acquire(store, LeaseOwner.of_this_process(), 60)
    if state == "finished":
        end_attempt(store, first, None, [])
        store.write_end(1)

    page = page_of(store, "WorkerError: rank 1 is gone" if state == "ending" else None)

    [shown] = [attributes["class"] for _, attributes in page.tags if attributes.get("class", "").startswith("status ")]
    assert shown == f"status {'failed' if state == 'ending' else state}"
    assert ("rank 1 is gone" in page.text) == (state in ("failed", "ending"))
    assert ("engine-0 died" in page.text) == (state == "failed")
    assert ("killed" in page.text) == (state == "stopped")


def test_a_run_that_has_not_begun(tmp_path):
    page = page_of(save_run(tmp_path, []))

    assert "No iteration is recorded yet." in page.text
    assert "No stage has a recorded time." in page.text


def test_a_damaged_shard_is_named_and_the_rest_is_shown(tmp_path):
    store = save_run(tmp_path, [[("g0", [("first answer", 1.0)])], [("g1", [("second answer", 0.0)])]])
    [part] = store.stage(0, Stage.ROLLOUT)[0].parts
    store.objects.put(part.path, b"x" * part.bytes)

    page = page_of(store)

    assert "CorruptShardError" in page.text
    assert part.path in page.text
    assert "second answer" in page.text


def test_a_damaged_manifest_is_named_and_the_rest_is_shown(tmp_path):
    store = save_run(tmp_path, [[("g0", [("1", 1.0)])]])
    learn(store, 0)
    store.objects.put("iterations/00000000/update.json", b"{")

    assert "iterations/00000000/update.json" in page_of(store).text


@pytest.mark.parametrize("name", sorted(path.name for path in DATA.glob("log-*")))
def test_logs_of_earlier_versions(tmp_path, name):
    shutil.copytree(DATA / name / "run", tmp_path / "run")

    page = page_of(RunStore("run", str(tmp_path)))

    assert "Best: version 1" in page.text
    assert "The log does not say what the run was made from." in page.text


def test_a_run_on_s3(s3):
    store = save_run(f"s3://{s3.bucket}/reports", [[("g0", [("an answer", 1.0), ("another", 0.0)])]])
    learn(store, 0)

    page = page_of(store)

    assert "an answer" in page.text
    assert "Balanced in every iteration." in page.text


def test_a_sync_is_on_the_timeline(tmp_path):
    store = save_run(tmp_path, [[("g0", [("1", 1.0)])]])
    learn(store, 0)
    record_sync(store, 1, stamp(14.0, 2.0))
    record_sync(store, 1, stamp(99.0, 9.0))  # an iteration that is run again

    html = report_html(store)

    assert "sync of iteration 0: 2 s" in html


def test_a_thousand_iterations_are_a_small_page_in_little_memory(tmp_path):
    store = save_run(tmp_path, [[(f"g{k}", [(f"answer {k} " * 400, 1.0), ("no", 0.0)])] for k in range(40)])
    metrics = {f"update/metric-{k}": 0.5 for k in range(40)}
    for iteration in range(1000):
        body = {**stamp(10 * iteration + 3), "digest": f"d{iteration}", "metrics": metrics}
        commit(store, iteration, Stage.UPDATE, body)
    for iteration in range(100):
        account = {"ledger": {"drawn": 2, "trained": 2}, "metrics": {}}
        commit(store, iteration, Stage.EXPERIENCE, {**stamp(10 * iteration + 2), **account})

    tracemalloc.start()
    html = report_html(store)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert len(html) < 1_000_000
    assert peak < 120 * 2**20
    assert "24 of 100 iterations; the sum is of all" in html
