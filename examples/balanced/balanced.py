"""Tumours from measurements: equally many of both classes in an epoch, and an error on one of them counts double."""

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


def tumours():
    features, classes = load_breast_cancer(return_X_y=True)
    features = torch.tensor((features - features.mean(0)) / features.std(0), dtype=torch.float32)
    both = TensorDataset(features, torch.tensor(classes))
    return TensorDataset(*both[:448]), TensorDataset(*both[448:])


def classifier():
    return nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 2))


def class_weights():
    return torch.tensor([2.0, 1.0])


if __name__ == "__main__":
    torch.manual_seed(17)
    model = classifier()
    train, validation = tumours()
    classes = train.tensors[1]
    sampler = WeightedRandomSampler(1 / classes.bincount()[classes], num_samples=len(train))
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    criterion = nn.CrossEntropyLoss(weight=class_weights())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    for epoch in range(3):
        for features, targets in loader:
            loss = criterion(model(features), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, float(loss))
