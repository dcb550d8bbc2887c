"""Which topic of Python's help() a sentence is from: a small BERT, fine-tuned."""

import csv

from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding
from transformers import Trainer, TrainingArguments, set_seed

FOLDER = "tiny-encoder"


def sentences():
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    with open(f"{FOLDER}/sentences.csv") as file:
        rows = list(csv.DictReader(file))
    numbers = {label: number for number, label in enumerate(sorted({row["label"] for row in rows}))}
    encoded = tokenizer([row["text"] for row in rows], truncation=True, max_length=32)
    samples = [
        {"input_ids": tokens, "attention_mask": mask, "labels": numbers[row["label"]]}
        for tokens, mask, row in zip(encoded["input_ids"], encoded["attention_mask"], rows)
    ]
    return [one for n, one in enumerate(samples) if n % 5], samples[::5]


if __name__ == "__main__":
    set_seed(17)
    model = AutoModelForSequenceClassification.from_pretrained(
        FOLDER, num_labels=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    train, validation = sentences()
    arguments = TrainingArguments(
        output_dir="topics",
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=32,
        learning_rate=5e-4,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        seed=17,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=train,
        eval_dataset=validation,
        data_collator=DataCollatorWithPadding(AutoTokenizer.from_pretrained(FOLDER)),
    )
    trainer.train()
