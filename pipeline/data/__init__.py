"""Data functions: small real datasets, and files of any size. Any callable that returns two datasets works as well."""

from pipeline.data.arrays import arrays
from pipeline.data.csv_rows import read_csv
from pipeline.data.example_sentences import example_sentences
from pipeline.data.handwriting import digits
from pipeline.data.labelled_texts import texts
from pipeline.data.make_once import make_once
from pipeline.data.splits import Splits
from pipeline.data.tabular import tabular
from pipeline.data.text import characters
from pipeline.data.tokens import tokens

__all__ = [
    "Splits",
    "arrays",
    "characters",
    "digits",
    "example_sentences",
    "make_once",
    "read_csv",
    "tabular",
    "texts",
    "tokens",
]
