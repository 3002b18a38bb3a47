"""Draw docs/architecture.svg: which part of the package imports which, found in the code.

python docs/draw_architecture.py docs/architecture.svg

The parts and their order come from tests/test_imports.py, the arrows from the imports in the code. An arrow that
follows from others (a imports b, b imports c, so a may import c) is left out. The colours suit light and dark pages.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "src"))

from test_imports import ORDER, graph  # noqa: E402

#: The description of each folder, in two lines.
WORDS = {
    "attendless_cli": (
        "one file per command · attendless_lab: papers, compare, explore, demo",
        "both import the library",
    ),
    "hub": ("models on the Hub,", "with their card"),
    "serve": ("predictions over HTTP,", "in batches"),
    "predict": ("predictions on files;", "shards, a cluster"),
    "show": ("figures: patterns,", "trade-offs"),
    "train": ("loop, recipes, checkpoints,", "distillation"),
    "dense": ("detection, segmentation:", "features, heads, data"),
    "maps": ("attention maps of", "any layer"),
    "export": ("ONNX, OpenVINO, pt2:", "written, checked, opened"),
    "optimize": ("sensitivities, schedules,", "goals: tune, optimize"),
    "measure": ("clock, memory, MACs,", "bench, accuracy"),
    "convert": ("convert, patch,", "reports, files"),
    "integrations": ("ways into timm and transformers:", "one Slot, one support table"),
    "check": ("interface tests of attentions", "and reducers"),
    "backbones": ("isotropic and hierarchical;", "blocks that pass the context"),
    "tokens": ("reducers: token merging", "and pruning"),
    "attention": ("interface, registry,", "one file per mechanism"),
    "sparse": ("operations, one description each,", "backends, policy, costs"),
    "data": ("images by folder or name,", "the embedded scenes"),
}
#: The preferred column of each folder, from the left; the nearest free column is used.
COLUMNS = {"data": 0, "train": 0, "dense": 0, "measure": 1, "optimize": 3, "show": 1, "maps": 2, "check": 3}
COLUMNS |= {"hub": 3, "export": 4, "predict": 4, "serve": 4}
ACROSS = 5
BOX, HEIGHT, GAP_X, GAP_Y, EDGE = 216, 66, 26, 34, 20
FILLS = {
    "attendless_cli": "#5b6770",
    "sparse": "#00795a",
    "attention": "#00795a",
    "tokens": "#00795a",
    "data": "#5b6770",
}
FILLS |= {"backbones": "#0072B2", "integrations": "#0072B2", "convert": "#0072B2"}


def imports() -> dict[str, set[str]]:
    """The folders that each folder imports."""
    found: dict[str, set[str]] = {part: set() for part in ORDER if (ROOT / "src" / "attendless" / part).is_dir()}
    for name, others in graph().items():
        part = name.split(".")[0]
        if part in found:
            found[part] |= {other.split(".")[0] for other in others} & found.keys() - {part}
    return found


def reduced(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """The transitive reduction: the edges that do not follow from others."""

    def below(part: str) -> set[str]:
        return edges[part].union(*(below(other) for other in edges[part]))

    return {part: {o for o in others if not any(o in below(p) for p in others - {o})} for part, others in edges.items()}


def levels(edges: dict[str, set[str]]) -> dict[str, int]:
    def level(part: str) -> int:
        return 1 + max(map(level, edges[part]), default=0)

    return {part: level(part) for part in edges}


def draw() -> str:
    edges = reduced(imports())
    height = levels(edges)
    top = max(height.values()) + 1
    height |= {"attendless_cli": top}
    # `data` imports no other part. It is drawn directly below the lowest part that imports it.
    height["data"] = min(height[part] for part in edges if "data" in edges[part]) - 1
    edges["attendless_cli"] = {part for part in edges if not any(part in others for others in edges.values())}
    height |= dict.fromkeys(edges["attendless_cli"], top - 1)
    width = ACROSS * BOX + (ACROSS - 1) * GAP_X + 2 * EDGE

    column: dict[str, int] = {}
    for part in edges:
        taken = {column[other] for other in column if height[other] == height[part]}
        column[part] = min(set(range(ACROSS)) - taken, key=lambda at: abs(at - COLUMNS.get(part, 1)))

    def place(part: str) -> tuple[int, int]:
        return EDGE + column[part] * (BOX + GAP_X), EDGE + (top - height[part]) * (HEIGHT + GAP_Y)

    lines, boxes = [], []
    for part, others in edges.items():
        x, y = place(part)
        for other in sorted(others):
            to_x, to_y = place(other)
            shift = 0 if to_x == x else (BOX // 4 if to_x > x else -BOX // 4)
            if part == "attendless_cli":
                shift = to_x - x
            a, b = (x + BOX // 2 + shift, y + HEIGHT), (to_x + BOX // 2 - (shift if abs(shift) < BOX // 2 else 0), to_y)
            half = (b[1] - a[1]) // 2
            lines.append(f'<path d="M{a[0]} {a[1]} C{a[0]} {a[1] + half} {b[0]} {b[1] - half - 6} {b[0]} {b[1] - 6}"/>')
    for part in edges:
        x, y = place(part)
        wide = part == "attendless_cli"
        boxes.append(box(EDGE if wide else x, y, width - 2 * EDGE if wide else BOX, part, WORDS.get(part, ("", ""))))
    bottom = EDGE + top * (HEIGHT + GAP_Y)
    small = [part for part in ORDER[: ORDER.index("sparse")] if part not in edges]
    words = (" · ".join(small), "every part may import these modules; no line is drawn")
    boxes.append(box(EDGE, bottom, width - 2 * EDGE, "attendless/*.py", words, "#8a5a00"))
    x, y = place("sparse")
    boxes.append(
        box(
            x + BOX + GAP_X,
            y,
            BOX,
            "native",
            ("C++ kernels, no PyTorch in them;", "compiled as attendless._native"),
            "#8a5a00",
        )
    )
    lines.append(f'<path d="M{x + BOX} {y + HEIGHT // 2} H{x + BOX + GAP_X - 6}" stroke-dasharray="5 4"/>')
    full = bottom + HEIGHT + EDGE
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {full}" width="{width}" height="{full}" '
            'role="img" font-family="system-ui, sans-serif" text-anchor="middle">',
            "<title>Which part of attendless imports which; arrows point to what is imported</title>",
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="4" refY="5" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0L10 5L0 10z" fill="#8b949e"/></marker></defs>',
            '<g fill="none" stroke="#8b949e" stroke-width="1.8" marker-end="url(#tip)">',
            *lines,
            "</g>",
            *boxes,
            "</svg>\n",
        ]
    )


def box(x: int, y: int, width: int, name: str, words: tuple[str, str], fill: str = "") -> str:
    fill = fill or FILLS.get(name, "#a34800")
    middle = x + width // 2
    return (
        f'<g fill="#fff"><rect x="{x}" y="{y}" width="{width}" height="{HEIGHT}" rx="8" fill="{fill}"/>'
        f'<text x="{middle}" y="{y + 23}" font-size="16" font-weight="600">{escape(name)}</text>'
        + "".join(
            f'<text x="{middle}" y="{y + 41 + 15 * i}" font-size="11.5">{escape(w)}</text>' for i, w in enumerate(words)
        )
        + "</g>"
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw())
