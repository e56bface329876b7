"""Renders the report's page as self-contained HTML. It loads no script, font or picture from elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files as package_files

from megatron_rl.desk.report.charts import COLORS
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


ReportSection = tuple[str, tuple[ReportPanel, ...]]
"""Title and panels."""


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
    """Tables before the charts."""
    appendix: tuple[ReportTable, ...] = ()
    """Tables after the charts."""


def _style() -> str:
    """The page's style sheet, with the colors of both themes as variables. Printed pages are always light."""
    light, dark = (" ".join(f"--{name}: {pair[theme]};" for name, pair in COLORS.items()) for theme in (0, 1))
    dark_theme = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} --page: #131518; }} }}"
    rules = package_files("megatron_rl.desk.report").joinpath("page.css").read_text(encoding="utf-8")
    return f":root {{ color-scheme: light dark; {light} --page: #f4f5f6; }}\n{dark_theme}\n{rules}"


_MARKS = {"good": "✓", "look": "!", "none": "&ndash;"}


def render(page: ReportPage) -> str:
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
        f'<h2>{escape(title)}</h2>\n<div class="panels">\n{"".join(map(_panel, panels))}</div>\n'
        for title, panels in page.sections
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(page.title)}</title>\n<style>{_style()}</style>\n</head>\n<body>\n"
        f'<h1>{escape(page.title)}</h1>\n<p class="quiet">{escape(page.subtitle)}</p>\n'
        f'<div class="tiles">\n{tiles}</div>\n<ul class="checks">\n{checks}</ul>\n{"".join(map(_table, page.tables))}{sections}'
        f"{''.join(map(_table, page.appendix))}{page.samples}{_details(page)}</body>\n</html>\n"
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
