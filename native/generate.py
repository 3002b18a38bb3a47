"""Write what is derived from `attendless.sparse.table` outside Python: `operations.hpp` and the table of operations in
docs/writing-a-kernel.md. Run it after a change of the table; tests/test_descriptions.py compares.

    python native/generate.py
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attendless.sparse.descriptions import ELEMENTS, Attribute, Element, Operation, Result, TensorArg
from attendless.sparse.table import NODES, OPERATIONS

ROOT = Path(__file__).resolve().parents[1]
HEADER = ROOT / "native" / "operations.hpp"
DOCS = ROOT / "docs" / "writing-a-kernel.md"
#: The docs table stands between these lines.
BEGIN, END = "<!-- operations: begin, written by native/generate.py -->", "<!-- operations: end -->"
#: C++'s types of attributes; a plan has one of its own.
_NUMBERS = {int: "int64_t", float: "float", bool: "bool"}

_TOP = """\
// Written by native/generate.py from attendless.sparse.table: the arguments of every operation. Do not edit.
//
// `visit` names the arguments in the order Python passes them, `visit_results` the results and functions that return
// their shapes. Python's module, OpenVINO and ONNX Runtime fill in arguments by visiting them; `run` (api.cpp) checks
// them and computes.
//
// Axes: B batch, H heads, N tokens, n patches, D width of a query, E width of a value, R ranks, G 1 or B.
#pragma once

#include <array>
#include <optional>
#include <string_view>

#include "array.hpp"
#include "plans.hpp"

