"""Renders the report's page as self-contained HTML. It loads no script, font or picture from elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from megatron_rl.desk.report.charts import DARK, LIGHT
from megatron_rl.desk.report.health_checks import HealthCheck


@dataclass(frozen=True)
class ReportPanel:
    """A chart with title, caption and legend, or the reason why it is missing."""

    title: str
    says: str
    """Caption: a sentence on how to read the chart."""
    svg: str
    """The chart, or an empty string; ``missing`` then has the reason."""
    legend: tuple[tuple[str, str], ...] = ()
    """Pairs of (label, color name)."""
    latest: str = ""
    """Newest value, shown next to the title."""
    missing: str = ""
    wide: bool = False


@dataclass(frozen=True)
class ReportSection:
    """A titled group of panels."""

    title: str
    panels: tuple[ReportPanel, ...]


@dataclass(frozen=True)
class ReportTable:
    """A table with title and caption."""

    title: str
    says: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """Rows of cells; if empty, ``says`` has the reason."""
    row_colors: tuple[str, ...] = ()
    """Color names of the mark before each row's first cell."""
    header_colors: tuple[str, ...] = ()
    """Color names of the marks in the header; an empty name draws no mark."""


@dataclass(frozen=True)
class ReportPage:
    """Contents of a report page, from top to bottom."""

    title: str
    subtitle: str
    headline: tuple[tuple[str, str, str], ...]
    """Tiles of (label, value, remark)."""
    checks: tuple[HealthCheck, ...]
    sections: tuple[ReportSection, ...]
    summary: tuple[tuple[str, str], ...]
    config_text: str
    samples: str = ""
    """A separate section as HTML (``run_report.samples_html``)."""
    tables: tuple[ReportTable, ...] = ()


def _variables(colors: dict[str, str]) -> str:
    return " ".join(f"--{name}: {color};" for name, color in colors.items())


_STYLE = f"""
:root {{ color-scheme: light dark; {_variables(LIGHT)} --page: #f4f5f6; }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} --page: #131518; }} }}
""" + """
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 28px 20px 60px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 24px; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 34px 0 12px; }
h3 { font-size: 14px; margin: 0; font-weight: 600; }
p { margin: 0; }
.quiet, .says { color: var(--muted); }
.says { font-size: 13px; line-height: 1.4; }
.tiles { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(158px, 1fr)); margin-top: 20px; }
.tile, .panel, details, .checks { background: var(--paper); border: 1px solid var(--line); border-radius: 8px; }
.tile { padding: 12px 14px; }
.tile b { display: block; font-size: 20px; white-space: nowrap; font-weight: 600; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile span { font-size: 13px; color: var(--muted); }
.checks { list-style: none; margin: 12px 0 0; padding: 10px 14px; display: grid; gap: 4px 24px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); }
.checks li { display: grid; grid-template-columns: 20px 1fr; font-size: 14px; }
.checks .mark { font-weight: 700; }
.good .mark { color: var(--green); }
.look .mark { color: var(--red); }
.none .mark { color: var(--muted); }
.panels { display: grid; gap: 12px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); }
.panel { padding: 12px 14px 10px; min-width: 0; display: flex; flex-direction: column; gap: 6px; }
.panel header { display: flex; justify-content: space-between; gap: 12px; align-items: baseline; }
.panel .latest { font-size: 13px; font-variant-numeric: tabular-nums; color: var(--muted); white-space: nowrap; }
.wide { grid-column: 1 / -1; }
.picture { margin-top: auto; }
.picture svg { display: block; width: 100%; height: auto; }
.wide .picture { overflow-x: auto; }
.wide .picture svg { min-width: 720px; }
svg text { font-family: inherit; }
svg * { stroke-linejoin: round; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 13px; color: var(--muted); }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px; }
.missing { margin: auto; padding: 32px 12px; max-width: 40ch; text-align: center; color: var(--muted);
  font-size: 14px; }
details { margin-top: 12px; padding: 10px 14px; }
summary { cursor: pointer; font-weight: 600; font-size: 14px; }
pre { overflow-x: auto; margin: 10px 0 0; font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; }
table { border-collapse: collapse; margin-top: 10px; font-size: 14px; }
td { padding: 3px 18px 3px 0; vertical-align: top; overflow-wrap: anywhere; }
td:first-child { color: var(--muted); }
.grid { overflow-x: auto; }
.grid table { margin-top: 0; min-width: 100%; font-variant-numeric: tabular-nums; }
.grid th { text-align: left; font-weight: 600; padding: 4px 18px 6px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
.grid td { white-space: nowrap; padding: 5px 18px 5px 0; border-bottom: 1px solid var(--line); max-width: 380px; overflow: hidden;
  text-overflow: ellipsis; }
.grid tr:last-child td { border-bottom: 0; }
.grid td:first-child { color: var(--ink); }
.grid i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 8px; }
.tiles:empty { display: none; }
"""

