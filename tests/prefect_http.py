"""Prefect's API by plain HTTP, where a test does not want Prefect's client."""

import uuid

import httpx


def csrf_headers(api, auth=None):
    """What a request that changes something must bring: a token that only who reads the server's answers has."""
    client = str(uuid.uuid4())  # each has one token: another process that asked in its name would take this one's
    answer = httpx.get(f"{api}/csrf-token", params={"client": client}, auth=auth, timeout=60).raise_for_status()
    return {"Prefect-Csrf-Token": answer.json()["token"], "Prefect-Csrf-Client": client}
