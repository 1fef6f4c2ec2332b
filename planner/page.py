"""A self-contained HTML page: light and dark, fit to print, readable on a phone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from planner.files import package_text


def page(title: str, body: str, footer: str) -> str:
    """A self-contained HTML page in the report's style; `body` is HTML, the others are text."""
    style = package_text("page.css")
    return (
        f'<!doctype html>\n<html lang=en>\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n{body}\n"
        f"<footer>{escape(footer)}</footer>\n</main>\n</body>\n</html>\n"
    )


def section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{body}</section>"


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numeric: Iterable[int] = (),
    skip: Iterable[int] = (),
) -> str:
    """An HTML table of text; the columns `numeric` without `skip` are set to the right."""
    right = set(numeric) - set(skip)

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' if k in right else ''}>{escape(text)}</{tag}>" for k, text in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    top = f"<thead><tr>{cells('th', head)}</tr></thead>"
    return f"<div class=scroll><table>{top}<tbody>{body}</tbody></table></div>"


def bullets(lines: Iterable[str], otherwise: str = "") -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else f"<p>{escape(otherwise)}</p>"
