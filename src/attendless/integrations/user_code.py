"""What users add to a model and a rebuilt module would lose: hooks, replaced methods, adapters and quantised layers."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from ..backbones.probe import replaced
from ..errors import UserError

_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
#: The projections of an attention, by the names of timm and attendless.
_PROJECTIONS = ("qkv", "q", "kv", "q_proj", "k_proj", "v_proj", "proj")


def refuse_user_code(model: nn.Module, path: str = "", *, inside: bool = True, carried: Collection[str] = ()) -> None:
    """Raise for hooks and replaced methods on `model`, which stands at `path` and is about to be replaced.

    Args:
        model: the module that is replaced by another.
        path: its path, for the message; empty for a whole model.
        inside: whether the modules inside it are replaced too.
        carried: methods of `model` itself whose replacements are copied.
    """
    for name, module in model.named_modules() if inside else [("", model)]:
        where = ".".join(filter(None, (path, name))) or f"this {type(model).__name__}"
        if found := next(_added(module, () if name else carried), ""):
            raise UserError(
                f"{where} has {found}, which the converted copy would not run: remove it, convert, and add it to the "
                "converted model"
            )


def _added(module: nn.Module, carried: Collection[str]) -> Iterator[str]:
    """Each hook and each method that was replaced on the instance."""
    yield from (f"a {text}" for attribute, text in _HOOKS.items() if getattr(module, attribute))
    for name in vars(module):
        if name not in carried and callable(getattr(type(module), name, None)) and replaced(module, name):
            yield f"a `{name}` of its own in place of that of {type(module).__name__}"


def check_projections(attention: nn.Module, path: str) -> None:
    """Raise unless the projections of `attention`, which stands at `path`, are plain linear layers."""
    for name in _PROJECTIONS:
        found = getattr(attention, name, None)
        if isinstance(found, nn.Module) and type(found) not in (nn.Linear, nn.Identity):
            kind = f"{type(found).__module__}.{type(found).__name__}"
            raise UserError(
                f"{path}.{name} is a {kind}: expected torch.nn.Linear. Merge adapters such as LoRA's into the weights "
                "first (peft: merge_and_unload), or add them after converting; quantise after converting "
                "(`attendless export --int8`)"
            )
