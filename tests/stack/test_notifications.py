"""Runs that end badly are told to a webhook: a real Prefect server, and a receiver like a chat's.

::

    run of a person   failed                     told
                      crashed, nobody goes on    told
                      crashed, continued         not told
                      stopped, interrupted       not told
    an iteration      failed                     not told: its parent is
"""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from prefect import get_client
from prefect.blocks.system import Secret
from prefect.blocks.webhook import Webhook
from prefect.states import AwaitingRetry, Cancelled, Crashed, Failed, Running
from prefect_http import csrf_headers

from rlhf_cli.notifications import BLOCK, SECRET_BLOCK, set_up_notifications
from rlhf_cli.notify_url import NOTIFY_URL
from rlhf_cli.work_pools import POOL, set_up_pool

pytestmark = pytest.mark.stack

TOKEN = "T0-secret-part-of-the-url"
TOLD_SECONDS = 90
MESSAGE = 'the checker said: "no" & <nothing>\nat line 2'


@pytest.fixture(scope="module")
def receiver():
    """(URL of a webhook, what it was sent: content type and body)."""
    sent = []

    class Chat(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            sent.append((self.headers["Content-Type"], json.loads(body)))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Chat)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/services/{TOKEN}", sent
    server.shutdown()
    server.server_close()


@pytest.fixture
async def deployment(prefect_api):
    """A deployment in the stack's pool, whose runs nobody executes."""
    await set_up_pool()
    async with get_client() as client:
        flow = await client.create_flow_from_name("told")
        made = await client.create_deployment(flow, "train", work_pool_name=POOL, work_queue_name="default")
        yield made
        await client.delete_deployment(made)


@pytest.fixture
async def nobody_told(prefect_api, monkeypatch):
    """Before and after: no variable, no block, no automation."""
    monkeypatch.delenv(NOTIFY_URL, raising=False)
    yield
    monkeypatch.delenv(NOTIFY_URL, raising=False)
    await set_up_notifications()


async def automations():
    async with get_client() as client:
        return await client.read_automations_by_name("rlhf-notify")


async def blocks():
    async with get_client() as client:
        documents = await client.read_block_documents_by_type(Webhook.get_block_type_slug())
    return [document.name for document in documents]


async def ended(deployment, name, *states, queue="default"):
    """A run that was in these states, one after the other."""
    async with get_client() as client:
        run = await client.create_flow_run_from_deployment(deployment, name=name, work_queue_name=queue)
        for state in (Running(), *states):
            await client.set_flow_run_state(run.id, state, force=True)
    return run


async def test_runs_that_end_badly_are_told_and_the_url_stands_nowhere(
    nobody_told, deployment, receiver, prefect_api, home, monkeypatch
) -> None:
    url, sent = receiver
    monkeypatch.setenv(NOTIFY_URL, "http://127.0.0.1:9/of-yesterday")
    await set_up_notifications()
    (before,) = await automations()
    monkeypatch.setenv(NOTIFY_URL, url)
    await set_up_notifications()
    assert await automations() == [before], "another URL is another text of the block, and nothing else"

    await ended(deployment, "iteration", Failed(message="told by its parent"), queue="children")
    await ended(deployment, "continued", Crashed(), AwaitingRetry())
    await ended(deployment, "stopped", Cancelled(name="Stopped"))
    await ended(deployment, "interrupted", Crashed(name="Interrupted"))
    failed = await ended(deployment, "night", Failed(message=MESSAGE))
    await ended(deployment, "lost", Crashed(message=""))
    async with asyncio.timeout(TOLD_SECONDS):
        while len(sent) < 2:
            await asyncio.sleep(0.2)

    await asyncio.sleep(1)
    (kind, _), (other_kind, _) = sent
    assert (kind, other_kind) == ("application/json", "application/json")
    texts = sorted(body["text"] for _, body in sent)
    page = f"{prefect_api.removesuffix('/api')}/runs/flow-run/"
    assert texts[1] == f"Run night of rlhf/train: Failed. {MESSAGE}\n{page}{failed.id}"
    assert texts[0].startswith(f"Run lost of rlhf/train: Crashed. \n{page}")
    asked = {"json": {}, "headers": csrf_headers(prefect_api), "timeout": 60}
    for shown in ("automations/filter", "block_documents/filter", "events/filter"):
        answer = httpx.post(f"{prefect_api}/{shown}", **asked).raise_for_status()
        assert TOKEN not in answer.text
        assert BLOCK in answer.text or shown == "automations/filter"
    assert TOKEN not in (home / "prefect.log").read_text()


async def test_unset_again_both_are_removed(nobody_told, receiver, monkeypatch) -> None:
    monkeypatch.setenv(NOTIFY_URL, receiver[0])
    await set_up_notifications()
    assert (len(await automations()), await blocks()) == (1, [BLOCK])

    monkeypatch.delenv(NOTIFY_URL)
    await set_up_notifications()
    await set_up_notifications()

    assert (await automations(), await blocks()) == ([], [])


async def test_the_url_may_lie_in_a_secret_block(nobody_told, receiver) -> None:
    await Secret(value=receiver[0]).asave(SECRET_BLOCK)
    try:
        await set_up_notifications()
        loaded = await Webhook.aload(BLOCK)

        assert loaded.url.get_secret_value() == receiver[0]
        assert len(await automations()) == 1
    finally:
        await Secret.adelete(SECRET_BLOCK)
