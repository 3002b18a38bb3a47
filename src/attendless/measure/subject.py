"""What is measured: a model, and how a process of its own builds it again without being handed any code."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Attention, join
from ..convert.describe import Description, describe
from ..convert.source import open_model, resize
from ..errors import UserError
from .macs import channels
from .memory import Memory, peak_memory


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, the attention asked for, and the `module:function` and JSON-able arguments that build its like.

    `build` is "" if nothing can build it.
    """

    model: nn.Module
    attention: str
    build: str = ""
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def memory(self, size: tuple[int, int], *, batch: int, threads: int | None) -> Memory:
        """Its peak memory, measured in a process of its own."""
        if not self.build:
            name = type(self.model).__name__
            raise UserError(f"memory was not measured: {name} cannot be built again in a process of its own")
        first = next(self.model.parameters())
        return peak_memory(
            self.build,
            self.arguments,
            size=size,
            batch=batch,
            channels=channels(self.model),
            threads=threads,
            device=str(first.device),
            dtype=str(first.dtype).removeprefix("torch."),
        )


def named(model: str, **opening: Any) -> Subject:
    """A model opened by its name or file; `opening` goes to `open_model`."""
    arguments = {"model": str(model), **opening}
    opened = open_model(**arguments)
    return Subject(opened, opening.get("attention") or attention_of(opened), "attendless.convert:open_model", arguments)


def described(model: nn.Module) -> Subject:
    """A model given as an object."""
    attention = attention_of(model)
    try:
        found = describe(model)
    except UserError:
        return Subject(model, attention)
    arguments = {"host": found.host, "arguments": found.arguments, "attention": getattr(model, "attention", None)}
    return Subject(model, attention, f"{__name__}:rebuild", arguments)


def attention_of(model: nn.Module) -> str:
    """The specs of a model's layers in the shortest text; a model of timm's own attends fully."""
    specs = [module.spec for module in model.modules() if isinstance(module, Attention)]
    return join(specs) if specs else "full"


def rebuild(host: str, arguments: dict[str, Any], attention: str | None) -> nn.Module:
    """A described model, every weight written so that all of it is resident; timm's own without `attention`."""
    description = Description(host, arguments)
    model = description.original() if attention is None else description.build(attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    return model


def original(model: nn.Module) -> nn.Module:
    """The timm model, with its own fused attention, that a converted model came from, with the weights they share."""
    if not hasattr(model, "attention"):
        raise UserError(f"{type(model).__name__} was not converted by attendless: give the dense model as like=")
    dense = describe(model).original()
    weights = model.state_dict()
    dense.load_state_dict({name: weights[name] for name in dense.state_dict()})
    first = next(model.parameters())
    return dense.to(first.device, first.dtype).eval()


def resized(model: nn.Module, size: tuple[int, int]) -> nn.Module:
    """A copy of another input size; the given model is left as it is."""
    model = copy.deepcopy(model)
    resize(model, size)
    return model


def images_for(model: nn.Module, size: tuple[int, int], batch: int) -> Tensor:
    """Noise, the same for every contestant."""
    first = next(model.parameters())
    noise = torch.randn(batch, channels(model), *size, generator=torch.Generator().manual_seed(0))
    return noise.to(first.device, first.dtype)
