"""The maths, on plain tensors: no models, no files, no processes. Each number it claims is a golden test.

::

    raw reward ─▶ shaping ─▶ estimators (one group at a time) ─▶ returns / GAE ─▶ whitening ─▶ advantages
                             └──────────────────────── advantages.py ────────────────────────┘
    hidden ─▶ logprobs ─▶ losses × corrections (+ kl) ─▶ aggregation ─▶ one number to call backward() on

Shape letters: B rows, T tokens of a row, N tokens or samples in a flat list, G samples of a group, H hidden,
V vocabulary.
"""
