"""How far a disease goes in a year, by ten measurements: regression that stops once validation doesn't improve."""

import copy

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def patients():
    features, targets = load_diabetes(return_X_y=True)
    targets = torch.tensor(targets, dtype=torch.float32)[:, None]
    both = TensorDataset(20 * torch.tensor(features, dtype=torch.float32), (targets - 152) / 77)
    return TensorDataset(*both[:342]), TensorDataset(*both[342:])


def regressor():
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))


if __name__ == "__main__":
    torch.manual_seed(17)
    model = regressor()
    train, validation = patients()
    loader = DataLoader(train, batch_size=32, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.MSELoss()
    best, best_weights, waited = float("inf"), None, 0
    for epoch in range(40):
        model.train()
        for features, targets in loader:
            optimizer.zero_grad()
            criterion(model(features), targets).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            features, targets = validation[:]
            value = float(criterion(model(features), targets))
        if value < best:
            best, best_weights, waited = value, copy.deepcopy(model.state_dict()), 0
        else:
            waited += 1
        if waited == 3:
            break
    torch.save(best_weights, "best.pt")
    print(f"stopped after epoch {epoch + 1}, best loss {best:.4f}")
