"""The door to Hugging Face: its models attend less as they stand, on the grid that is really there, or say why not."""

from __future__ import annotations

import ast
import copy
import pickle
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attendless
from attendless import UserError
from attendless.integrations.grid_tracking import Watch
from attendless.integrations.hf_interface import interface, towers

transformers = pytest.importorskip("transformers")

from huggingface_models import IMAGE, MODELS, TINY, image, random_weights, words  # noqa: E402

QUICK = ("dinov2", "dinov3_vit", "clip", "yolos", "depth_anything", "siglip2", "sam2")
EVERY = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODELS]


def outputs(answer: Any) -> list[Tensor]:
    """Every tensor of numbers in a model's answer."""
    if isinstance(answer, Tensor):
        return [answer] if answer.is_floating_point() else []
    parts = answer.values() if hasattr(answer, "values") else answer if isinstance(answer, tuple | list) else ()
    return [tensor for part in parts for tensor in outputs(part)]


def run(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    with torch.no_grad():
        return outputs(model(**inputs))


def gradient(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """Of every weight, for some sum of all outputs."""
    model.zero_grad()
    sum(
        (tensor * torch.linspace(-1, 1, tensor.numel()).view(tensor.shape)).sum() for tensor in outputs(model(**inputs))
    ).backward()
    return [value.grad.clone() for value in model.parameters() if value.grad is not None]


def furthest(a: list[Tensor], b: list[Tensor], scale: float = 1.0) -> float:
    """The largest difference, relative to what is `scale` or larger."""
    assert len(a) == len(b) > 0
    return max(float((x - y).abs().max() / x.abs().max().clamp(min=scale)) for x, y in zip(a, b, strict=True))


def needed(name: str) -> Any:
    if MODELS[name].needs:
        pytest.importorskip(MODELS[name].needs)
    return MODELS[name]


def patched(model: Any, attention: str) -> Any:
    """Through transformers' own switch, on the towers alone."""
    for layer in interface.watch(model).layers:
        layer.module.config._attn_implementation_internal = interface.register(attention)
    return model


@pytest.mark.parametrize("name", EVERY)
def test_looking_closely_at_everything_is_the_original(name: str) -> None:
    tiny = needed(name)
    for model, size in tiny.cases():
        inputs = tiny.inputs(model, size)
        torch.manual_seed(2)  # some models draw masks while they run
        then, slope = run(model, inputs), gradient(model, inputs)
        patched(model, "foveal:keep=1")
        torch.manual_seed(2)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "attendless left")
            assert furthest(then, run(model, inputs)) < 1e-4
            steepest = float(max(value.abs().max() for value in slope))  # some are 0 but for rounding
            assert furthest(slope, gradient(model, inputs), steepest) < 1e-4
        less = run(patched(model, "foveal:keep=0.1"), inputs)
        assert furthest(then, less) > 1e-4, "nothing attends less"
        interface.close(model)
        torch.manual_seed(2)
        assert all(map(torch.equal, then, run(model, inputs)))


@pytest.mark.parametrize("name", EVERY)
def test_patches_stand_where_the_table_says(name: str) -> None:
    """One pixel is changed; the token that changes with it, before anything is mixed, is that of its patch."""
    tiny = needed(name)
    model, size = tiny.cases()[-1]
    place = towers.find(model, size).layers[0]
    if place.family.own_grid or name == "siglip2":
        pytest.skip("it is given height and width")
    seen: list[Tensor] = []
    place.module.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args[0] if args else kwargs["hidden_states"]).detach()), with_kwargs=True
    )
    inputs = tiny.inputs(model, size)
    run(model, inputs)
    pixels = next(value for key, value in inputs.items() if key.startswith("pixel_values"))
    row, column = 1, size[1] // 8 - 2
    pixels[..., 8 * row + 4, 8 * column + 4] += 5
    run(model, inputs)
    changed = (seen[0] - seen[-1]).abs().amax((0, 2)).nonzero().flatten().tolist()
    front = place.grid.prefix - place.family.suffixes(place.module.config)
    frame = size[0] * size[1] // 64
    assert changed[0] == front + row * (size[1] // 8) + column
    assert [token - changed[0] for token in changed] == [
        frame * t for t in range(len(changed))
    ]  # a video: each frame's


def test_the_grid_is_the_images_not_one_of_as_many_patches() -> None:
    """Against the model rebuilt for 32 × 128, whose grid is a matter of its making."""
    model = MODELS["dinov2"].make()
    torch.nn.init.zeros_(model.embeddings.position_embeddings)  # which are resampled in two ways
    for size in ((64, 64), (32, 128)):
        inputs = image(*size)
        rebuilt = attendless.convert(model, "foveal:keep=0.1", size=size, below_breakeven="keep")
        expected = rebuilt(inputs["pixel_values"])
        found = patched(copy.deepcopy(model), "foveal:keep=0.1")(**inputs).pooler_output
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_tokens_behind_the_patches_are_seen_by_all() -> None:
    """YOLOS keeps its detection tokens behind: they see every token, as class tokens do."""
    tiny = MODELS["yolos"]
    model = tiny.make()
    inputs = tiny.inputs(model, (64, 64))
    layer = model.encoder.layer[0].attention
    kept = []
    layer.register_forward_hook(lambda *call: kept.append(outputs(call[2])[0].detach()))
    run(model, inputs)
    run(patched(model, "foveal:keep=0.1"), inputs)
    special = [0, *range(65, 70)]
    torch.testing.assert_close(kept[0][:, special], kept[1][:, special])
    assert not torch.allclose(kept[0], kept[1], atol=1e-3)


def test_transformers_own_switch() -> None:
    model = MODELS["dinov2"].make()
    inputs = image(64, 64)
    then = run(model, inputs)
    name = attendless.huggingface.register("foveal:keep=0.1")
    assert name == "attendless:foveal:keep=0.1"
    model.set_attn_implementation(name)
    with pytest.raises(UserError, match=r"nothing watches which grid .* attendless.patch\(model, 'foveal:keep=0.1'\)"):
        run(model, inputs)
    attendless.huggingface.watch(model)
    less = run(model, inputs)
    assert furthest(then, less) > 1e-3
    model.set_attn_implementation("sdpa")
    assert all(map(torch.equal, then, run(model, inputs)))
    model.set_attn_implementation(attendless.huggingface.register("full/foveal:keep=0.1"))
    assert furthest(less, run(model, inputs)) > 1e-4
    model.set_attn_implementation(name)
    assert all(map(torch.equal, less, run(model, inputs)))


def test_a_text_tower_is_left_alone() -> None:
    model = MODELS["clip"].make()
    inputs = words(64, 64)
    with torch.no_grad():
        then = model(**inputs)
    found = attendless.huggingface.watch(model)
    assert set(found.refused) == {f"text_model.encoder.layers.{i}.self_attn" for i in (0, 1)}
    assert found.refused["text_model.encoder.layers.0.self_attn"] == "CLIPAttention: it is not in a vision tower"
    model.set_attn_implementation(attendless.huggingface.register("foveal:keep=0.1"))
    with torch.no_grad():
        now = model(**inputs)
    attendless.unpatch(model)
    settings = {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}
    assert settings == {"sdpa"}
    with torch.no_grad():
        assert torch.equal(model(**inputs).text_embeds, then.text_embeds)
    torch.testing.assert_close(now.text_embeds, then.text_embeds)
    assert not torch.allclose(now.image_embeds, then.image_embeds, atol=1e-4)


def test_a_mask_is_honoured_and_said_once() -> None:
    """Siglip 2 with padding: the attention runs as it did."""
    tiny = MODELS["siglip2"]
    model = tiny.make()
    inputs = tiny.inputs(model, (64, 64))
    inputs["pixel_attention_mask"][:, 56:] = 0
    inputs["spatial_shapes"][:, 0] = 7
    then = run(model, inputs)
    patched(model, "foveal:keep=0.1")
    interface._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="left a Siglip2Attention as it was: it got a mask") as said:
        assert furthest(then, run(model, inputs)) < 1e-6
    assert len(said) == 1


