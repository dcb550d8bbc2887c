from torch.nn.functional import softplus


class Duel:
    def __call__(self, model, batch, update):
        noise, real = batch
        made = model.generator(noise)
        update("critic", softplus(model.critic(made.detach())).mean() + softplus(-model.critic(real)).mean())
        update("generator", softplus(-model.critic(made)).mean())
