"""Hugging Face's towers, tiny and random: the same answers, in both generations of key names."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from attendless import UserError
from attendless.convert import convert, convert_with_report, load, open_model, save
from attendless.integrations.rebuild.hf_weights import rename

transformers = pytest.importorskip("transformers")

EXACT = ("full", "foveal:keep=1")
SPARSE = "foveal:keep=0.3,cell=2"
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
MLP = {"intermediate_size": 48}


def tower(name: str, config: str, **arguments: object) -> nn.Module:
    config = getattr(transformers, config)(**TINY, **arguments)
    model = getattr(transformers, name)(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=0.02, std=0.2)
    return model.eval()


TOWERS = {
    "vit classifier": (
        lambda: tower("ViTForImageClassification", "ViTConfig", **MLP, num_labels=7),
        lambda out: out.logits,
    ),
    "vit": (
        lambda: tower("ViTModel", "ViTConfig", **MLP, qkv_bias=False, hidden_act="gelu_pytorch_tanh"),
        lambda out: out.last_hidden_state[:, 0],
    ),
    "dinov2": (lambda: tower("Dinov2Model", "Dinov2Config"), lambda out: out.pooler_output),
    "dinov2 with swiglu": (
        lambda: tower("Dinov2Model", "Dinov2Config", use_swiglu_ffn=True),
        lambda out: out.pooler_output,
    ),
    "dinov2 with registers": (
        lambda: tower("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", num_register_tokens=3),
        lambda out: out.pooler_output,
    ),
    "clip": (lambda: tower("CLIPVisionModel", "CLIPVisionConfig", **MLP), lambda out: out.pooler_output),
    "clip with projection": (
        lambda: tower("CLIPVisionModelWithProjection", "CLIPVisionConfig", **MLP, projection_dim=20),
        lambda out: out.image_embeds,
    ),
}


@pytest.fixture(params=TOWERS)
def model(request: pytest.FixtureRequest) -> tuple[nn.Module, object]:
    make, answer = TOWERS[request.param]
    return make(), answer


def test_the_same_answers_then_sparse_then_a_file(model, tmp_path) -> None:
    theirs, answer = model
    before = {name: value.clone() for name, value in theirs.state_dict().items()}
    x = torch.randn(2, 3, 32, 32)
    for exact in EXACT:
        ours = convert(theirs, exact, below_breakeven="keep")
        with torch.no_grad():
            torch.testing.assert_close(ours(x), answer(theirs(x)), atol=1e-5, rtol=1e-5)
    sparse = convert(theirs, SPARSE, below_breakeven="keep").train()
    sparse(x).square().mean().backward()
    torch.optim.SGD(sparse.parameters(), lr=1e-3).step()
    save(sparse.eval(), tmp_path / "m.safetensors")
    loaded = load(tmp_path / "m.safetensors")
    with torch.no_grad():
        assert torch.equal(loaded(x), sparse(x))
    assert all(torch.equal(value, before[name]) for name, value in theirs.state_dict().items())


def test_another_size_and_the_preparation_of_images() -> None:
    ours = convert(tower("CLIPVisionModel", "CLIPVisionConfig", **MLP), "full", size=(48, 32))
    assert ours(torch.randn(1, 3, 48, 32)).shape == (1, 32)
    assert ours.pretrained_cfg["input_size"] == (3, 48, 32)
    assert ours.pretrained_cfg["mean"] == pytest.approx((0.4815, 0.4578, 0.4082), abs=1e-4)


#: transformers 5 renamed these; models saved or built with 4 still say it the old way.
OLDER = (
    (r"^vit\.layers\.", "vit.encoder.layer."),
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
)


def test_older_key_names_mean_the_same() -> None:
    weights = tower("ViTForImageClassification", "ViTConfig", **MLP, num_labels=7).state_dict()
    older = {}
    for name, value in weights.items():
        for pattern, text in OLDER:
            name = re.sub(pattern, text, name)
        older[name] = value
    assert any("attention.attention.query" in name for name in older)
    new, old = rename(weights), rename(older)
    assert new.keys() == old.keys()
    assert all(torch.equal(new[name], old[name]) for name in new)


@torch.no_grad()
def test_a_folder_is_opened_as_a_model(tmp_path) -> None:
    theirs = tower("ViTForImageClassification", "ViTConfig", **MLP, num_labels=7)
    theirs.save_pretrained(tmp_path / "vit")
    (tmp_path / "vit" / "preprocessor_config.json").write_text('{"image_mean": [0.1, 0.2, 0.3]}')
    ours = open_model(tmp_path / "vit", attention="foveal:keep=1", below_breakeven="keep")
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours(x), theirs(x).logits, atol=1e-5, rtol=1e-5)
    assert ours.pretrained_cfg["mean"] == (0.1, 0.2, 0.3)
    with pytest.raises(UserError, match=r"is not a model's folder: expected config\.json"):
        open_model(tmp_path)
    (tmp_path / "vit" / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match="cannot be opened"):
        open_model(tmp_path / "vit")


@torch.no_grad()
def test_a_model_that_is_not_rebuilt_is_exchanged_in_a_copy(tmp_path) -> None:
    """Its classifier reads the class token beside the mean patch, for which a backbone has no place."""
    theirs = tower("Dinov2ForImageClassification", "Dinov2Config", num_labels=3)
    for name, value in theirs.named_parameters():
        value.mul_(4 if ".attention." in name else 1)  # so that the keys matter
    x = torch.randn(2, 3, 32, 32)
    before = theirs(x).logits
    ours, report = convert_with_report(theirs, "foveal:keep=1", below_breakeven="keep", check=x)
    assert type(ours) is type(theirs)
    assert [row.decision for row in report.layers] == ["converted"] * len(report.layers)
    torch.testing.assert_close(ours(x).logits, before, atol=1e-5, rtol=1e-5)
    assert report.difference is not None
    assert report.difference.largest < 1e-4
    sparse = convert(theirs, SPARSE, below_breakeven="keep")
    assert not torch.allclose(sparse(x).logits, before, atol=1e-4)
    assert torch.equal(theirs(x).logits, before)
    assert theirs.config._attn_implementation == "sdpa"
    missing = "keeps its own layers, which need every token: transformers' attention interface has no place to remove"
    with pytest.raises(UserError, match=f"tokens='tome:r=2': Dinov2ForImageClassification {missing}"):
        convert(theirs, tokens="tome:r=2")
    with pytest.raises(UserError, match=r"cannot be saved: .* convert the model again after loading"):
        save(sparse, tmp_path / "m.safetensors")


def test_what_cannot_be_converted_is_named() -> None:
    with pytest.raises(UserError, match="BertModel is not supported"):
        convert(transformers.BertModel(transformers.BertConfig(hidden_size=24, num_hidden_layers=1)), "full")
    with pytest.raises(UserError, match="activation 'leaky_relu' is not supported"):
        convert(tower("ViTModel", "ViTConfig", **MLP, hidden_act="leaky_relu"), "full")
    with pytest.raises(UserError, match=r"weight 'encoder\.wings' is not one this version knows"):
        rename({"encoder.wings": torch.zeros(1)})
