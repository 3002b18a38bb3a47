"""The operations of the compiled kernels: one entry each, in the vocabulary of `descriptions`.

After a change here, run `python native/generate.py`, which rewrites `native/operations.hpp` and the table in
docs/writing-a-kernel.md.

Axes: B batch · H heads · N tokens · n patches · D width of a query · E width of a value · R ranks · G 1 or B · C width
of a token · m keys in a list · S, Q, T, K lengths of the block lists.
"""

from __future__ import annotations

from . import flops
from .descriptions import BF16, F32, I32, I64, Attribute, Operation, Result, TensorArg, TensorList, backward
from .foveal import Layout
from .merging import Merging

#: What the forward kernels of an attention read in place and write.
_FORWARD = (F32, BF16)

_Q = TensorArg("q", "B H N D", _FORWARD, part=0)
_K = TensorArg("k", "B H N D", _FORWARD, part=1)
_V = TensorArg("v", "B H N E", _FORWARD, part=2)
_BIAS = TensorArg("key_bias", "B N", optional=True, packed=True)
_SCALE = Attribute("scale", float, default=1)
_OUT = Result("out", "B H N E", _FORWARD, like="q", tokens_first=True)
_LSE = Result("lse", "B H N", in_node=False)
_UNREAD_LSE = Result("lse", "B H N", returned=False, in_node=False)

_FOVEAL = (_BIAS, TensorArg("places", "B n", (I32,), optional=True, packed=True), Attribute("layout", Layout), _SCALE)
_CHOSEN = TensorArg("chosen", "B H layout.tiles layout.budget", (I32,), packed=True)
_CELLS = Result("chosen", _CHOSEN.shape, (I32,), in_node=False)
_UNREAD_CELLS = Result("chosen", _CHOSEN.shape, (I32,), returned=False, in_node=False)

foveal_select = Operation(
    "foveal_select",
    "the cells each tile of queries sees sharply, ascending",
    (_Q, _K, *_FOVEAL),
    (_CELLS,),
    flops.foveal_select,
)
foveal_attend = Operation(
    "foveal_attend",
    "foveal attention to given cells",
    (_Q, _K, _V, *_FOVEAL, _CHOSEN),
    (_OUT, _LSE),
    flops.foveal_attend,
    gradient="foveal_backward",
)
foveal = Operation(
    "foveal",
    "`foveal_select` and `foveal_attend` in one call",
    (_Q, _K, _V, *_FOVEAL),
    (_OUT, _LSE, _CELLS),
    flops.foveal_both,
    gradient="foveal_backward",
)
foveal_forward = Operation(
    "foveal_forward",
    "`foveal` for inference",
    (_Q, _K, _V, *_FOVEAL),
    (_OUT, _UNREAD_LSE, _UNREAD_CELLS),
    flops.foveal_both,
    instead="call foveal",
    node="FovealAttention",
)
foveal_backward = backward(foveal, "foveal_backward", flops.foveal_backward)

block_attend = Operation(
    "block_attend",
    "attention of each tile of queries to a fixed list of keys; a key listed twice counts twice",
    (
        *(_Q, _K, _V, _BIAS),
        TensorList(
            "lists",
            (
                TensorArg("query_start", "S", (I32,), packed=True),
                TensorArg("queries", "Q", (I32,), packed=True),
                TensorArg("key_start", "T", (I32,), packed=True),
                TensorArg("keys", "K", (I32,), packed=True),
            ),
        ),
        _SCALE,
    ),
    (_OUT, _LSE),
    flops.block,
    flops_of_values=True,
    gradient="block_backward",
    node="BlockAttention",
)
block_backward = backward(block_attend, "block_backward", flops.block_backward)

gather_attend = Operation(
    "gather_attend",
    "attention of each query to the first `counts` keys of its own list",
    (
        *(_Q, _K, _V, _BIAS),
        TensorArg("indices", "B H N m", (I32,), packed=True),
        TensorArg("counts", "B H N", (I32,), optional=True, packed=True),
        _SCALE,
    ),
    (_OUT, _LSE),
    flops.gather,
    flops_of_values=True,
    gradient="gather_backward",
    node="GatherAttention",
)
gather_backward = backward(gather_attend, "gather_backward", flops.gather_backward)

_COEFFICIENTS = TensorArg("coefficients", "B H N R")
_BASIS = TensorArg("basis", "G R N", packed=True, omits="G")
_LIMITS = (
    Attribute("budget", int, most="N"),
    Attribute("prefix", int),
    Attribute("tau", float),
    Attribute("top", int),
)
sparsifiner_select = Operation(
    "sparsifiner_select",
    "the `budget` keys of each query's largest positive connectivities, ascending, and their number",
    (_COEFFICIENTS, _BASIS, *_LIMITS),
    (Result("indices", "B H N budget", (I32,)), Result("counts", "B H N", (I32,))),
    flops.sparsifiner_select,
)
sparsifiner = Operation(
    "sparsifiner",
    "`sparsifiner_select` and attention to the chosen keys in one call, with an optional tail for the others",
    (
        *(_Q, _K, _V, _BIAS, _COEFFICIENTS, _BASIS),
        TensorArg("tail_scores", "B H N R", optional=True),
        TensorArg("tail_values", "B H R E", optional=True),
        TensorArg("share", "G N R", optional=True, packed=True, omits="G"),
        *_LIMITS,
        _SCALE,
    ),
    (_OUT, _UNREAD_LSE),
    flops.sparsifiner,
    instead="choose keys with sparsifiner_select and attend with gather_attend",
    node="SparsifinerAttention",
)

merge = Operation(
    "merge",
    "token merging: `plan.r` source patches are averaged with the target whose key is most similar",
    (
        TensorArg("x", "B N C"),
        TensorArg("keys", "B H N D", omits="H", part=1),
        TensorArg("importance", "B N", optional=True, packed=True),
        TensorArg("sizes", "B n", optional=True, packed=True),
        TensorArg("cells", "B n", (I64,), optional=True, packed=True),
        TensorArg("owners", "B plan.cells", (I64,), optional=True, packed=True),
        Attribute("plan", Merging),
        Attribute("protect", float),
    ),
    (
        Result("out", "B plan.remaining C", like="x"),
        Result("sizes_out", "B plan.left", like="x"),
        Result("cells_out", "B plan.left", (I64,)),
        Result("owners_out", "B plan.cells", (I64,)),
    ),
    flops.merge,
    instead="call sparse.merging.merge",
    node="MergeTokens",
)

OPERATIONS = (
    *(foveal_select, foveal_attend, foveal, foveal_forward, foveal_backward),
    *(block_attend, block_backward, gather_attend, gather_backward),
    *(sparsifiner_select, sparsifiner, merge),
)
#: Those that can be exported, by the name of their node.
NODES = {operation.node: operation for operation in OPERATIONS if operation.node}
