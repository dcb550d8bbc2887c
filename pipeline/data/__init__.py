"""Data functions: small real datasets, and files of any size. Any callable that returns two datasets works as well."""

from pipeline.data.bundled import characters, digits, tabular
from pipeline.data.example_sentences import example_sentences, make_once
from pipeline.data.mapped import arrays, tokens
from pipeline.data.padding import read_csv, texts
from pipeline.data.sampling import balanced, by_length, draw_weighted
from pipeline.data.splits import Splits

__all__ = [
    "Splits",
    "arrays",
    "balanced",
    "by_length",
    "characters",
    "digits",
    "draw_weighted",
    "example_sentences",
    "make_once",
    "read_csv",
    "tabular",
    "texts",
    "tokens",
]
