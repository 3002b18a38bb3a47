"""Precisions by name, and where this machine can compute them.

fp32   the default of PyTorch
bf16   weights and activations of 16 bits with the range of fp32: about twice as fast where the CPU has instructions
int8   linear layers quantised to 8-bit integers, calibrated on images; the rest computes in fp32 or bf16
"""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import UserError, unknown
from ..stamp import instructions

PRECISIONS = ("fp32", "bf16", "int8")
#: Instruction sets that compute products of bf16, as Linux names them: x86 and Arm.
_BF16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
#: Instruction sets of x86 that add products of int8 in 32 bits.
_VNNI = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})


def no_bf16() -> str:
    """Why bf16 is not computed here; empty if it is."""
    return "" if _BF16 & instructions() else "this CPU has no bf16 instructions"


def saturates() -> bool:
    """Whether products of int8 are added in 16 bits, which saturate: x86 with AVX2 and without VNNI.

    Weights of 7 bits prevent the overflow.
    """
    return "avx2" in instructions() and not _VNNI & instructions()


def unsupported(precision: str, runtime: str, precisions: tuple[str, ...]) -> str:
    """Why a runtime that knows `precisions` cannot compute in this one here; empty if it can."""
    check_precisions([precision])
    if precision not in precisions:
        return f"{runtime} has no {precision}: it computes in {' or '.join(precisions)}"
    return no_bf16() if precision == "bf16" else ""


def check_precisions(names: Iterable[str]) -> None:
    """Raise `UserError` for a precision that does not exist."""
    for name in names:
        if name not in PRECISIONS:
            raise unknown("precision", name, PRECISIONS)


def check_precision(precision: str, runtime: str, precisions: tuple[str, ...]) -> None:
    """Raise `UserError` where `unsupported` gives a reason."""
    if why := unsupported(precision, runtime, precisions):
        raise UserError(f"precision={precision}: {why}")
