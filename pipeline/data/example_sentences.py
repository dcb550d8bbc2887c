"""Files that are made when they are first needed: sentences to fine-tune an encoder on, and a small encoder."""

import csv
import re
import tempfile
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from safetensors.torch import save_model

from pipeline.experiment.targets import needs
from pipeline.protocol.progress import ProgressReporter, note
from pipeline.system import hold_lock, quiet_transformers

_TOPICS = ("attribute-access", "debugger", "formatstrings", "string-methods")
_VOCABULARY, _LENGTH = 1000, 32
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_MASKED = 0.15
_FILE = "sentences.csv"


def make_once(path: Path, make: Callable[[Path], object], *, what: str) -> None:
    """Make a file or folder if it does not exist, however many processes need it; print a line that says so.

    Args:
        path: where it is needed. It appears there when it is complete.
        make: writes it to another path of the same file system. Random numbers that it draws change nothing else.
        what: what is made, for the line.

    Raises:
        FileNotFoundError: it does not exist, and only the outline of a model is built, which makes nothing.
        OSError: it can't be written.
    """
    if path.exists():
        return
    if torch.get_default_device().type == "meta":
        raise FileNotFoundError(f"{path} does not exist yet")
    path.parent.mkdir(parents=True, exist_ok=True)
    with hold_lock(path.with_name(f"{path.name}.lock"), patience_s=inf):
        if path.exists():
            return
        note(f"{path} does not exist. Making {what}.")
        with tempfile.TemporaryDirectory(dir=path.parent) as folder, torch.random.fork_rng(devices=[]):
            made = Path(folder) / path.name
            make(made)
            made.rename(path)


@needs("transformers")
def example_sentences(folder: str, *, steps: int = 300) -> str:
    """Return the path of sentences.csv in a folder; make the folder when it is first needed, in about half a minute.

    The file has sentences of Python's help() with their topics. The folder also has a BERT of two layers that was
    trained to fill in masked tokens (config.json, model.safetensors), and its tokenizer.

    Args:
        folder: folder to use, or to make.
        steps: steps of training on masked tokens.
    """
    make_once(Path(folder), partial(_write, steps=steps), what="example sentences and an encoder, in half a minute")
    return f"{folder}/{_FILE}"


def _write(folder: Path, *, steps: int) -> None:
    folder.mkdir()
    torch.manual_seed(0)
    with (folder / _FILE).open("w", encoding="utf-8", newline="") as file:
        rows = [(sentence, topic) for topic in _TOPICS for sentence in _find_sentences(topics[topic])]
        csv.writer(file).writerows([("text", "label"), *rows])
    texts = [sentence for topic in sorted(topics) for sentence in _find_sentences(topics[topic])]
    tokenizer = _train_tokenizer(texts)
    tokenizer.save_pretrained(folder)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, threads of a small model wait for each other most of the time
    try:
        with quiet_transformers():
            model = _train_model(texts, tokenizer, steps=steps)
            # As ``save_pretrained`` does, which writes nothing on any rank but 0 (transformers 5.23).
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(folder)
            save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    finally:
        torch.set_num_threads(threads)


def _find_sentences(text: str) -> list[str]:
    """Return the sentences of a text that are prose."""
    parts = re.split(r"(?<=[.:])\s+|\n\n+", text)
    plain = (" ".join(part.split()) for part in parts)
    return [part for part in plain if 20 <= len(part) <= 300 and not part.startswith((">>>", "..."))]


def _train_tokenizer(texts: list[str]) -> Any:
    """Train a byte pair encoding on lower-case words."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    pad, unknown, first, last, mask = _SPECIAL
    tokenizer = Tokenizer(models.BPE(unk_token=unknown))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=_VOCABULARY, special_tokens=[*_SPECIAL], show_progress=False)
    )
    tokenizer.post_processor = processors.BertProcessing((last, _SPECIAL.index(last)), (first, _SPECIAL.index(first)))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        unk_token=unknown,
        cls_token=first,
        sep_token=last,
        mask_token=mask,
        model_max_length=_LENGTH,
    )


def _train_model(texts: list[str], tokenizer: Any, *, steps: int) -> Any:
    """Train a small BERT to fill in masked tokens."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=_LENGTH,
    )
    model = BertForMaskedLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=max(steps, 2))
    encoded = tokenizer(texts, truncation=True, padding=True, return_tensors="pt")
    with ProgressReporter("training the example encoder", total=steps, unit="steps") as progress:
        for _ in range(steps):
            chosen = torch.randint(len(texts), (32,))
            tokens, attention = encoded["input_ids"][chosen], encoded["attention_mask"][chosen]
            is_masked = (torch.rand(tokens.shape) < _MASKED) & (tokens >= len(_SPECIAL))
            labels = torch.where(is_masked, tokens, -100)
            masked = torch.where(is_masked, tokenizer.mask_token_id, tokens)
            model(input_ids=masked, attention_mask=attention, labels=labels).loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            progress.by(1)
    return model.eval()
