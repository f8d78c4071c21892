"""The local stack's Prefect server: under many writers at once, and asked by a page of another site."""

import asyncio

import httpx
from prefect_http import csrf_headers

AT_ONCE = 64
ANOTHER_SITE = {"Origin": "https://example.org"}


async def test_writers_wait_for_each_other_and_none_is_turned_away(prefect_api):
    """Each 503 would cost Prefect's client seconds of sleep."""
    async with httpx.AsyncClient(base_url=prefect_api, timeout=60, headers=csrf_headers(prefect_api)) as client:
        flow = (await client.post("/flows/", json={"name": "writers"})).json()["id"]
        new = {"flow_id": flow, "state": {"type": "PENDING"}}
        answers = await asyncio.gather(*(client.post("/flow_runs/", json=new) for _ in range(AT_ONCE)))

    assert [answer.status_code for answer in answers] == [201] * AT_ONCE


def test_what_a_page_of_another_site_asks_is_not_done(prefect_api):
    """A browser sends text/plain without asking first, and JSON only where the server lets the site (CORS)."""
    asked = httpx.post(
        f"{prefect_api}/flows/",
        content='{"name": "of-another-site"}',
        headers={**ANOTHER_SITE, "Content-Type": "text/plain"},
    )
    wanted = {"flows": {"name": {"any_": ["of-another-site"]}}}
    found = httpx.post(f"{prefect_api}/flows/filter", json=wanted, headers=csrf_headers(prefect_api))

    assert (asked.status_code, asked.json()) == (403, {"detail": "Missing CSRF token."})
    assert found.json() == []


def test_a_page_of_another_site_reads_no_token(prefect_api):
    answer = httpx.get(f"{prefect_api}/csrf-token", params={"client": "c"}, headers=ANOTHER_SITE)
    preflight = {**ANOTHER_SITE, "Access-Control-Request-Method": "POST"}
    allowed = httpx.options(f"{prefect_api}/flows/", headers=preflight)

    assert "access-control-allow-origin" not in answer.headers
    assert "access-control-allow-origin" not in allowed.headers


def test_the_pages_of_the_server_itself_are_told_to_bring_tokens(prefect_api):
    settings = httpx.get(f"{prefect_api.removesuffix('/api')}/ui-settings")

    assert settings.json()["csrf_enabled"] is True
