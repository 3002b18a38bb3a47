"""Predictor add-ons: what is learned beside untouched weights, in a file of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attendless import UserError
from attendless.convert import convert, predictor
from attendless.convert.predictor import (
    predicts,
    put_predictor,
    read_predictor,
    save_predictor,
    shipped,
)
from attendless.integrations.discovery import find_slots
from attendless.train import Run, distill
from train_toys import toy_folder, toy_vit

SPEC = "sparsifiner:rank=6,keep=0.3"


def learned(attention: str = SPEC):
    """A model whose predictors are off their start."""
    model = convert(toy_vit(), attention, below_breakeven="keep")
    torch.manual_seed(3)
    for site in find_slots(model):
        for value in site.attn.predictor().values() if predicts(site.attn) else ():
            value.data += 0.1 * torch.rand_like(value)
    return model


def saved(model, path: Path) -> Path:
    save_predictor(find_slots(model), "toy", path, {"data": "none"})
    return path


def test_on_top_of_stock_weights_it_computes_the_same(tmp_path: Path) -> None:
    model = learned()
    path = saved(model, tmp_path / "p.safetensors")
    again = convert(toy_vit(), SPEC, below_breakeven="keep", predictor=path)
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(again.eval()(images), model.eval()(images), atol=0, rtol=0)
    assert not torch.equal(convert(toy_vit(), SPEC, below_breakeven="keep").eval()(images), again(images))
    header, tensors = read_predictor(path)
    assert (header["model"], header["layers"], header["card"]) == ("toy", 2, {"data": "none"})
    assert len(tensors) == 4


def test_at_another_size_it_is_resampled(tmp_path: Path) -> None:
    path = saved(learned(), tmp_path / "p.safetensors")
    larger = convert(toy_vit(), SPEC, below_breakeven="keep", size=32, predictor=path)
    assert larger.blocks[0].attn.down.shape == (6, 65)
    assert larger.eval()(torch.randn(1, 3, 32, 32)).isfinite().all()


def test_an_attention_without_a_predictor_needs_none(tmp_path: Path) -> None:
    path = saved(learned(), tmp_path / "p.safetensors")
    full = convert(toy_vit(), "full", predictor=path)
    with pytest.raises(UserError, match="no attention here has one"):
        put_predictor(find_slots(full), path)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    path = saved(learned(), tmp_path / "p.safetensors")
    with pytest.raises(UserError, match=r"rank 6.*rank 7"):
        convert(toy_vit(), "sparsifiner:rank=7", below_breakeven="keep", predictor=path)
    with pytest.raises(UserError, match="no such file, and attendless comes with"):
        convert(toy_vit(), SPEC, below_breakeven="keep", predictor="nothing")
    part = saved(learned(f"full/{SPEC}"), tmp_path / "part.safetensors")
    with pytest.raises(UserError, match=r"no weights for blocks\.0"):
        convert(toy_vit(), SPEC, below_breakeven="keep", predictor=part)


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "other"])
def test_damaged_files_are_told(tmp_path: Path, damage: str) -> None:
    path = saved(learned(), tmp_path / "p.safetensors")
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-5] ^= 255
    elif damage == "other":
        from safetensors.torch import save

        data = bytearray(save({"x": torch.zeros(2)}))
    path.write_bytes(data[: len(data) // 2] if damage == "truncate" else b"" if damage == "empty" else data)
    with pytest.raises(UserError, match=r"damaged|not a predictor"):
        read_predictor(path)


def test_distilling_leaves_one_and_the_backbone_alone(tmp_path: Path) -> None:
    teacher, folder = toy_vit(), toy_folder(tmp_path / "toy")
    distill(
        teacher, folder, attention=SPEC, out=tmp_path / "run", run=Run(workers=0), batch=4,
        change={"new": "epochs=1", "all": "epochs=0"},
    )  # fmt: skip
    made = convert(teacher, SPEC, below_breakeven="keep", predictor=tmp_path / "run" / "predictor.safetensors")
    start = convert(teacher, SPEC, below_breakeven="keep")
    assert not torch.equal(made.blocks[0].attn.up, start.blocks[0].attn.up)
    torch.testing.assert_close(made.blocks[0].attn.qkv.weight, teacher.blocks[0].attn.qkv.weight, atol=0, rtol=0)
    distill(
        teacher, folder, attention=SPEC, out=tmp_path / "on", run=Run(workers=0), batch=4,
        predictor=tmp_path / "run" / "predictor.safetensors", change={"new": "epochs=0", "all": "epochs=1,loss.maps=1"},
    )  # fmt: skip
    assert not (tmp_path / "on" / "predictor.safetensors").exists()


def test_those_that_are_shipped_can_be_read() -> None:
    for name in shipped():
        header, tensors = read_predictor(name)
        model, _, rest = name.rpartition("-")
        assert header["model"] == model
        assert (f"rest={rest}" in header["card"]["attention"]) == (rest != "dropped")
        assert sum(value.nbytes for value in tensors.values()) < 1_000_000


def test_a_models_name_stands_for_what_was_learned_for_each_layers_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests = ("dropped", "pooled")
    learned_for = {rest: learned(f"{SPEC},rest={rest}") for rest in rests}
    learned_for["pooled"].blocks[1].attn.up.data += 0.3
    for rest, model in learned_for.items():
        saved(model, tmp_path / f"toy-{rest}.safetensors")
    found = {f"toy-{rest}": tmp_path / f"toy-{rest}.safetensors" for rest in rests}
    monkeypatch.setattr(predictor, "shipped", lambda: found)
    both = f"{SPEC}/{SPEC},rest=pooled"
    made = convert(toy_vit(), both, below_breakeven="keep", predictor="toy")
    for block, rest in zip(made.blocks, rests, strict=True):
        index = rests.index(rest)
        assert torch.equal(block.attn.up, learned_for[rest].blocks[index].attn.up)
    asked = convert(toy_vit(), both, below_breakeven="keep", predictor="toy-dropped")
    assert torch.equal(asked.blocks[1].attn.up, learned_for["dropped"].blocks[1].attn.up)

    del found["toy-pooled"]
    with pytest.warns(UserWarning, match="rest=pooled"):
        made = convert(toy_vit(), both, below_breakeven="keep", predictor="toy")
    start = convert(toy_vit(), both, below_breakeven="keep")
    assert torch.equal(made.blocks[1].attn.up, start.blocks[1].attn.up)
    assert torch.equal(made.blocks[0].attn.up, learned_for["dropped"].blocks[0].attn.up)
