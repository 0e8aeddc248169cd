"""A plot of rates as SVG: a group of bars for each case."""

from __future__ import annotations

from html import escape

COLOURS = ("#1b6ca8", "#4ea3d8", "#9bc8e6", "#555555", "#c8553d", "#d9a441", "#7a9e4e", "#8e6c8a")
BAR, GAP, WIDTH, LEFT = 14, 14, 420, 190


def plot(rates: list[tuple[str, str, float]]) -> str:
    """Bars from 0 to each rate (GB/s): ``(case, who, rate)``, the bars of a case together."""
    whos = list(dict.fromkeys(who for _, who, _ in rates))
    colours = {who: COLOURS[at % len(COLOURS)] for at, who in enumerate(whos)}
    most = max((rate for _, _, rate in rates), default=1.0)
    parts: list[str] = []
    y, last = 30, ""
    for case, who, rate in rates:
        if case != last:
            y += GAP
            parts.append(f'<text x="{LEFT - 8}" y="{y + 11}" text-anchor="end">{escape(case)}</text>')
            last = case
        length = rate / most * WIDTH
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR - 2}" fill="{colours[who]}"/>'
            f'<text x="{LEFT + length + 5:.1f}" y="{y + 10}">{rate:.2f} {escape(who)}</text>'
        )
        y += BAR
    size = f'width="{LEFT + WIDTH + 170}" height="{y + 20}"'
    head = '<text x="10" y="20" font-weight="bold">GB/s, medians over the rounds</text>'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{head}\n{body}\n</svg>\n'
    )
