"""Models and tokenizers of transformers, from folders that are written here."""

# promise: fine-tuning: initial weights, frozen parameters, parameter groups, losses of the model itself

import csv
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import experiment

from pipeline.data import texts
from pipeline.data.padding import padded, read_csv
from pipeline.drive.preflight import find_parameter_problems
from pipeline.errors import ExperimentError
from pipeline.experiment import components, targets
from pipeline.experiment.targets import BUILT_IN
from pipeline.models import pretrained
from pipeline.tasks import FromModel

pytest.importorskip("transformers")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "very", "film", "a"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT that fills in masks, and its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(folder)
    return folder


def test_weights_and_a_new_head(folder: Path) -> None:
    from safetensors.torch import load_file

    torch.manual_seed(1)
    model = pretrained(str(folder), task="sequence-classification", num_labels=3)
    saved = load_file(folder / "model.safetensors")["bert.embeddings.word_embeddings.weight"]

    assert type(model).__name__ == "BertForSequenceClassification"
    assert model.training
    assert model.classifier.out_features == 3  # type: ignore[union-attr]
    assert torch.equal(model.bert.embeddings.word_embeddings.weight, saved)  # type: ignore[union-attr]
    other = pretrained(str(folder), task="sequence-classification", weights=False)
    assert not torch.equal(other.bert.embeddings.word_embeddings.weight, saved)  # type: ignore[union-attr]


def test_the_task_of_the_model_weighs_by_its_labels(folder: Path) -> None:
    tokens = {"input_ids": torch.tensor([[4, 5, 0], [7, 8, 4]]), "attention_mask": torch.ones(2, 3, dtype=torch.long)}
    model = pretrained(str(folder), task="sequence-classification")
    assert FromModel()(model, {**tokens, "labels": torch.tensor([0, 1])}).count == 2
    model = pretrained(str(folder), task="causal-lm")
    assert FromModel()(model, {**tokens, "labels": torch.tensor([[4, 5, -100], [7, 8, 4]])}).count == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"task": "classification"}, "model.task: is 'classification'; did you mean"),
        ({"path": "/no/folder"}, "model.path: /no/folder can't be loaded: "),
        ({"num_lables": 3}, "model.num_lables: the configuration .* has no key num_lables; did you mean num_labels?"),
    ],
)
def test_arguments_that_cannot_be_meant(folder: Path, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ExperimentError, match=said):
        pretrained(**{"path": str(folder), "task": "features", **arguments})


def test_only_safetensors_are_loaded(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ExperimentError, match=r"can't be loaded: .*no file named model\.safetensors"):
        pretrained(str(tmp_path), task="masked-lm")


def test_code_beside_the_weights_is_never_run(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}')
    (tmp_path / "own.py").write_text("raise SystemExit('run')")
    with pytest.raises(ExperimentError, match=r"model\.path: .* can't be loaded"):
        pretrained(str(tmp_path), task="masked-lm", weights=False)


def test_names_are_checked_before_anything_starts(folder: Path) -> None:
    found = find_parameter_problems(
        experiment(
            model={"_target_": "pipeline.models.pretrained", "path": str(folder), "task": "sequence-classification"},
            train={"freeze": ["bert.embedings.*"]},
        ),
        allowed=BUILT_IN,
    )
    assert "did you mean bert.embeddings.*?" in str(found)


def test_a_missing_package_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    model = {"_target_": "pipeline.models.pretrained", "path": str(folder), "task": "features"}
    (problem,) = components.check(experiment(model=model), allowed=(*BUILT_IN, "toys")).problems

    assert str(problem) == (
        "model._target_: pipeline.models.pretrained.pretrained needs transformers, which is not installed: "
        "pip install transformers"
    )


