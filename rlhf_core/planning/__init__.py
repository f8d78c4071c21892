"""What a run will need, before it is queued: memory, storage, time.

::

    Hugging Face config ─ shape ─▶ ModelShape ─┐
    our configuration ─────────────────────────┼─ memory ─▶ each process ─ fit ─▶ per GPU and node; what to change
    placement: who shares which GPU ───────────┘  speed, disk ─▶ seconds and bytes an iteration

Pure arithmetic on plain values, but for ``shape``, which has Transformers build the model on torch's meta device: no weight is
read. The estimates are for the longest rows that the configuration allows, so that what fits here fits there.
"""
