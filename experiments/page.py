"""A report as one HTML file: headings, words, tables and pictures, nothing from elsewhere and no scripts.

Under every command that writes a page. Pieces of text are escaped here; pictures are PNG bytes and travel
inside the file. Readable in a dark and in a light window, and on paper.
"""

import base64
import html
from collections.abc import Mapping, Sequence
from typing import NewType

# A finished piece of HTML: made by the functions below only, so that no text slips in unescaped
Html = NewType("Html", str)

# light colours, then the dark ones; wide tables scroll by themselves, and break over pages when printed
_STYLE = """
:root { color-scheme: light dark; --ink: #1d1d1f; --soft: #5c5c66; --line: #d5d5dc; --shade: #f3f3f7; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8ed; --soft: #a5a5b0; --line: #44444c; --shade: #26262b; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); margin: 2rem auto; padding: 0 1.2rem;
  max-width: 72rem; }
h1 { font-size: 1.6rem; margin-bottom: .4rem; }
h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid var(--line); padding-bottom: .2rem; }
p { max-width: 52rem; }
.note, caption, figcaption { color: var(--soft); font-size: .9rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .8rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding-bottom: .3rem; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.facts td { text-align: left; white-space: normal; }
thead th { background: var(--shade); }
tr.strong td { font-weight: 650; background: var(--shade); }
figure { margin: 1.2rem 0; }
img { box-sizing: border-box; max-width: 100%; height: auto; background: #fff;
  border: 1px solid var(--line); border-radius: 4px; }
@page { size: landscape; margin: 12mm; }
@media print {
  :root { --ink: #000; --soft: #444; --line: #ccc; --shade: #f3f3f7; }
  html, body { font-size: 9pt; } body { margin: 0; padding: 0; max-width: none; }
  h2 { break-after: avoid; } figure, tr { break-inside: avoid; } .wide { overflow: visible; }
  table { font-size: 8pt; } th, td { padding: .1rem .35rem; }
}
"""


def page(title: str, parts: Sequence[Html]) -> str:
    """The whole file.

    title: its heading, and what the window is called. parts: in order, of the functions below.
    """
    safe = html.escape(title)
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        # the file asks the network for nothing, and runs nothing, whatever stands in it
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">"
        f"<title>{safe}</title><style>{_STYLE}</style>"
    )
    body = "\n".join([f"<h1>{safe}</h1>", *parts])
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def section(heading: str, parts: Sequence[Html]) -> Html:
    """A heading and what is under it."""
    return Html("\n".join([f"<section><h2>{html.escape(heading)}</h2>", *parts, "</section>"]))


def words(text: str, *, note: bool = False) -> Html:
    """A paragraph.   note: smaller and paler."""
    kind = ' class="note"' if note else ""
    return Html(f"<p{kind}>{html.escape(text)}</p>")


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    groups: Sequence[tuple[str, int]] = (),
    strong: Sequence[int] = (),
    caption: str = "",
) -> Html:
    """A table of texts, the first column to the left, the others (figures) to the right.

    head: of the columns. rows: of as many cells. groups: (text, columns) of a line above the head, whose
    columns sum to those of the head. strong: indices of rows to stress. Raises ValueError for rows or groups
    of another width.
    """
    widths = {len(row) for row in rows} | ({sum(n for _, n in groups)} if groups else set())
    if widths - {len(head)}:
        raise ValueError(f"table: the head has {len(head)} columns, but rows or groups have {sorted(widths)}")
    above = "".join(f'<th colspan="{n}">{html.escape(text)}</th>' for text, n in groups)
    lines = [f"<caption>{html.escape(caption)}</caption>"] if caption else []
    lines += ["<thead>", *([f"<tr>{above}</tr>"] if groups else []), f"<tr>{_cells('th', head)}</tr></thead>"]
    for i, row in enumerate(rows):
        stress = ' class="strong"' if i in strong else ""
        lines.append(f"<tr{stress}>{_cells('td', row)}</tr>")
    return Html('<div class="wide"><table>' + "\n".join(lines) + "</table></div>")


def bullets(texts: Sequence[str]) -> Html:
    """A list of sentences."""
    return Html("<ul>" + "".join(f"<li>{html.escape(text)}</li>" for text in texts) + "</ul>")


def facts(named: Mapping[str, str]) -> Html:
    """A table of two columns: what, and its value in words."""
    lines = "\n".join(f"<tr>{_cells('td', pair)}</tr>" for pair in named.items())
    return Html(f'<table class="facts">{lines}</table>')


def picture(png: bytes, caption: str) -> Html:
    """A PNG with the words under it, which also stand in for it where it cannot be seen.

    Raises ValueError for bytes that are no PNG.
    """
    if not png.startswith(b"\x89PNG\r\n\x1a\n"):
        raise ValueError(f"picture {caption!r}: {len(png)} bytes that are no PNG")
    data = base64.b64encode(png).decode("ascii")
    safe = html.escape(caption)
    image = f'<img alt="{safe}" src="data:image/png;base64,{data}">'
    return Html(f"<figure>{image}<figcaption>{safe}</figcaption></figure>")


def _cells(tag: str, texts: Sequence[str]) -> str:
    return "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts)
