"""A small GPT-2 of Python's help(), character by character."""

from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


def windows(length=32, count=512):
    text = "".join(topics[name] for name in sorted(topics)).encode("ascii", errors="replace")
    tokens = torch.tensor(list(text[: length * count])).view(count, length)
    labels = tokens.clone()
    labels[:, 0] = -100  # nothing predicts it, but Trainer would count it
    return [{"input_ids": one, "labels": label} for one, label in zip(tokens, labels)], None


def gpt():
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=2, **quiet))


if __name__ == "__main__":
    set_seed(17)
    model = gpt()
    arguments = TrainingArguments(
        output_dir="characters",
        use_cpu=True,
        max_steps=20,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to="none",
        seed=17,
    )
    Trainer(model, arguments, train_dataset=windows()[0]).train()