WHOLE = {**TINY, **IMAGE}
REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "vit_mae": ("ViTMAEModel", "ViTMAEConfig", WHOLE, "ViTMAEAttention: its encoder sees a random part"),
    "beit": ("BeitModel", "BeitConfig", WHOLE, "BeitAttention: its relative position bias is a mask"),
    "data2vec": ("Data2VecVisionModel", "Data2VecVisionConfig", WHOLE, "its relative position bias is a mask"),
    "swin": ("SwinModel", "SwinConfig", {}, "it attends in windows already"),
    "vitdet": ("VitDetModel", "VitDetConfig", WHOLE, "VitDetAttention: it is not behind transformers"),
    "segformer": ("SegformerModel", "SegformerConfig", {}, "its keys are fewer than its queries already"),
    "bert": ("BertModel", "BertConfig", {}, "BertSelfAttention: not a supported vision attention"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(name: str) -> None:
    model, config, arguments, reason = REFUSED[name]
    with torch.device("meta"):
        made = getattr(transformers, model)(getattr(transformers, config)(**arguments))
    with pytest.raises(UserError, match=f"{model} holds no attention that can be served: .*{reason}"):
        attendless.huggingface.watch(made)
    with pytest.raises(UserError, match=f"nothing in {model} can be patched: .*{reason}"):
        attendless.patch(made, "foveal:keep=0.1")


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        ("linformer", "weights of its own"),
        ("window", "window:bias=false has none"),
        ("fastformer", "projections of its own"),
        ("2xfull/foveel", "unknown attention 'foveel'"),
    ],
)
def test_attentions_that_do_not_go_through(attention: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        attendless.huggingface.register(attention)


def test_tokens_without_an_image_are_refused() -> None:
    model = patched(MODELS["dinov2"].make(), "foveal:keep=0.1")
    with pytest.raises(UserError, match="no image went through the model"):
        model.encoder(torch.randn(1, 65, 32))
    run(model, image(64, 64))
    with pytest.raises(UserError, match="8x8 patches, and 59 arrive"):
        model.encoder(torch.randn(1, 60, 32))


def test_threads_do_not_mix_up_their_grids() -> None:
    model = patched(MODELS["dinov2"].make(), "foveal:keep=0.1")
    images = [image(64, 64), image(32, 128)]
    alone = [run(model, inputs) for inputs in images]
    both = threading.Barrier(2)
    found: dict[int, list[Tensor]] = {}

    def meet(*call: Any) -> None:
        both.wait()

    model.encoder.register_forward_pre_hook(meet)

    def work(i: int) -> None:
        found[i] = run(model, images[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for i in (0, 1) for a, b in zip(alone[i], found[i], strict=True))


def test_gradient_checkpointing_knows_the_grid_or_refuses() -> None:
    model = patched(MODELS["dinov2"].make(), "foveal:keep=0.1")
    square, wide = image(64, 64), image(32, 128)
    model.train()
    plain = gradient(model, square)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    assert furthest(plain, gradient(model, square)) < 1e-5
    with pytest.raises(UserError, match="4x16 or 8x8 may be its patches"):
        gradient(model, wide)


def test_a_copy_watches_for_itself() -> None:
    model = patched(MODELS["dinov2"].make(), "foveal:keep=0.1")
    twin = copy.deepcopy(model)
    then = run(model, image(32, 128))
    torch.manual_seed(1)
    inputs = image(64, 64)
    expected = run(model, inputs)
    assert all(map(torch.equal, expected, run(twin, inputs)))
    interface.close(model)
    assert all(map(torch.equal, expected, run(twin, inputs)))
    assert len(then) == len(expected)


@pytest.mark.parametrize("name", ["dinov2", "sam2"])
def test_another_process_gets_a_copy(name: str) -> None:
    model = patched(MODELS[name].make(), "foveal:keep=0.1")
    then = run(model, image(64, 64))
    torch.manual_seed(1)
    inputs = image(32, 128)
    twin = pickle.loads(pickle.dumps(model))
    assert all(map(torch.equal, run(model, inputs), run(twin, inputs)))
    attendless.unpatch(twin)
    assert furthest(run(model, inputs), run(twin, inputs)) > 1e-4
    assert len(then) > 0


@pytest.mark.parametrize("name", ["dinov2", "depth_anything"])
def test_a_graph_that_is_exported_attends_less_too(name: str) -> None:
    """transformers makes a mask that hides nothing for it; with a mask an attention is left as it was."""
    tiny = MODELS[name]
    model = patched(tiny.make(), "foveal:keep=0.1")
    inputs = tiny.inputs(model, (64, 64))
    with torch.no_grad():
        graph = torch.export.export(model, (), kwargs=inputs).module()
        assert furthest(run(model, inputs), outputs(graph(**inputs))) < 1e-5


def test_a_graph_of_shapes_that_are_data_attends_fully_and_that_is_said() -> None:
    """Siglip 2: whether its mask hides anything, and which grid there is, a graph does not know."""
    tiny = MODELS["siglip2"]
    model = tiny.make()
    inputs = tiny.inputs(model, (64, 64))
    then = run(model, inputs)
    patched(model, "foveal:keep=0.1")
    interface._warn_once.cache_clear()
    with torch.no_grad(), pytest.warns(UserWarning, match="left a Siglip2Attention as it was: it got a mask"):
        graph = torch.export.export(model, (), kwargs=inputs).module()
    assert furthest(then, run(graph, inputs)) < 1e-5


@pytest.mark.slow
def test_it_compiles_whole_at_any_size() -> None:
    model = patched(MODELS["dinov2"].make(), "foveal:keep=0.1")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for size in ((64, 64), (32, 128), (40, 40)):
        inputs = image(*size)
        assert all(map(torch.equal, run(model, inputs), run(compiled, inputs)))


def test_patch_and_unpatch_a_depth_model() -> None:
    tiny = MODELS["depth_anything"]
    model = tiny.make()
    inputs, state = tiny.inputs(model, (32, 128)), copy.deepcopy(model.state_dict())
    then, config = run(model, inputs), model.config.to_dict()
    report = attendless.patch(model, "foveal:keep=0.1", size=256, layers="1:")
    assert [layer.attention for layer in report.layers] == ["Dinov2Attention", *["foveal:keep=0.1"] * 3]
    assert report.layers[0].name == "backbone.encoder.layer.0"
    assert report.layers[0].grid == "1+32x32"
    assert "3 of 4 layers converted" in str(report)
    less = run(model, inputs)
    assert furthest(then, less) > 1e-3
    attendless.patch(model, "foveal:keep=1", size=256)  # exchanges what was put
    assert furthest(then, run(model, inputs)) < 1e-4
    assert model.state_dict().keys() == state.keys()
    assert attendless.unpatch(model) == 4
    assert all(map(torch.equal, then, run(model, inputs)))
    assert model.config.to_dict() == config
    hooks = [hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    assert not any(isinstance(getattr(hook, "__self__", None), Watch) for hook in hooks)
    assert attendless.unpatch(model) == 0


@pytest.mark.parametrize("side", [64, 96])
def test_sam_is_folded_by_patch(side: int) -> None:
    """Its attention is not behind transformers' switch; `full` computes the same without the bias."""
    sizes = {"image_size": side, "patch_size": 8, "window_size": 4, "global_attn_indexes": [1]}
    config = transformers.SamVisionConfig(**TINY, **sizes, output_channels=16, mlp_dim=64)
    model = random_weights(transformers.SamVisionModel(config))
    inputs = image(side, side)
    then, slope, state = run(model, inputs), gradient(model, inputs), model.state_dict().keys()
    for attention in ("full", "foveal:keep=1"):
        report = attendless.patch(model, attention, below_breakeven="keep")
        assert not report.unserved
        assert [layer.name for layer in report.layers] == ["vision_encoder.layers.0", "vision_encoder.layers.1"]
        assert furthest(then, run(model, inputs)) < 1e-4
        assert furthest(slope, gradient(model, inputs), float(max(g.abs().max() for g in slope))) < 1e-4
    attendless.patch(model, "foveal:keep=0.1", below_breakeven="keep")
    assert furthest(then, run(copy.deepcopy(model), inputs)) > 1e-3
    assert model.state_dict().keys() == state
    assert attendless.unpatch(model) == 2
    assert all(map(torch.equal, then, run(model, inputs)))
    with pytest.raises(UserError, match=r"SamVisionSdpaAttention: attendless.patch serves it"):
        attendless.huggingface.watch(model)


def test_patch_counts_what_is_left_and_says_why() -> None:
    model = MODELS["sam2"].make()
    report = attendless.patch(model, "foveal:keep=0.1,order=0", size=128, below_breakeven="keep")
    kept = [layer.reason for layer in report.layers if layer.decision == "kept"]
    assert len(report.layers) == 7
    assert kept[0] == "it attends in windows of 4x4 already"
    assert [layer.name for layer in report.layers if layer.decision == "converted"] == ["blocks.2", "blocks.5"]
    text = str(attendless.patch(MODELS["clip"].make(), "foveal:keep=0.1", size=128))
    assert "not exchanged: text_model.encoder.layers.0–1: CLIPAttention: it is not in a vision tower" in text


def test_patch_leaves_a_model_that_gains_nothing_as_it_was() -> None:
    model = MODELS["dinov2"].make()
    report = attendless.patch(model, "foveal:keep=1")
    assert all(layer.decision == "left full" for layer in report.layers)
    with pytest.raises(UserError, match="weights of its own"):
        attendless.patch(model, "linformer")
    assert model.config._attn_implementation == "sdpa"
    assert attendless.unpatch(model) == 0


def test_an_error_at_one_layer_leaves_the_model_as_it_was() -> None:
    model = MODELS["dinov2"].make()
    inputs = image(64, 64)
    then = run(model, inputs)
    with pytest.raises(UserError, match="weights of its own"):
        attendless.patch(model, "foveal:keep=0.1/linformer", below_breakeven="keep")
    assert model.config._attn_implementation == "sdpa"
    assert all(map(torch.equal, then, run(model, inputs)))
    assert attendless.unpatch(model) == 0


def test_importing_attendless_does_not_import_transformers() -> None:
    """Wherever it is imported, that is inside a function."""
    for path in Path(attendless.__file__).parent.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "")]
            )
            assert not any((name or "").startswith("transformers") for name in names), path
