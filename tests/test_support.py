"""The table of model families, its page in the documentation, and families from a plug-in file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import attendless
from attendless import UserError
from attendless.integrations import support
from attendless.integrations.timm_inplace.attentions import _OF_TIMM

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[1]

#: A model as a user may have it: attention through transformers' interface, two tokens in front of the patches.
PLUGIN = """
import attendless
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class GlanceConfig(PretrainedConfig):
    model_type = "glance"

    def __init__(self, **kwargs):
        self.hidden_size, self.num_attention_heads, self.image_size, self.patch_size = 32, 2, 64, 8
        self.num_extra = 1
        super().__init__(**kwargs)


class GlanceAttend(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.is_causal = config, False
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return self.out(attend(self, q, k, v, None, scaling=0.25)[0].flatten(2))


class GlanceModel(PreTrainedModel):
    config_class = GlanceConfig
    _supports_sdpa = _supports_attention_backend = True

    def __init__(self, config):
        super().__init__(config)
        self.patches = nn.Conv2d(3, 32, 8, stride=8)
        self.first = nn.Parameter(torch.randn(1, 2, 32))
        self.layers = nn.ModuleList(nn.ModuleDict({"attend": GlanceAttend(config)}) for _ in range(3))
        self.post_init()

    def forward(self, pixel_values):
        x = self.patches(pixel_values).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], dim=1)
        for layer in self.layers:
            x = x + layer["attend"](x)
        return {"last_hidden_state": x}


attendless.register_family("glance", GlanceAttend, prefix="1 + num_extra")
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(support, "_HUGGING_FACE", dict(support._HUGGING_FACE))
    (tmp_path / "glance.py").write_text(PLUGIN)
    attendless.load_plugin(tmp_path / "glance.py")
    (module,) = [m for name, m in sys.modules.items() if name.startswith("attendless_plugin_glance_")][-1:]
    torch.manual_seed(0)
    made = module.GlanceModel(module.GlanceConfig(attn_implementation="sdpa"))
    for value in made.parameters():
        torch.nn.init.normal_(value, std=0.2)
    return made.eval()


@torch.no_grad()
def test_a_family_of_a_plugin_is_converted_and_patched(model: Any) -> None:
    x = torch.randn(2, 3, 64, 64)
    before = model(x)["last_hidden_state"]
    for exact, apart in (("foveal:keep=1", False), ("foveal:keep=0.1", True)):
        ours = attendless.convert(model, exact, below_breakeven="keep")
        assert type(ours) is type(model)
        converted = ours(x)["last_hidden_state"]
        assert torch.equal(model(x)["last_hidden_state"], before)
        report = attendless.patch(model, exact, below_breakeven="keep")
        assert [(row.name, row.grid, row.attention) for row in report.layers] == [
            (f"layers.{i}", "2+8x8", exact) for i in range(3)
        ]
        assert torch.equal(model(x)["last_hidden_state"], converted)
        assert attendless.unpatch(model) == 3
        assert torch.equal(model(x)["last_hidden_state"], before)
        assert float((converted - before).norm() / before.norm() > 1e-4) == apart


@torch.no_grad()
def test_a_wrong_prefix_is_noticed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    row = support.Family("glance", "plug-in", ("GlanceAttend",), prefix=1)
    monkeypatch.setitem(support._HUGGING_FACE, "GlanceAttend", row)
    attendless.patch(model, "foveal:keep=0.1", below_breakeven="keep")
    with pytest.raises(UserError, match="cut into 8x8 patches, and 65 arrive at an attention"):
        model(torch.randn(1, 3, 64, 64))


@pytest.mark.usefixtures("model")
def test_one_attention_class_belongs_to_one_family() -> None:
    attendless.register_family("glance", "GlanceAttend", prefix="1 + num_extra")  # the same once more
    assert "Hugging Face glance" in support.convertible()
    with pytest.raises(UserError, match="attention class 'GlanceAttend' belongs to the family 'glance' already"):
        attendless.register_family("other", "GlanceAttend")
    with pytest.raises(UserError, match="attention class 'BeitAttention' belongs to the family 'beit' already"):
        attendless.register_family("mine", "BeitAttention")


def test_every_row_says_how_or_why_not() -> None:
    integrations = {"rebuild", "timm_blocks", "timm_inplace", "hf_interface"}
    for row in support.families():
        assert bool(row.refused) is not bool(row.convert or row.patch), row.name
        assert {row.convert, row.patch} - {""} <= integrations, row.name
        assert row.attention or row.models, row.name
    kinds = [kind for row in support.families() for kind in row.attention]
    assert len(kinds) == len(set(kinds))


def test_the_table_and_the_adapted_classes_agree() -> None:
    rows = [row for row in support.families() if row.library == "timm" and row.patch == "timm_inplace"]
    assert set(support._classes(name for row in rows for name in row.attention)) == set(_OF_TIMM)


def test_the_page_is_the_table() -> None:
    made = [sys.executable, str(ROOT / "docs" / "make_support.py"), "-"]
    page = subprocess.run(made, capture_output=True, text=True, check=True).stdout
    assert page == (ROOT / "docs" / "support.md").read_text(), "run: python docs/make_support.py"
