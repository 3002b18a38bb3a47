"""The page: gradio controls around the boards. Every change redraws the boards from cached results."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from attendless.attention import attentions
from attendless.errors import UserError

from . import board
from .board import Question
from .picture import FORMATS, MOST_BYTES, Picture, take
from .sides import OWN, Explorer, keep_of, with_keep

try:
    import gradio as gr
    from starlette.middleware import Middleware

    from attendless.serve.hosts import KnownHosts
except ImportError:
    raise UserError("attendless explore requires gradio: pip install 'attendless[app]'") from None

EVERY_HEAD = "mean of all"
#: A click on any image, and the arrow keys, move the patch.
MOVING = """
element.tabIndex = 0;
element.setAttribute('role', 'group');
element.setAttribute('aria-label', 'Images: click a patch, or move it with the arrow keys');
element.addEventListener('click', (event) => {
  if (event.target.tagName !== 'IMG') return;
  const box = event.target.getBoundingClientRect();
  trigger('click', {down: (event.clientY - box.top) / box.height, across: (event.clientX - box.left) / box.width});
});
element.addEventListener('keydown', (event) => {
  const step = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key];
  if (!step) return;
  event.preventDefault();
  trigger('click', {step: step});
});
"""
STYLE = """
.board .figures { display: flex; flex-wrap: wrap; gap: 12px; }
.board figure { flex: 1 1 180px; max-width: 440px; margin: 0; }
.board img { width: 100%; display: block; cursor: crosshair; border-radius: 4px; margin: 0; }
.board figcaption { font-size: 0.85rem; padding-top: 4px; }
.board table { width: 100%; table-layout: fixed; margin-top: 10px; border-collapse: collapse; font-size: 0.85rem; }
.board th, .board td { text-align: right; padding: 2px 6px; font-variant-numeric: tabular-nums; }
.board th[scope=row] { text-align: left; font-weight: normal; }
.board th:first-child { width: 34%; }
.board .wrong { padding: 12px; border-left: 4px solid #d55e00; }
"""


def build(
    explorer: Explorer, transform: Callable[[Any], Tensor], first: Picture, shown: Sequence[str], note: str = ""
) -> Any:
    """The page for a model.

    Args:
        explorer: the model with any attention.
        transform: the preprocessing of uploaded images.
        first: the image at the start.
        shown: attention specs. The first two are shown side by side; the others come first in the menus.
        note: Markdown below the title.
    """
    known = list(dict.fromkeys([*shown, OWN, *sorted(attentions())]))
    rows, columns = explorer.grid(first)
    with gr.Blocks(title="attendless explore", analytics_enabled=False, delete_cache=(600, 3600)) as page:
        seen = gr.State(first)
        gr.Markdown(f"## Attention of one patch\n{note}")
        with gr.Row():
            with gr.Column(scale=3):
                top = _board()
            with gr.Column(scale=2):
                layer = gr.Slider(
                    explorer.layers[0], explorer.layers[-1], explorer.layers[len(explorer.layers) // 2],
                    step=1, label="layer", buttons=[],
                )  # fmt: skip
                head = gr.Dropdown([EVERY_HEAD, *map(str, range(explorer.heads))], value=EVERY_HEAD, label="head")
                with gr.Row():
                    row = gr.Number(rows // 2, label="patch: row", precision=0, minimum=0, maximum=rows - 1)
                    column = gr.Number(columns // 2, label="column", precision=0, minimum=0, maximum=columns - 1)
                endings = [f".{name.lower()}" for name in (*FORMATS, "jpg", "tif")]
                text = f"another image (up to {MOST_BYTES >> 20} MB)"
                upload = gr.File(file_types=endings, label=text, height=140)
        specs, keeps, sides = [], [], []
        with gr.Row():
            for which, spec in zip(("left", "right"), shown, strict=False):
                with gr.Column():
                    label = f"attention of the {which} model"
                    specs.append(gr.Dropdown(known, value=spec, label=label, allow_custom_value=True))
                    keeps.append(gr.Slider(0.02, 1, step=0.01, buttons=[], **_keep(spec)))
                    sides.append(_board())
        asked = [seen, row, column, layer, head, *specs]
        boards = [top, *sides]

        def draw(picture: Picture, row: int, column: int, layer: int, head: str, *specs: str) -> list[str]:
            place = (int(row or 0), int(column or 0))
            question = Question(picture, place, int(layer), None if head == EVERY_HEAD else int(head))
            return [board.query(explorer, question), *(board.side(explorer, question, spec) for spec in specs)]

        def move(event: gr.EventData, picture: Picture, row: int, column: int, *others: Any) -> list[Any]:
            place = board.moved((int(row or 0), int(column or 0)), explorer.grid(picture), event._data)
            return [*place, *draw(picture, *place, *others)]

        def change(path: str | None, picture: Picture, *others: Any) -> list[Any]:
            try:
                picture = picture if path is None else take(path, transform)
            except UserError as error:
                gr.Warning(str(error), duration=None)
            return [None, picture, *draw(picture, *others)]

        def offered(spec: str) -> Any:
            return gr.update(**_keep(spec))

        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "concurrency_id": "looking"}
        last = {**quiet, "trigger_mode": "always_last"}
        page.load(draw, asked, boards, **quiet)
        for one in boards:
            one.click(move, asked, [row, column, *boards], **last)
        for one in (row, column, layer, head):
            one.input(draw, asked, boards, **last)
        upload.upload(change, [upload, *asked], [upload, seen, *boards], **quiet)
        for chosen, keep in zip(specs, keeps, strict=True):
            chosen.input(draw, asked, boards, **last)
            chosen.input(offered, chosen, keep, **quiet)
            keep.input(with_keep, [chosen, keep], chosen, **last).then(draw, asked, boards, **last)
    return page


def check_place(host: str, port: int) -> None:
    """Raise `UserError` unless this process can listen at the address."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        why = str(error.strerror or error).partition(" (while")[0]
        raise UserError(
            f"cannot serve at {host}:{port}: {why}; choose another address with --host and --port"
        ) from None


@contextmanager
def serving(page: Any, host: str, port: int, names: Sequence[str] = ()) -> Iterator[str]:
    """Inside the context, serve the page. Accept requests to an IP address, `localhost`, `host` or one of `names`."""
    _, address, _ = page.launch(
        server_name=host, server_port=port, prevent_thread_lock=True, quiet=True, share=False, inbrowser=False,
        max_file_size=MOST_BYTES, ssr_mode=False, show_error=True, css=STYLE, footer_links=[],
        app_kwargs={"middleware": [Middleware(KnownHosts, names=(host, *names))]},
    )  # fmt: skip
    try:
        yield address
    finally:
        page.close(verbose=False)


def _board() -> Any:
    return gr.HTML("", elem_classes="board", js_on_load=MOVING)


def _keep(spec: str) -> dict[str, Any]:
    """Value and label of the slider for the keep rate of an attention."""
    keep = keep_of(spec)
    if keep is None:
        return {"value": 1.0, "label": "keep rate (this attention has none)", "interactive": False}
    return {"value": keep, "label": "keep rate", "interactive": True}