_MARKS = {"good": "✓", "look": "!", "none": "&ndash;"}


def render(page: ReportPage) -> str:
    """The whole page as HTML."""
    tiles = "".join(
        f'<div class="tile"><span>{escape(label)}</span><b>{escape(value)}</b><span>{escape(remark)}</span></div>\n'
        for label, value, remark in page.headline
    )
    checks = "".join(
        f'<li class="{check.state}"><span class="mark">{_MARKS[check.state]}</span>'
        f'<span>{escape(check.title)} <span class="quiet">{escape(check.detail)}</span></span></li>\n'
        for check in page.checks
    )
    sections = "".join(
        f'<h2>{escape(section.title)}</h2>\n<div class="panels">\n{"".join(map(_panel, section.panels))}</div>\n'
        for section in page.sections
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(page.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f'<h1>{escape(page.title)}</h1>\n<p class="quiet">{escape(page.subtitle)}</p>\n'
        f'<div class="tiles">\n{tiles}</div>\n<ul class="checks">\n{checks}</ul>\n{"".join(map(_table, page.tables))}{sections}'
        f"{page.samples}{_details(page)}</body>\n</html>\n"
    )


def _panel(panel: ReportPanel) -> str:
    legend = "".join(
        f'<span><i style="background: var(--{color})"></i>{escape(label)}</span>' for label, color in panel.legend
    )
    if panel.svg:
        body = f'<div class="legend">{legend}</div>\n<div class="picture">{panel.svg}</div>'
    else:
        body = f'<p class="missing">{escape(panel.missing)}</p>'
    return (
        f'<section class="panel{" wide" if panel.wide else ""}">\n<header><h3>{escape(panel.title)}</h3>'
        f'<span class="latest">{escape(panel.latest)}</span></header>\n'
        f'<p class="says">{escape(panel.says)}</p>\n{body}\n</section>\n'
    )


def _table(table: ReportTable) -> str:
    def cell(tag: str, text: str, color: str = "") -> str:
        mark = f'<i style="background: var(--{color})"></i>' if color else ""
        return f"<{tag}>{mark}{escape(text)}</{tag}>"

    header_colors = table.header_colors or ("",) * len(table.header)
    header = "".join(cell("th", text, color) for text, color in zip(table.header, header_colors, strict=True))
    body = ""
    for row, color in zip(table.rows, table.row_colors or ("",) * len(table.rows), strict=True):
        body += f"<tr>{cell('td', row[0], color)}{''.join(cell('td', text) for text in row[1:])}</tr>\n"
    grid = f'<div class="grid"><table>\n<tr>{header}</tr>\n{body}</table></div>\n' if table.rows else ""
    return f'<h2>{escape(table.title)}</h2>\n<section class="panel">\n<p class="says">{escape(table.says)}</p>\n{grid}</section>\n'


def _details(page: ReportPage) -> str:
    """Summary and configuration of a run; empty on a page of several runs."""
    if not (page.summary or page.config_text) and page.tables:
        return ""
    return f"<h2>Details</h2>\n{_summary(page.summary)}{_configuration(page.config_text)}"


def _summary(rows: Sequence[tuple[str, str]]) -> str:
    if not rows:
        return ""
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>\n" for name, value in rows)
    return f"<details>\n<summary>Summary</summary>\n<table>\n{cells}</table>\n</details>\n"


def _configuration(text: str) -> str:
    body = f"<pre>{escape(text)}</pre>" if text else '<p class="quiet">config.yaml is not in the run\'s folder.</p>'
    return f"<details>\n<summary>Configuration</summary>\n{body}\n</details>\n"
