"""Write docs/support.md from the table of model families.

python docs/make_support.py              docs/support.md
python docs/make_support.py FILE         another file; - prints the page
"""

from __future__ import annotations

import sys
from pathlib import Path

from attendless.integrations.support import Family, families

HEAD = """# Supported models

This page lists the model families that `attendless.convert` and `attendless.patch` serve, and those that they refuse.
`python docs/make_support.py` writes it from the table in `src/attendless/integrations/support.py`; a test compares the
two. [Models](models.md) has measured speed-ups, [Convert](convert.md) explains the commands.

| integration | what it does |
|---|---|
| `rebuild` | copies the model into an attendless backbone: all attentions, token reduction, files |
| `timm_blocks` | exchanges whole blocks in a copy of timm's model |
| `timm_inplace` | exchanges the attention modules in place: in the model (`patch`) or in a copy (`convert`) |
| `hf_interface` | sets an attention behind transformers' switch: in the model (`patch`) or in a copy (`convert`) |

`convert` also serves attendless models, and any other model with one of these attention classes inside: it exchanges
them in a copy.
"""
TITLES = (
    ("timm", "timm"),
    ("segment_anything", "Segment Anything's published code"),
    ("transformers", "Hugging Face transformers"),
)
REGISTER = """
## Add a family

A Hugging Face family whose attention goes through transformers' `AttentionInterface` needs one row in the table. In a
plug-in file, `register_family` adds it:

```python
import attendless

attendless.register_family("glance", "GlanceAttention", prefix="1 + num_register_tokens")
```

`prefix` and `suffix` are the numbers of tokens in front of the patches and behind them: integers, or sums with
attributes of the model's configuration. Every call compares them with the number of tokens, and raises if they differ.
Load the file with `attendless.load_plugin(path)` or `--plugin FILE`; both `convert` and `patch` then serve the family.
"""


def page() -> str:
    rows = [row for row in families() if row.library != "plug-in"]
    parts = [HEAD]
    for library, title in TITLES:
        parts += [f"\n## {title}\n\n", _served([row for row in rows if row.library == library and not row.refused])]
    parts += ["\n## Refused\n\n", _refused([row for row in rows if row.refused]), REGISTER]
    return "".join(parts)


def _served(rows: list[Family]) -> str:
    lines = [
        "| family | `convert` | `patch` | tokens around the patches | attention classes |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {_name(row)} | {_code(row.convert)} | {_code(row.patch)} | {_tokens(row)} | {_classes(row.attention)} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def _refused(rows: list[Family]) -> str:
    lines = ["| library | family | reason | classes |", "|---|---|---|---|"]
    lines += [f"| {r.library} | {_name(r)} | {r.refused} | {_classes(r.attention or r.models)} |" for r in rows]
    return "\n".join(lines) + "\n"


def _name(row: Family) -> str:
    """Model types of transformers as code, several separated by commas; other names as they are."""
    names = row.name.split(", ")
    return (
        row.name
        if row.library == "timm" or any(" " in name for name in names)
        else ", ".join(map("`{}`".format, names))
    )


def _code(text: str) -> str:
    return f"`{text}`" if text else "no"


def _tokens(row: Family) -> str:
    if row.library != "transformers" or row.own_grid or row.patch != "hf_interface":
        return "read from the model"
    counts = row.prefix if isinstance(row.prefix, tuple) else (row.prefix,)
    front = " or ".join(map(str, counts)) + " before"
    if row.sizes:
        front += f" each image; images packed, sizes from `{row.sizes}`"
    if row.parts:
        front += " each window"
    return f"{front}, {row.suffix} behind" if row.suffix else front


def _classes(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "blocks as a whole"


if __name__ == "__main__":
    out = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).with_name("support.md"))
    if out == "-":
        print(page(), end="")
    else:
        Path(out).write_text(page())
