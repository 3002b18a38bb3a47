"""Evaluation of a model on the images of a loader, over all processes, each image counted once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ..errors import UserError


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: DataLoader[Any],
    accelerator: Accelerator,
    *,
    labelled: bool = True,
    teacher: nn.Module | None = None,
    name: Callable[[int], str] = str,
) -> dict[str, Any]:
    """Top-1 and top-5 in percent and the mean cross-entropy; with a teacher, the top-1 agreement as a fraction.

    Every quantity is a sum over images, so processes can have different numbers of images. Outputs with NaN or infinity
    raise `UserError` in every process; `name` returns the name of an image by its index.
    """
    model.eval()
    device = accelerator.device
    right = right5 = agree = loss = images = skipped = 0.0
    classes, broken = 0, list[str]()
    draws: Any = loader.batch_sampler
    for batch, (pixels, labels, bad) in zip(draws, loader, strict=True):
        skipped += len(bad)
        if pixels is None:
            continue
        pixels, labels = pixels.to(device), labels.to(device)
        logits = model(pixels).float()
        images, classes = images + len(labels), logits.shape[1]
        readable = [index for _, index, _ in batch if index not in bad.tolist()]
        broken += [name(i) for i, sound in zip(readable, logits.isfinite().all(1).tolist(), strict=True) if not sound]
        if labelled:
            ranked = logits.topk(min(5, classes), dim=1).indices == labels[:, None]
            right, right5 = right + ranked[:, 0].sum().item(), right5 + ranked.sum().item()
            loss += F.cross_entropy(logits, labels, reduction="sum").item()
        if teacher is not None:
            agree += (logits.argmax(1) == teacher(pixels).argmax(1)).sum().item()
    wide = torch.float32 if device.type == "mps" else torch.float64
    sums = torch.tensor([right, right5, agree, loss, images, skipped, len(broken)], dtype=wide, device=device)
    right, right5, agree, loss, images, skipped, wrong = accelerator.reduce(sums, reduction="sum").tolist()
    if wrong:
        first = f", the first {broken[0]!r}" if broken else ""
        raise UserError(f"the model returns NaN or infinity for {wrong:.0f} of {images:.0f} images{first}")
    found: dict[str, Any] = {"images": int(images), "skipped": int(skipped)}
    if labelled and images:
        found |= {"top1": 100 * right / images, "val_loss": loss / images}
        if classes > 5:
            found["top5"] = 100 * right5 / images
    if teacher is not None and images:
        found["agreement"] = agree / images
    return found
