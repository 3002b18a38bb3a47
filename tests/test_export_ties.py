"""Near-ties between tokens to merge: an export that resolves them otherwise is accepted, one that errs is not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attendless
from attendless.errors import UserError
from attendless.export import checks
from attendless.export.features import outputs_of
from attendless.sparse import execution


@pytest.fixture(scope="module")
def model() -> Any:
    """1,024 tokens, of which 30 % remain, so that pairs are equally similar up to rounding in some images."""
    shape = {"img_size": 128, "patch_size": 4, "embed_dim": 24, "depth": 4, "num_heads": 2, "num_classes": 7}
    plain = attendless.Columnar(**shape).eval()
    torch.manual_seed(3)  # after timm's own draws, whose number depends on its version
    with torch.no_grad():
        for parameter in plain.parameters():
            noise = torch.randn(parameter.shape)
            wide = parameter.ndim > 1
            parameter.copy_(noise * parameter[0].numel() ** -0.5 if wide else parameter + 0.05 * noise)
    return outputs_of(attendless.convert(plain, "full", tokens="tome:keep=0.3", below_breakeven="keep")).eval()


@pytest.fixture(scope="module")
@torch.inference_mode()
def images(model: Any) -> Tensor:
    """Two images; the second has a near-tie: between two images, where the model's output jumps."""
    first, low, high = torch.randn(3, 3, 128, 128, generator=torch.Generator().manual_seed(11))
    with execution("torch"):
        for _ in range(24):  # until neighbouring images differ by rounding
            middle = (low + high) / 2
            at_low, at_middle, at_high = model(torch.stack([low, middle, high]))[0]
            below = (at_middle - at_low).norm() > (at_high - at_middle).norm()
            low, high = (low, middle) if below else (middle, high)
    return torch.stack([first, low])


def other_rounding(model: nn.Module, seed: int) -> checks.Run:
    """The same model in a runtime that rounds otherwise."""

    def run(images: Tensor) -> tuple[Tensor, ...]:
        with checks.rounded_otherwise(model, torch.Generator().manual_seed(seed)):
            return tuple(model(images))

    return run


@pytest.fixture(autouse=True)
def _plain() -> Any:
    with execution("torch"):
        yield


def flipping(model: nn.Module, images: Tensor) -> checks.Run:
    """A runtime whose rounding makes another choice in some image."""
    with torch.inference_mode():
        expected = model(images)
        for seed in range(100, 200):
            run = other_rounding(model, seed)
            if checks._apart(run(images), expected).max() > 1e-3:
                return run
    raise AssertionError("no near-tie in these images")


def test_merging_that_resolves_a_tie_otherwise_is_accepted_and_explained(model: nn.Module, images: Tensor) -> None:
    found = checks._compared(flipping(model, images), model, images)
    verdict = checks.judged(found, (2,))
    assert verdict.unsteady == 1
    assert verdict.difference < 1e-5 < 1e-3 < verdict.unsteady_difference <= checks.FACTOR * verdict.unrest
    assert "equal up to rounding and another one was chosen (PyTorch with other rounding: " in str(verdict)


def test_an_error_is_not_taken_for_a_tie(model: nn.Module, images: Tensor) -> None:
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        wrong.get_submodule("model.blocks.0.mlp.fc2").weight[:, 0] *= 1.1
    found = checks._compared(lambda x: tuple(wrong(x)), model, images[:1])
    with pytest.raises(UserError, match=r"an output differs by .*, and by .* at most in PyTorch with other rounding"):
        checks.judged(found, (1,))


def test_nothing_is_left_on_the_model(model: nn.Module) -> None:
    with checks.rounded_otherwise(model, torch.Generator()):
        assert any(module._forward_hooks for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
