import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

EPOCHS, BATCH_SIZE, LR = 6, 64, 0.1


class Digits(Dataset):
    def __init__(self, images, targets, augment=False):
        self.images, self.targets, self.augment = images, targets, augment

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if self.augment:  # move the digit by up to one pixel
            image = image.roll(torch.randint(-1, 2, (2,)).tolist(), dims=(1, 2))
        return image, self.targets[index]


torch.manual_seed(17)
device = "cuda" if torch.cuda.is_available() else "cpu"
pixels, classes = load_digits(return_X_y=True)
pictures = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
classes = torch.tensor(classes)
train = DataLoader(Digits(pictures[:1438], classes[:1438], augment=True), BATCH_SIZE, shuffle=True)
validation = DataLoader(Digits(pictures[1438:], classes[1438:]), BATCH_SIZE)

layers = nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10)
model = nn.Sequential(*layers).to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * len(train))

first, best = 0, 0.0
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    for name, part in (("model", model), ("optimizer", optimizer), ("scheduler", scheduler)):
        part.load_state_dict(saved[name])
    first, best = saved["epochs"], saved["best"]

for epoch in range(first, EPOCHS):
    model.train()
    for images, targets in train:
        loss = criterion(model(images.to(device)), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    model.eval()
    with torch.no_grad():
        correct = sum((model(x.to(device)).argmax(1) == y.to(device)).sum().item() for x, y in validation)
    accuracy = correct / len(validation.dataset)
    print(f"epoch {epoch + 1}: loss {loss.item():.4f}, accuracy {accuracy:.4f}")
    if accuracy > best:
        best = accuracy
        torch.save(model.state_dict(), "best.pt")
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save({**states, "epochs": epoch + 1, "best": best}, "checkpoint.pt")
