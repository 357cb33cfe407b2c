"""Bars as SVG: written by hand, because bars with a scale need no plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from tickwheel.bench.figures import Spread
from tickwheel.bench.sections import number

WIDTH, LEFT, RIGHT, TOP, LINE, BAR = 860, 220, 90, 56, 24, 14
ROOM = WIDTH - LEFT - RIGHT
OURS_COLOUR, PEER_COLOUR, INK, GREY = "#2563eb", "#94a3b8", "#0f172a", "#cbd5e1"


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure with its spread; bars of the same group stand together."""

    group: str
    label: str
    spread: Spread
    ours: bool


@dataclass(frozen=True, slots=True)
class Scale:
    """Where a value is, in pixels; logarithmic from a power of ten, or linear from zero."""

    least: float
    most: float
    log: bool

    @classmethod
    def of(cls, values: Sequence[float], *, log: bool) -> Scale:
        most = max(values)
        if not log:
            return cls(0, most or 1, False)
        positive = [each for each in values if each > 0] or [1.0]
        low = 10.0 ** (math.ceil(math.log10(min(positive))) - 1)
        return cls(low, max(most, low * 10), True)

    def x(self, value: float) -> float:
        if self.log:
            share = math.log10(max(value, self.least) / self.least)
            share /= math.log10(self.most / self.least)
        else:
            share = value / self.most
        return LEFT + ROOM * share

    def ticks(self) -> list[float]:
        if self.log:
            first, last = round(math.log10(self.least)), math.floor(math.log10(self.most))
            return [10.0**power for power in range(first, last + 1)]
        step = 10 ** math.floor(math.log10(self.most))
        if self.most / step < 3:
            step /= 2
        return [step * n for n in range(int(self.most // step) + 1)]


def bars(title: str, about: str, items: Sequence[Bar], *, log: bool = False) -> str:
    """A picture of horizontal bars; a thin line shows the least and the most."""
    scale = Scale.of([v for each in items for v in (each.spread.least, each.spread.most)], log=log)
    parts: list[str] = []
    y, group = TOP, None
    for item in items:
        if item.group != group:
            group = item.group
            y += LINE
            parts.append(_text(16, y - 8, group, bold=True))
        parts += _bar(item, scale, y)
        y += LINE
    height = y + 34
    kind = ", logarithmic scale" if log else ""
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _text(16, 26, f"{title} ({about}{kind})", bold=True, size=16),
    ]
    return "\n".join([*head, *_grid(scale, y), *parts, "</svg>\n"])


def _bar(item: Bar, scale: Scale, y: float) -> list[str]:
    colour = OURS_COLOUR if item.ours else PEER_COLOUR
    spread, middle = item.spread, y + BAR / 2
    start, end = scale.x(scale.least), scale.x(spread.median)
    parts = [
        _text(LEFT - 10, y + 11, item.label, anchor="end", bold=item.ours),
        f'<rect x="{start:.1f}" y="{y}" width="{max(end - start, 1):.1f}" height="{BAR}" '
        f'fill="{colour}"/>',
    ]
    if spread.count > 1:
        low, high = scale.x(spread.least), scale.x(spread.most)
        parts.append(
            f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}" stroke="{INK}"/>'
        )
        end = max(end, high)
    parts.append(_text(end + 6, y + 11, number(spread.median)))
    return parts


def _grid(scale: Scale, bottom: float) -> list[str]:
    parts = []
    for tick in scale.ticks():
        x = scale.x(tick)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 10}" y2="{bottom}" stroke="{GREY}"/>'
        )
        parts.append(_text(x, bottom + 18, number(tick) if tick >= 1 else f"{tick:g}", "middle"))
    return parts


def _text(
    x: float, y: float, words: str, anchor: str = "start", *, bold: bool = False, size: int = 13
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'fill="{INK}"{weight}>{escape(words)}</text>'
    )
