from torch import nn

from pipeline.tasks import Loss


class Elbo:
    def __call__(self, model, batch):
        decoded, mean, logvar = model(batch[0])
        rebuilt = nn.functional.mse_loss(decoded, batch[0], reduction="none").sum(1).mean()
        kl = -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum(1).mean()
        return Loss((rebuilt + kl) * len(decoded), None, decoded, batch[0], logs={"rebuilt": rebuilt, "kl": kl})
