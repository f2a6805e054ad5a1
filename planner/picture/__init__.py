"""Pictures of a page as SVG, without a script: plots, bars and heat maps, in colours for light, dark and paper."""

from .axis import Axis, ordinals
from .bars import Bar, Bars, Span
from .heat import Heat, group_size, grouped
from .plot import Line, Plot
from .svg import (
    BLUE,
    CYAN,
    DARK,
    GREEN,
    GREY,
    LIGHT,
    OCHRE,
    ORANGE,
    PICTURE_STYLE,
    RED,
    SMALL,
    VIOLET,
    Picture,
    colour_rules,
)

__all__ = [
    "BLUE",
    "CYAN",
    "DARK",
    "GREEN",
    "GREY",
    "LIGHT",
    "OCHRE",
    "ORANGE",
    "PICTURE_STYLE",
    "RED",
    "SMALL",
    "VIOLET",
    "Axis",
    "Bar",
    "Bars",
    "Heat",
    "Line",
    "Picture",
    "Plot",
    "Span",
    "colour_rules",
    "group_size",
    "grouped",
    "ordinals",
]
