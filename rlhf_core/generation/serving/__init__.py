"""The OpenAI-compatible server in front of one engine, on vLLM's own serving classes.

::

    client ──HTTP──▶ SessionAccess (whose call is this?) ──▶ vLLM's routes ──▶ Recorded… (vLLM's serving classes)
                                                                                   │ SplicingRenderer: messages ──▶ ids
                                                                                   ▼
                          VllmEngine ◀── RecordingClient: the trainer's sampling in, tokens and log-probs noted

vLLM's internal classes are used here and in ``engine.py``; vLLM is pinned.
"""
