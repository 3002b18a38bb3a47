"""How good a model is on a loader's pictures, over all processes, each picture counted once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: Iterable[Any],
    accelerator: Accelerator,
    *,
    labelled: bool = True,
    teacher: nn.Module | None = None,
) -> dict[str, Any]:
    """Top-1 and top-5 in percent and the mean cross-entropy; with a teacher, the share of its answers given.

    Every quantity is a sum over pictures, so processes may hold different numbers of them.
    """
    model.eval()
    device = accelerator.device
    right = right5 = agree = loss = images = skipped = 0.0
    classes = 0
    for pixels, labels, bad in loader:
        skipped += len(bad)
        if pixels is None:
            continue
        pixels, labels = pixels.to(device), labels.to(device)
        logits = model(pixels).float()
        images, classes = images + len(labels), logits.shape[1]
        if labelled:
            ranked = logits.topk(min(5, classes), dim=1).indices == labels[:, None]
            right, right5 = right + ranked[:, 0].sum().item(), right5 + ranked.sum().item()
            loss += F.cross_entropy(logits, labels, reduction="sum").item()
        if teacher is not None:
            agree += (logits.argmax(1) == teacher(pixels).argmax(1)).sum().item()
    wide = torch.float32 if device.type == "mps" else torch.float64
    sums = torch.tensor([right, right5, agree, loss, images, skipped], dtype=wide, device=device)
    right, right5, agree, loss, images, skipped = accelerator.reduce(sums, reduction="sum").tolist()
    found: dict[str, Any] = {"images": int(images), "skipped": int(skipped)}
    if labelled and images:
        found |= {"top1": 100 * right / images, "val_loss": loss / images}
        if classes > 5:
            found["top5"] = 100 * right5 / images
    if teacher is not None and images:
        found["agreement"] = agree / images
    return found
