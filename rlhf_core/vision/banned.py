"""How placeholder tokens are kept from being sampled: by engine and trainer in the same way, so that log-probs agree."""

from __future__ import annotations

# Subtracted from the logits of ``VisionProcessor.placeholder_ids``, before the temperature. The most that vLLM's logit_bias
# takes, and enough: of their probability e^(-100 / temperature) is left, 4e-44 at temperature 1 and 2e-22 at 2.
BAN = 100.0
