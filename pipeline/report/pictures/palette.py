"""Colors of the report's page and pictures, for light and for dark windows.

Those that are told apart by color alone stay apart for readers with deuteranopia or protanopia:
``tests/unit/test_palette.py`` simulates them.
"""

from collections.abc import Mapping

_COLORS = {
    "paper": ("#ffffff", "#14171b"),
    "ink": ("#1b1f24", "#e8eaed"),
    "muted": ("#59636e", "#9aa4af"),
    "rule": ("#e4e7eb", "#2b3138"),
    "tint": ("#f5f7f9", "#1c2126"),
    "grey": ("#a8b1bb", "#5f6a75"),
    "accent": ("#0072b2", "#6cb8e6"),
    "orange": ("#d55e00", "#f08a3c"),
    "green": ("#2f8f6b", "#2fc79a"),
    "violet": ("#331a66", "#7c6cf0"),
    "brown": ("#7a4419", "#f5e663"),
    "compute": ("#56b4e9", "#56b4e9"),
    "gradients": ("#e07b00", "#f0a04b"),
    "data": ("#5e2f73", "#6f55c9"),
    "other": ("#c3cad1", "#dde2e6"),
}
LIGHT: Mapping[str, str] = {name: light for name, (light, _) in _COLORS.items()}
"""Colors by name. No two are equal: in the page, each is replaced by the variable of its name."""
DARK: Mapping[str, str] = {name: dark for name, (_, dark) in _COLORS.items()}
LINES = ("accent", "orange", "green", "violet", "brown")
"""Names of the colors of lines, in the order in which they are taken."""
PARTS = ("compute", "gradients", "data", "other")
"""Names of the colors of a step's parts."""
