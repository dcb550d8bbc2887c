"""Write an encoder and sentences to fine-tune it on, without a download.

The folder gets sentences of Python's own help() with the topic that each is from (sentences.csv), a
tokenizer trained on them, and a BERT of two layers trained to fill in masked tokens: config.json, model.safetensors.
"""

import argparse
import csv
import re
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

TOPICS = ("attribute-access", "debugger", "formatstrings", "string-methods")
VOCABULARY, LENGTH = 1000, 32
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
MASKED = 0.15


def main() -> None:
    """Write to the folder that the command line names."""
    parser = argparse.ArgumentParser(description=write.__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("tiny-encoder"))
    parser.add_argument("--steps", type=int, default=300, help="steps of training on masked tokens")
    given = parser.parse_args()
    said = write(given.folder, steps=given.steps)
    sys.stdout.write(f"{given.folder}: {said}\n")


def write(folder: Path, *, steps: int = 300) -> str:
    """Write sentences, tokenizer and a trained encoder to a folder; returns what it has."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    rows = [(sentence, topic) for topic in TOPICS for sentence in sentences(topics[topic])]
    with (folder / "sentences.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    everything = [sentence for topic in sorted(topics) for sentence in sentences(topics[topic])]
    tokenizer = trained_tokenizer(everything)
    tokenizer.save_pretrained(folder)
    trained_model(everything, tokenizer, steps=steps).save_pretrained(folder)
    return f"{len(rows)} sentences of {len(TOPICS)} topics, {len(tokenizer)} tokens"


def sentences(text: str) -> list[str]:
    """Return the sentences of a text that are prose."""
    parts = re.split(r"(?<=[.:])\s+|\n\n+", text)
    plain = (" ".join(part.split()) for part in parts)
    return [part for part in plain if 20 <= len(part) <= 300 and not part.startswith((">>>", "..."))]


def trained_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte pair encoding on lower-case words."""
    made = Tokenizer(models.BPE(unk_token=SPECIAL[1]))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL))
    pad, unknown, first, last, mask = SPECIAL
    made.post_processor = processors.BertProcessing((last, SPECIAL.index(last)), (first, SPECIAL.index(first)))
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token=pad,
        unk_token=unknown,
        cls_token=first,
        sep_token=last,
        mask_token=mask,
        model_max_length=LENGTH,
    )


def trained_model(texts: list[str], tokenizer: PreTrainedTokenizerFast, *, steps: int) -> BertForMaskedLM:
    """Train a small BERT to fill in masked tokens."""
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
    )
    model = BertForMaskedLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=max(steps, 2))
    encoded = tokenizer(texts, truncation=True, padding=True, return_tensors="pt")
    for _ in range(steps):
        chosen = torch.randint(len(texts), (32,))
        tokens, attention = encoded["input_ids"][chosen], encoded["attention_mask"][chosen]
        is_masked = (torch.rand(tokens.shape) < MASKED) & (tokens >= len(SPECIAL))
        labels = torch.where(is_masked, tokens, -100)
        masked = torch.where(is_masked, tokenizer.mask_token_id, tokens)
        model(input_ids=masked, attention_mask=attention, labels=labels).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


if __name__ == "__main__":
    main()
