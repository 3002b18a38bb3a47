"""int8 for ONNX Runtime: static quantisation in the QDQ form, by onnxruntime.quantization.

The tool infers the shapes of all tensors first. Its symbolic inference does not know the operators that PyTorch's
exporter writes for reshaping and fails on timm's models; ONNX's own inference is enough, because an exported graph has
fixed shapes but for the batch.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ..measure.precision import saturates
from .int8_settings import Calibration, Int8
from .packages import need


def quantise(path: Path, batches: Calibration, how: Int8) -> None:
    """Quantise a file in its place."""
    need("onnx", "onnxruntime", "onnx")
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.batches = iter(batches)

        def get_next(self) -> dict[str, Any] | None:
            batch = next(self.batches, None)
            return None if batch is None else {"images": batch}

    prepared, made = path.with_name("prepared.onnx"), path.with_name("int8.onnx")
    logging.disable(logging.WARNING)
    try:
        quant_pre_process(path, prepared, skip_symbolic_shape=True)
        quantize_static(
            prepared,
            made,
            Reader(),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["MatMul", "Gemm", "Conv"],
            per_channel=True,
            reduce_range=saturates(),
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            extra_options={"MatMulConstBOnly": True},
        )
    finally:
        logging.disable(logging.NOTSET)
        prepared.unlink(missing_ok=True)
    made.replace(path)
