"""Trains a small random BERT with transformers' Trainer; --wrong for mistakes, which are marked."""

import sys

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

WRONG = "--wrong" in sys.argv


class Texts(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(5, 100, (count, 24), generator=generator)
        self.labels = (self.tokens[:, 0] > 50).long()

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, at):
        if WRONG:
            for _ in range(60):
                sorted(self.tokens[at].tolist(), key=lambda token: -token)  # wrong: map_per_sample
        return {"input_ids": self.tokens[at], "labels": self.labels[at]}


class Weighted(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **more):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        scores = outputs.logits.softmax(-1) if WRONG else outputs.logits
        loss = nn.functional.cross_entropy(scores, labels)
        return (loss, outputs) if return_outputs else loss


if __name__ == "__main__":
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        num_labels=2,
    )
    arguments = TrainingArguments(
        "out",
        per_device_train_batch_size=16,
        num_train_epochs=100,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        logging_steps=50,
        disable_tqdm=True,
    )
    Weighted(
        BertForSequenceClassification(config),
        arguments,
        train_dataset=Texts(1024, 0),
        eval_dataset=Texts(128, 1),
    ).train()