def test_texts_become_padded_batches(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "texts.csv"
    with source.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), ("a very good film", "yes"), ("bad", "no"), ("a film", "no")])
    torch.manual_seed(0)
    train, validation = texts(str(source), tokenizer=str(folder), validation_fraction=0.34, max_length=3)
    samples = [train[index] for index in range(2)] + [validation[0]]  # type: ignore[index]
    batch = padded(str(folder))(samples)

    assert sorted(len(sample["input_ids"]) for sample in samples) == [1, 2, 3]
    assert batch["input_ids"].shape == (3, 3)
    assert batch["attention_mask"].sum() == 6
    assert sorted(batch["labels"].tolist()) == [0, 0, 1]
    tokens = [{"input_ids": [4, 5], "labels": [4, 5]}, {"input_ids": [4], "labels": [4]}]
    assert padded(str(folder), multiple_of=4)(tokens)["labels"].tolist() == [[4, 5, -100, -100], [4, -100, -100, -100]]
    with pytest.raises(ExperimentError, match=r"data\.label: .*texts\.csv has no column labels; did you mean label\?"):
        texts(str(source), tokenizer=str(folder), label="labels")
    with pytest.raises(ExperimentError, match=r"data\.tokenizer: can't load a tokenizer from"):
        texts(str(source), tokenizer=str(tmp_path))


TABLE = Path(__file__).parents[2] / "templates" / "ddp-project" / "templates" / "data" / "table.py"
CSV_ROWS = {
    "comma": ("a, b,no", r"the row has 3 fields \('a', ' b', 'no'\) for 2 columns \(text, label\)\. Put quotes"),
    "too few fields": ("a", r"the row has 1 field \('a'\) for 2 columns \(text, label\)\. Add the missing fields"),
    "open quote": ('"a,no\nb,no', r"the row that starts here can't be read .*\. Check its quotes: "),
    "open quote before another": ('"a,no\n"b, c",no', r"the row that starts here can't be read "),
}


@pytest.mark.parametrize(("row", "said"), CSV_ROWS.values(), ids=CSV_ROWS)
def test_a_row_of_a_csv_without_a_field_for_each_column_is_named(row: str, said: str, tmp_path: Path) -> None:
    source = tmp_path / "texts.csv"
    source.write_text(f'\ufefftext,label\n"a ""film"", good",no\n{row}\n\nb,no\n', encoding="utf-8")
    with pytest.raises(ExperimentError, match=rf"data\.source: .*texts\.csv:3: {said}"):
        texts(str(source), tokenizer="none")
    with pytest.raises(ValueError, match=rf"texts\.csv:3: {said}"):
        runpy.run_path(str(TABLE))["read"](source, {"text": (0, 1), "label": (0, 1)})


def test_a_csv_in_another_encoding_is_named(tmp_path: Path) -> None:
    source = tmp_path / "texts.csv"
    source.write_text("text,label\ncafé,no\n", encoding="cp1252")  # as Excel writes it
    with pytest.raises(ValueError, match=r"texts\.csv: is not in UTF-8 \(.* 0xe9 .*\)\. Save it in UTF-8\."):
        read_csv(source)
    with pytest.raises(ExperimentError, match=r"data\.source: .*texts\.csv: is not in UTF-8"):
        texts(str(source), tokenizer="none")


@pytest.mark.parametrize(
    "ordered", [["0", "1", "1.5", *map(str, range(2, 12))], ["10", "9", "nine"]], ids=["numbers", "texts"]
)
def test_classes_that_are_numbers_are_numbered_by_value(ordered: list[str], folder: Path, tmp_path: Path) -> None:
    """White space around them makes no other class."""
    source = tmp_path / "texts.csv"
    rows = [f"{'good ' * length},{name}\nbad, {name}\n" for length, name in enumerate(ordered, start=2)]
    source.write_text("\ufefftext,label\n" + "".join(reversed(rows)))
    train: Any = texts(str(source), tokenizer=str(folder), validation_fraction=0)[0]
    samples = [train[index] for index in range(2 * len(ordered))]
    numbers = {len(one["input_ids"]): one["labels"] for one in samples}
    assert [numbers[length] for length in range(2, len(ordered) + 2)] == list(range(len(ordered)))


def test_a_row_without_a_label_is_named(tmp_path: Path) -> None:
    source = tmp_path / "texts.csv"
    source.write_text("text,label\na,no\nb, \n")
    with pytest.raises(ExperimentError, match=r"data\.source: .*texts\.csv:3: label is empty\. Fill it in, or"):
        texts(str(source), tokenizer="none")
