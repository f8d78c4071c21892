"""Images: canonical pixels, and what a vision-language model makes of them.

::

    path, URL, bytes, PIL ... ─ sources ─▶ PIL image ─ canonical ─▶ CanonicalImage ─┬─ PNG ─▶ the run's storage
                                                                                    └─ VisionProcessor ─▶ ids, pixel values
"""

from rlhf_core.vision.canonical import CanonicalImage, canonical, from_png
from rlhf_core.vision.processor import ImageSpan, Tokenised, VisionProcessor

__all__ = ["CanonicalImage", "ImageSpan", "Tokenised", "VisionProcessor", "canonical", "from_png"]
