"""Hooks of mkdocs: add linked files of the repository to the site, and reject a site that needs the network.

On GitHub, `../examples/echo.py` links to that file. The site contains docs/ only, so `on_files` adds a page that shows
the file, and `on_page_markdown` points the link to that page. `on_post_build` raises if a page loads anything from
another host.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parent
ROOT = DOCS.parent
LINK = re.compile(r"(\]\()([^)\s:#]+)((?:#[^)\s]*)?\))")


def outside(page: str, target: str) -> str | None:
    """The path in the repository of a link's target, if the target is a file outside docs/."""
    path = Path(os.path.normpath(DOCS / posixpath.dirname(page) / target))
    return path.relative_to(ROOT).as_posix() if path.is_file() and DOCS not in path.parents else None


def on_files(files: Files, config: object) -> Files:
    wanted = set()
    for file in files.documentation_pages():
        wanted |= {outside(file.src_uri, link[1]) for link in LINK.findall(file.content_string)}
    for path in sorted(filter(None, wanted)):
        files.append(File.generated(config, f"files/{path}.md", content=shown(path)))
    return files


def shown(path: str) -> str:
    text = (ROOT / path).read_text()
    if path.endswith(".md"):  # the site does not contain the targets of its links
        return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return f"# {path}\n\n```{path.rpartition('.')[2]}\n{text}```\n"


def on_page_markdown(markdown: str, page: object, **_: object) -> str:
    here = page.file.src_uri

    def there(found: re.Match[str]) -> str:
        path = outside(here, found[2])
        if path is None:
            return found[0]
        return f"{found[1]}{posixpath.relpath(f'files/{path}.md', posixpath.dirname(here) or '.')}{found[3]}"

    return LINK.sub(there, markdown)


#: References that make a browser load something from another host.
FOREIGN = re.compile(
    r"""<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^"'\s>]*|url\(["']?https?:[^)]*"""
)


def on_post_build(config: object, **_: object) -> None:
    site = Path(config["site_dir"])
    pages = [path for kind in ("html", "css") for path in sorted(site.rglob(f"*.{kind}"))]
    found = [f"{path.relative_to(site)}: {what}" for path in pages for what in FOREIGN.findall(path.read_text())]
    if found:
        raise PluginError(f"the site would not work offline: {'; '.join(found[:5])}")
