"""The console of every command that prints tables, colours or live views."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from opd.printable import printable


class Console(RichConsole):
    """A rich console that prints text as it is, not as markup, and without what a terminal would obey."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of `renderable`; those of rich's own control codes pass."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else printable(segment.text)
            yield segment if text is segment.text else Segment(text, segment.style)


class Table(RichTable):
    """A rich table whose cells of plain text are one line each, as long as the text may be."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """Add a row of cells."""
        super().add_row(*(printable(cell, lines=False) if isinstance(cell, str) else cell for cell in cells), **options)


def line(text: str, style: str = "") -> Text:
    """Others' text as one line."""
    return Text(printable(text, lines=False), style)
