"""Made-up images, and rows that show them."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageOps

from rlhf_core.records import ActionRange, Experience, ImageRef
from rlhf_core.vision import canonical

SIZES = ((56, 56), (60, 30), (30, 60))
TEXTS = ("none", "one <image>?", "two <image> and <image>")  # 0, 1 and 2 images


class Album(dict):
    """sha256 to image: what a run's store is to a loader."""

    def add(self, image):
        """The image in its canonical form."""
        kept = canonical(image)
        self[kept.sha256] = kept
        return kept

    def load(self, image: ImageRef):
        return self[image.sha256]

    def inverted(self, kept):
        """Another image of the same size."""
        return self.add(ImageOps.invert(kept.to_pil()))


def picture(seed, size=SIZES[0]):
    width, height = size
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def show(processor, album, text, seed=0, offset=0):
    """(expanded ids, references to images) of a text with placeholders; each image is another one, of another size."""
    count = text.count(processor.placeholder)
    kept = [album.add(picture(10 * seed + i, SIZES[(seed + i) % len(SIZES)])) for i in range(count)]
    made = processor.tokenise(text, kept)
    refs = [
        ImageRef(image.sha256, f"images/{image.sha256}.png", span.start + offset, span.end + offset)
        for image, span in zip(kept, made.spans, strict=True)
    ]
    return made.token_ids, tuple(refs)


def row(processor, album, text, num_actions, index=0, temperature=1.0):
    """An experience: the text, then actions; old log-probs are near those of a random model."""
    prompt, images = show(processor, album, text, seed=index)
    rng = np.random.default_rng([7, index])
    length = len(prompt) + num_actions

    def on_actions(values):
        values_T = np.zeros(length, dtype=np.float32)
        values_T[len(prompt) :] = values
        return values_T

    old = -5.8 + 0.1 * rng.standard_normal(num_actions)
    return Experience(
        group_id=f"g{index // 4}",
        sample_index=index % 4,
        segment_index=0,
        token_ids=np.array([*prompt, *rng.integers(0, 256, num_actions)], dtype=np.int32),
        action_ranges=(ActionRange(len(prompt), length),),
        rollout_logprobs=on_actions(old),
        old_logprobs=on_actions(old),
        ref_logprobs=None,
        values=None,
        advantages=on_actions(rng.standard_normal()),
        returns=on_actions(0.0),
        reward=0.0,
        shaped_reward=0.0,
        temperature=temperature,
        constrained=False,
        images=images,
    )


def mixed_rows(processor, album, lengths=range(1, 7), **changes):
    """Rows with 0, 1, 2, 0, 1, 2 … images and 1, 2, 3 … actions."""
    return [row(processor, album, TEXTS[i % 3], n, i, **changes) for i, n in enumerate(lengths)]


def own_logprobs(model, processor, album, row):
    """By hand: Hugging Face's whole forward pass on one row, placeholders banned; log-probs of the actions, with a graph."""
    import torch

    ids_1T = torch.from_numpy(np.asarray(row.token_ids, dtype=np.int64))[None]
    shown = processor.model_inputs([[album.load(image) for image in row.images]], ids_1T)
    logits_TV = model(input_ids=ids_1T, **shown).logits[0].float()
    banned = torch.zeros(logits_TV.shape[1])
    banned[sorted(processor.placeholder_ids)] = -100.0
    logp_TV = ((logits_TV + banned) / row.temperature).log_softmax(-1)
    [(start, end)] = row.action_ranges
    positions = torch.arange(start, end)
    return logp_TV[positions - 1, ids_1T[0, positions]]