namespace attendless {

// How a tensor may come besides its own shape: as part 0, 1 or 2 of qkv [B, N, 3, H, D]; without one of its axes.
struct Forms {
  int part = -1, omits = -1;
};

template <class... Arguments>
struct List {};
"""


def name_of(op: Operation) -> str:
    return "".join(word.capitalize() for word in op.name.split("_")) + "Arguments"


def is_optional(part: TensorArg | Result) -> bool:
    """A result is optional in C++ if some caller does not ask for it."""
    if isinstance(part, TensorArg):
        return part.optional
    return bool(part.wanted) or not (part.returned and part.in_node)


def tensor_type(part: TensorArg | Result) -> str:
    """The C++ type of a tensor."""
    rank, packed = len(part.axes), part.packed if isinstance(part, TensorArg) else not _strided(part)
    if len(part.elements) > 1:
        inner = f"OneOf<{rank}, {', '.join(f'Element::{element.name}' for element in part.elements)}>"
    else:
        inner = f"Array<{part.elements[0].cpp}, {rank}{'' if packed else ', Storage::strided'}>"
    return f"std::optional<{inner}>" if is_optional(part) else inner


def _strided(result: Result) -> bool:
    return result.tokens_first or "C" in result.axes


def comment(part: TensorArg | Result) -> str:
    return f"[{', '.join(part.axes)}] {', '.join(element.name for element in part.elements)}"


def size(op: Operation, axis: str) -> str:
    """The C++ expression of a result's axis."""
    owner, _, field = axis.partition(".")
    for argument in op.flat:
        if isinstance(argument, Attribute):
            if argument.name == owner:
                call = "" if field in argument.fields else "()"
                return f"size_t({argument.kind.__name__}({owner}).{field}{call})" if field else f"size_t({owner})"
        elif axis in argument.axes and not (argument.optional or argument.omits):
            return f"{argument.name}.shape({argument.axes.index(axis)})"
    raise ValueError(f"{op.name}: no argument has an axis {axis!r}")


def struct(op: Operation) -> str:
    passed = [x for x in op.flat if isinstance(x, TensorArg) or x in op.attributes]
    lines = [f"// {op.about}", f"struct {name_of(op)} {{", f'  static constexpr const char* kName = "{op.name}";']
    if op.node:
        kept = [result for result in op.results if not is_optional(result)]
        lines.append(f'  static constexpr const char* kNode = "{op.node}";')
        kinds = ", ".join(f"Element::{result.elements[0].name}" for result in kept)
        lines.append(f"  static constexpr std::array<Element, {len(kept)}> kNodeResults = {{{kinds}}};")
    visits = []
    for argument in passed:
        if isinstance(argument, TensorArg):
            lines.append(f"  {tensor_type(argument)} {argument.name};  // {comment(argument)}")
            forms = _forms(argument)
            visits.append(f'    on.tensor("{argument.name}", {argument.name}{forms});')
        elif argument.is_plan:
            lines.append(f"  Fields<{argument.kind.__name__}> {argument.name};")
            visits.append(f'    on.attribute("{argument.name}", {argument.name});')
        else:
            lines.append(f"  {_NUMBERS[argument.kind]} {argument.name} = {argument.default};")
            visits.append(f'    on.attribute("{argument.name}", {argument.name});')
    lines.append("  int64_t threads = 1;")
    results = []
    for result in op.results:
        lines.append(f"  {tensor_type(result)} {result.name};  // {comment(result)}")
        sizes = ", ".join(size(op, axis) for axis in result.axes)
        results.append(
            f'    on.result("{result.name}", {result.name}, [&] {{ return Shape<{len(result.axes)}>{{{sizes}}}; }});'
        )
    for name, body in (("visit", visits), ("visit_results", results)):
        lines += ["", "  template <class Visitor>", f"  void {name}(Visitor& on) {{", *body, "  }"]
    return "\n".join([*lines, "};", f"void run(const {name_of(op)}& arguments);", ""])


def _forms(argument: TensorArg) -> str:
    omits = argument.axes.index(argument.omits) if argument.omits else -1
    part = -1 if argument.part is None else argument.part
    if omits >= 0:
        return f", Forms{{{part}, {omits}}}"
    return f", Forms{{{part}}}" if part >= 0 else ""


def header(operations: Sequence[Operation] = OPERATIONS, elements: Sequence[Element] = ELEMENTS) -> str:
    """The text of operations.hpp."""
    plans = {x.kind.__name__: x for op in operations for x in op.attributes if x.is_plan}
    checks = [
        f"static_assert(kElement<{x.cpp}> == Element::{x.name} && "
        f'name_of(Element::{x.name}) == std::string_view("{x.name}"));'
        for x in elements
    ]
    for name, plan in plans.items():
        fields = ", ".join(f'"{field}"' for field in plan.fields)
        checks.append(
            f'static_assert(std::string_view({name}::kName) == "{plan.name}" && has_fields<{name}>({{{fields}}}));'
        )
    lists = {
        "Operations": [name_of(op) for op in operations],
        "Nodes": [name_of(op) for op in operations if op.node],
    }
    ends = [f"using {name} = List<{', '.join(names)}>;" for name, names in lists.items()]
    parts = [
        _TOP,
        "\n".join(checks),
        "",
        *(struct(op) for op in operations),
        *ends,
        "",
        "}  // namespace attendless",
        "",
    ]
    return "\n".join(parts)


def docs_table(operations: Sequence[Operation] = OPERATIONS) -> str:
    """The table of operations, in Markdown."""
    rows = ["| operation | tensors | attributes | results | node |", "|---|---|---|---|---|"]
    for op in operations:
        tensors = ", ".join(_tensor_text(tensor) for tensor in op.tensors)
        attributes = ", ".join(f"`{x.name}`" for x in op.attributes)
        results = ", ".join(f"`{x.name}` [{', '.join(x.axes)}] {_kinds(x.elements)}" for x in op.returned)
        node = f"`{op.node}`" if op.node else ""
        rows.append(f"| `{op.name}`: {op.about} | {tensors} | {attributes} | {results} | {node} |")
    return "\n".join(rows)


def _tensor_text(tensor: TensorArg) -> str:
    axes = ", ".join(f"({axis})" if axis == tensor.omits else axis for axis in tensor.axes)
    return f"`{tensor.name}`{'?' if tensor.optional else ''} [{axes}] {_kinds(tensor.elements)}"


def _kinds(elements: Sequence[Element]) -> str:
    return "/".join(element.name for element in elements)


def docs(text: str) -> str:
    """The docs page with its table renewed."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{docs_table()}\n{END}{after}"


def main() -> None:
    HEADER.write_text(header())
    DOCS.write_text(docs(DOCS.read_text()))
    print(f"{len(OPERATIONS)} operations, {len(NODES)} nodes: {HEADER.name}, {DOCS.name}")


if __name__ == "__main__":
    main()
