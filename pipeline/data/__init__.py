"""Data functions: small real datasets, and files of any size. Any callable that returns two datasets works as well."""

from pipeline.data.bundled import digits, tabular
from pipeline.data.csv_rows import read_csv
from pipeline.data.example_sentences import example_sentences, make_once
from pipeline.data.mapped import arrays, tokens
from pipeline.data.padding import texts
from pipeline.data.sampling import balanced, by_length, draw_weighted
from pipeline.data.splits import Splits
from pipeline.data.text import characters

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
