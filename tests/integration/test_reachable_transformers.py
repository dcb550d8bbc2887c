"""Every name of transformers that an experiment file can reach: constructors load nothing, no argument names code."""

# promise: an experiment file names only kinds of classes and listed functions of libraries

import inspect

import pytest
import torch
from reachable import loading_in, naming_in, reachable

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # of modules that are deprecated, or miss a library

NAMED = {
    "index_path": {"RagConfig"},  # read by its retriever, which can't be named
    "passages_path": {"RagConfig"},
}


def test_only_models_and_configurations_that_load_nothing() -> None:
    reached = {
        home: found for home, found in reachable("transformers.models").items() if home.startswith("transformers.")
    }
    assert len(reached) > 2000
    kinds = (torch.nn.Module, transformers.PreTrainedConfig)
    assert [home for home, found in reached.items() if not (inspect.isclass(found) and issubclass(found, kinds))] == []
    assert {home: names for home, found in reached.items() if (names := loading_in(found))} == {}
    named: dict[str, set[str]] = {}
    for found in reached.values():
        for name in naming_in(found):
            named.setdefault(name, set()).add(found.__qualname__)
    assert named == NAMED
