"""Data functions: small real datasets, and files of any size. Any callable that returns two datasets works as well."""

from pipeline.data.arrays import arrays
from pipeline.data.cifar import cifar10
from pipeline.data.csv_rows import read_csv
from pipeline.data.example_sentences import example_sentences
from pipeline.data.handwriting import digits
from pipeline.data.labelled_texts import texts
from pipeline.data.make_once import make_once
from pipeline.data.noise import with_noise
from pipeline.data.splits import Splits
from pipeline.data.streamed import streamed
from pipeline.data.tabular import tabular
from pipeline.data.text import characters
from pipeline.data.tokens import tokens
from pipeline.data.views import two_views

__all__ = [
    "Splits",
    "arrays",
    "characters",
    "cifar10",
    "digits",
    "example_sentences",
    "make_once",
    "read_csv",
    "streamed",
    "tabular",
    "texts",
    "tokens",
    "two_views",
    "with_noise",
]
