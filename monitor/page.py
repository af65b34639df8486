"""The look of the report: a few HTML pieces and one style sheet, light and dark. Arguments are HTML, already escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_STYLE = """
:root {
  color-scheme: light dark;
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  --page: #f4f5f7; --surface: #ffffff; --ink: #1c2128; --muted: #606974; --grid: #e3e6ea;
  --blue: #2563b8; --orange: #c9610f; --green: #1f8a4c; --red: #c2332f;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12151a; --surface: #1a1e25; --ink: #e4e7eb; --muted: #9aa4b1; --grid: #2e343d;
    --blue: #6ea8f5; --orange: #f0a05a; --green: #5cc98a; --red: #f07f78;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 var(--font); }
main { max-width: 1120px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 16px; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 40px 0 12px; letter-spacing: -0.005em; }
h3 { font-size: 14px; margin: 0 0 8px; font-weight: 600; }
p { margin: 0 0 12px; }
.tiles { display: grid; gap: 12px; grid-template-columns: repeat(4, 1fr); }
.tile, .card { background: var(--surface); border: 1px solid var(--grid); border-radius: 10px; padding: 14px 18px; }
.tile.wide { grid-column: 1 / -1; }
.tile .name { color: var(--muted); font-size: 13px; }
.tile .value { font-size: 21px; font-weight: 600; font-variant-numeric: tabular-nums; }
.tile.wide .value { font-size: 32px; letter-spacing: -0.01em; }
.tile .value small { font-size: 0.55em; font-weight: 400; color: var(--muted); }
.tile .note, .caption, .missing { color: var(--muted); font-size: 13px; }
.caption { margin: 8px 0 0; }
.grid { display: grid; gap: 16px; grid-template-columns: 1fr 1fr; }
.card svg { display: block; width: 100%; height: auto; }
.lead { font-size: 16px; max-width: 75ch; }
.warn, .good { border-left: 3px solid var(--red); padding-left: 10px; }
.good { border-color: var(--green); }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 16px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); }
th { color: var(--muted); font-weight: 500; font-size: 13px; }
th:first-child, td:first-child { text-align: left; }
tr:last-child td { border-bottom: 0; }
.scroll { overflow-x: auto; margin-top: 14px; background: var(--surface); border: 1px solid var(--grid); border-radius: 10px; }
.bar { display: flex; gap: 2px; height: 20px; border-radius: 5px; overflow: hidden; }
.bar i { display: block; min-width: 2px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 8px 0 0; font-size: 13px; color: var(--muted); }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px; }
details { background: var(--surface); border: 1px solid var(--grid); border-radius: 10px; padding: 10px 18px; }
summary { cursor: pointer; }
pre { font: 12.5px/1.5 ui-monospace, Menlo, Consolas, monospace; overflow-x: auto; margin: 10px 0 4px; }
@media (max-width: 760px) {
  main { padding: 20px 14px 48px; }
  .grid { grid-template-columns: 1fr; }
  .tiles { grid-template-columns: 1fr 1fr; }
  .tile.wide .value { font-size: 22px; }
}
"""

_BAR = ("var(--green)", "var(--orange)", "var(--blue)", "var(--muted)")
"""Colours of the ledger's first four parts; every reason for discarding is red."""


def page(title: str, body: str) -> str:
    """A whole document; `title` is text."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def section(title: str, *parts: str) -> str:
    return f"<section><h2>{title}</h2>\n{''.join(parts)}</section>\n"


def tile(name: str, value: str, note: str = "", *, wide: bool = False) -> str:
    below = f'<div class="note">{note}</div>' if note else ""
    kind = "tile wide" if wide else "tile"
    return f'<div class="{kind}"><div class="name">{name}</div><div class="value">{value}</div>{below}</div>'


def card(content: str, title: str = "", caption: str = "") -> str:
    head = f"<h3>{title}</h3>" if title else ""
    foot = f'<p class="caption">{caption}</p>' if caption else ""
    return f'<div class="card">{head}{content}{foot}</div>'


def grid(*cards: str) -> str:
    return f'<div class="grid">{"".join(cards)}</div>'


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    titles = "".join(f"<th>{title}</th>" for title in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in line)}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def ledger_bar(parts: dict[str, int]) -> str:
    """Where the tokens are, as one bar; names are text."""
    shown = [
        (name, number, _BAR[i] if i < len(_BAR) else "var(--red)") for i, (name, number) in enumerate(parts.items())
    ]
    shown = [part for part in shown if part[1] > 0]
    bar = "".join(f'<i style="flex:{number};background:{colour}"></i>' for _, number, colour in shown)
    legend = "".join(f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, _, colour in shown)
    return f'<div class="bar">{bar}</div><div class="legend">{legend}</div>'
