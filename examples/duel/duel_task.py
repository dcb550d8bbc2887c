from torch.nn.functional import softplus

from pipeline.tasks import StepOutput


class Duel:
    def __call__(self, model, batch):
        noise, real = batch
        made = model.generator(noise)
        loss = softplus(model.critic(made.detach())).mean() + softplus(-model.critic(real)).mean()
        yield StepOutput(loss, None, None, optimizer="critic")
        yield StepOutput(softplus(-model.critic(made)).mean(), None, None, optimizer="generator")
