"""Pictures of the walks."""

from __future__ import annotations

from jinja2 import Environment

from scripts._docs.walks import Walk

_SVG = """\
<?xml version="1.0" encoding="UTF-8"?>
<svg xmlns="http://www.w3.org/2000/svg" width="{{ width }}" height="{{ height }}" viewBox="0 0 {{ width }} {{ height }}"
 role="img" font-family="Helvetica, Arial, 'Liberation Sans', sans-serif" font-size="12.5" fill="#1d2730">
<title>{{ walk.title }}</title>
<rect width="100%" height="100%" fill="#fff"/>
<text x="12" y="26" font-size="15" font-weight="bold">{{ walk.title }}</text>
{% for stop in walk.stops %}
<g transform="translate(12 {{ 44 + 54 * loop.index0 }})">
<rect width="400" height="40" rx="5" fill="#f3f5f7" stroke="#c9d1d8"/><rect width="4" height="40" fill="#2f6f9f"/>
<text x="14" y="17" font-size="13" font-weight="bold">{{ stop.name or stop.file.rpartition("/")[2] }}</text>
<text x="14" y="32" font-size="11" fill="#566470">{{ stop.file }}</text><text x="416" y="24">{{ stop.text }}</text>
{% if not loop.first %}
<path d="M24-14v13m-4-5 4 5 4-5" fill="none" stroke="#566470" stroke-width="1.5"/>
{% endif %}
</g>
{% endfor %}
</svg>
"""


def draw(walk: Walk) -> str:
    """Return the SVG of a walk: a box per stop with its function and file, and what happens beside it."""
    environment = Environment(autoescape=True, trim_blocks=True, keep_trailing_newline=True)
    # A character is on average 0.57 of the font size wide in the widest of usual fonts, DejaVu Sans.
    width = round(440 + max(len(stop.text) for stop in walk.stops) * 12.5 * 0.57)
    return environment.from_string(_SVG).render(walk=walk, width=width, height=44 + 54 * len(walk.stops))
