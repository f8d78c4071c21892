"""One command each: ``python -m benchmarks.NAME --json FILE``. Each prints a table and writes at least ``{"ratio": ...}``.

Timings of shared machines are noisy: the two sides alternate in one run, and the ratio of their medians is the figure.
"""

import rlhf_core.cluster  # noqa: F401  sets what Ray reads as it is imported
