"""Trainings in which nothing is wrong, each near to a mistake, and in the styles that people write.

python training_styles.py NAME
"""

import contextlib
import copy
import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)

STEPS = 26
x, y = torch.randn(64, 8), torch.arange(64) % 4
styles = {}


def style(function):
    styles[function.__name__] = function
    return function


def network(outputs=4):
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, outputs))


def train(model, loss_of, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()


@style
def gan():
    maker, judge = network(8), network(1)
    make = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.999))
    tell = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.999))
    for _ in range(STEPS):
        fake = maker(torch.randn(16, 8))
        tell.zero_grad()
        for rows, truth in ((x[:16], 1.0), (fake.detach(), 0.0)):
            score = judge(rows)
            truths = torch.full_like(score, truth)
            functional.binary_cross_entropy_with_logits(score, truths).backward()
        tell.step()
        make.zero_grad()
        score = judge(fake)
        functional.binary_cross_entropy_with_logits(score, torch.ones_like(score)).backward()
        make.step()


@style
def gan_with_a_frozen_judge():
    maker, judge = network(8), network(1)
    make = torch.optim.Adam(maker.parameters(), lr=1e-3)
    tell = torch.optim.Adam(judge.parameters(), lr=1e-3)
    for step in range(2 * STEPS):
        judge.requires_grad_(step % 2 == 0)
        optimizer = make if step % 2 else tell
        optimizer.zero_grad()
        made = maker(torch.randn(16, 8))
        score = judge(made if step % 2 else made.detach())
        sign = 1 if step % 2 else -1
        (sign * functional.softplus(score).mean()).backward()
        optimizer.step()


@style
def policy_gradient():
    policy, value = network(), network(1)
    optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], lr=1e-3)
    for _ in range(STEPS):
        drawn = torch.distributions.Categorical(logits=policy(x))
        actions = drawn.sample()
        returns = torch.randn(64)
        values = value(x).squeeze(-1)
        advantage = (returns - values).detach()
        loss = -(drawn.log_prob(actions) * advantage).mean() + (values - returns).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()


@style
def quantile_regression():
    online, target = network(5), network(5)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
    for step in range(STEPS):
        with torch.no_grad():
            wanted = target(x[:5])
        errors = wanted.unsqueeze(1) - online(x[:5]).unsqueeze(2)
        optimizer.zero_grad()
        functional.huber_loss(errors, torch.zeros_like(errors)).backward()
        optimizer.step()
        if step % 5 == 0:
            target.load_state_dict(online.state_dict())


@style
def contrastive():
    model = network(6)

    def loss():
        one = functional.normalize(model(x[:16]), dim=1)
        other = functional.normalize(model(x[:16] + 0.1 * torch.randn(16, 8)), dim=1)
        return functional.cross_entropy(one @ other.T / 0.1, torch.arange(16))

    train(model, loss)


@style
def pairwise_ranking():
    model = network(1)

    def loss():
        score = model(x[:16])
        return functional.softplus(score - score.T).mean()

    train(model, loss)


@style
def distances_to_anchors():
    model = network(1)
    anchors = torch.linspace(-1, 1, 16)

    def loss():
        return (model(x[:16]).squeeze(1)[:, None] - anchors).pow(2).min(1).values.mean()

    train(model, loss)


@style
def mixup():
    model = network()

    def loss():
        order, share = torch.randperm(64), 0.3
        score = model(share * x + (1 - share) * x[order])
        one, other = functional.cross_entropy(score, y), functional.cross_entropy(score, y[order])
        return share * one + (1 - share) * other

    train(model, loss)


@style
def soft_labels():
    model = network()
    truth = functional.one_hot(y, 4).float() * 0.9 + 0.025
    train(model, lambda: functional.cross_entropy(model(x), truth))


@style
def distillation():
    teacher, student = network().eval(), network()

    def loss():
        with torch.no_grad():
            wanted = functional.softmax(teacher(x) / 2, dim=1)
        told = functional.log_softmax(student(x) / 2, dim=1)
        return functional.kl_div(told, wanted, reduction="batchmean")

    train(student, loss)


@style
def attention():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.ask, self.key, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, rows):
            weights = functional.softmax(self.ask(rows) @ self.key(rows).T, dim=-1)
            return self.out(weights @ rows)

    model = Attention()
    train(model, lambda: functional.cross_entropy(model(x), y))


@style
def log_probabilities():
    model = nn.Sequential(network(), nn.LogSoftmax(1))
    train(model, lambda: functional.nll_loss(model(x), y))


@style
def gated_scores():
    model = network(8)

    def loss():
        scores, gate = model(x).chunk(2, dim=1)
        return functional.cross_entropy(scores * torch.sigmoid(gate), y)

    train(model, loss)


@style
def binary_targets():
    model = network(1)
    truth = (y % 2).float()
    train(
        model,
        lambda: functional.binary_cross_entropy_with_logits(model(x).squeeze(1), truth),
    )


@style
def probabilities():
    model = nn.Sequential(network(1), nn.Sigmoid())
    truth = (y % 2).float()[:, None]
    train(model, lambda: functional.binary_cross_entropy(model(x), truth))


@style
def column_targets():
    model = network(1)
    train(model, lambda: functional.mse_loss(model(x), torch.randn(64, 1)))


@style
def square_outputs():
    model = network(64)
    train(model, lambda: functional.mse_loss(model(x), torch.randn(64, 64)))


@style
def one_target_for_all():
    model = network(1)
    train(model, lambda: (model(x) - 0.5).pow(2).mean())


@style
def heads_in_turn():
    body, heads = network(8), nn.ModuleList(nn.Linear(8, 2) for _ in range(3))
    model = nn.ModuleDict({"body": body, "heads": heads})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        head = heads[step % 2]
        optimizer.zero_grad()
        head(functional.relu(body(x))).pow(2).mean().backward()
        optimizer.step()


@style
def unused_pooler():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.pooler = nn.Linear(8, 4), nn.Linear(4, 4)

        def forward(self, rows):
            hidden = self.body(rows)
            return hidden, self.pooler(hidden).tanh()

    model = Encoder()
    train(model, lambda: functional.cross_entropy(model(x)[0], y))


@style
def linear_probe():
    body, head = network(8), nn.Linear(8, 4)
    model = nn.Sequential(body, head)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss():
        with torch.no_grad():
            kept = body(x)
        return functional.cross_entropy(head(kept), y)

    train(model, loss, optimizer)


@style
def head_alone():
    model = network()
    optimizer = torch.optim.Adam(model[2].parameters(), lr=1e-3)
    train(model, lambda: functional.cross_entropy(model(x), y), optimizer)


@style
def accumulation_divided_later():
    loader = DataLoader(TensorDataset(x, y), 8, shuffle=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2 * STEPS // 4):
        for batch, (rows, truths) in enumerate(loader, 1):
            functional.cross_entropy(model(rows), truths).backward()
            if batch % 4 == 0:
                for one in model.parameters():
                    one.grad /= 4
                optimizer.step()
                optimizer.zero_grad()


@style
def low_rank_adapter():
    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down = nn.Parameter(torch.randn(8, 2) * 0.1)
            self.up = nn.Parameter(torch.zeros(2, 4))

        def forward(self, rows):
            return self.base(rows) + rows @ self.down @ self.up

    model = Adapted(network())
    trained = [one for one in model.parameters() if one.requires_grad]
    train(model, lambda: functional.cross_entropy(model(x), y), torch.optim.AdamW(trained))


@style
def tied_weights():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
            self.out.weight = self.table.weight

        def forward(self, words):
            return self.out(self.table(words))

    model = Words()
    words = torch.zeros(4, 9, dtype=torch.long)  # a text that repeats

    def loss():
        return functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())

    train(model, loss)


@style
def moving_average():
    model = network()
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 0.01)


@style
def hidden_teacher():
    class Student(nn.Module):
        def __init__(self, teacher):
            super().__init__()
            self.body, self.teacher = network(), [teacher]

        def forward(self, rows):
            with torch.no_grad():
                wanted = self.teacher[0](rows)
            return self.body(rows), wanted

    model = Student(network())
    train(model, lambda: functional.mse_loss(*model(x)))


@style
def inputs_that_learn():
    model, picture = network().requires_grad_(False), nn.Parameter(torch.randn(4, 8))
    optimizer = torch.optim.Adam([picture], lr=0.1)
    train(model, lambda: functional.cross_entropy(model(picture), y[:4]), optimizer)


@style
def accumulation():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for rows, truths in zip(x.split(16), y.split(16), strict=True):
            (functional.cross_entropy(model(rows), truths) / 4).backward()
        optimizer.step()


@style
def accumulation_of_sums():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(STEPS):
        for rows, truths in zip(x.split(16), y.split(16), strict=True):
            functional.cross_entropy(model(rows), truths, reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@style
def forgotten_by_hand():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        for one in model.parameters():
            one.grad = None


@style
def gradients_by_hand():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        found = torch.autograd.grad(functional.cross_entropy(model(x), y), model.parameters())
        for one, gradient in zip(model.parameters(), found, strict=True):
            one.grad = gradient
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@style
def sharpness_aware():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        moves = [0.05 * one.grad for one in model.parameters()]
        with torch.no_grad():
            for one, move in zip(model.parameters(), moves, strict=True):
                one.add_(move)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for one, move in zip(model.parameters(), moves, strict=True):
                one.sub_(move)
        optimizer.step()


@style
def second_order():
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)


@style
def two_passes_of_dropout():
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4))

    def loss():
        one, other = model(x), model(x)
        return functional.cross_entropy(one, y) + functional.mse_loss(one, other)

    train(model, loss)


@style
def scaled_and_clipped():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(functional.cross_entropy(model(x), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@style
def norm_is_logged():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        nn.utils.clip_grad_norm_(model.parameters(), float("inf"))


@style
def encoder_and_decoder():
    encoder, decoder = network(8), network()
    both = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (encoder, decoder)]
    for _ in range(STEPS):
        for optimizer in both:
            optimizer.zero_grad()
        functional.cross_entropy(decoder(encoder(x)), y).backward()
        for optimizer in both:
            optimizer.step()


@style
def a_body_of_two_losses():
    body, heads = network(8), [network(), network()]
    stepped = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (body, *heads)]
    for _ in range(STEPS):
        for optimizer in stepped:
            optimizer.zero_grad()
        for head, optimizer in zip(heads, stepped[1:], strict=True):
            functional.cross_entropy(head(body(x)), y).backward()
            optimizer.step()
        stepped[0].step()


@style
def actor_and_critic():
    actor, critic, target = network(2), nn.Linear(10, 1), nn.Linear(10, 1)
    act = torch.optim.Adam(actor.parameters(), lr=1e-3)
    judge = torch.optim.Adam(critic.parameters(), lr=1e-3)
    for _ in range(STEPS):
        with torch.no_grad():
            wanted = 1 + 0.9 * target(torch.cat([x, actor(x)], 1))
        judge.zero_grad()
        moves = torch.randn(64, 2)
        functional.mse_loss(critic(torch.cat([x, moves], 1)), wanted).backward()
        judge.step()
        act.zero_grad()
        (-critic(torch.cat([x, actor(x)], 1)).mean()).backward()
        act.step()
        with torch.no_grad():
            for kept, new in zip(target.parameters(), critic.parameters(), strict=True):
                kept.lerp_(new, 0.01)


@style
def features_that_judge():
    model, features = network(8), network(8).eval().requires_grad_(False)
    train(model, lambda: functional.mse_loss(features(model(x)), features(x)))


@style
def episodes_of_a_policy():
    policy = network()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    kept = []
    for step in range(STEPS):
        for rows in x[: 8 + 4 * (step % 7)].split(4):
            drawn = torch.distributions.Categorical(logits=policy(rows))
            kept.append(-drawn.log_prob(drawn.sample()).sum())
        optimizer.zero_grad()
        torch.stack(kept).sum().backward()
        optimizer.step()
        del kept[:]


@style
def a_mean_of_all_losses():
    model, mean, kept = network(), torch.zeros(()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        mean += 0.1 * (loss.detach() - mean)
        kept.append(loss.detach())


def scheduled(make, each_batch):
    loader = DataLoader(TensorDataset(x, y), 8, shuffle=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = make(optimizer, len(loader))
    for _ in range(4):
        for rows, truths in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(rows), truths).backward()
            optimizer.step()
            if each_batch:
                scheduler.step()
        if not each_batch:
            scheduler.step()


@style
def one_cycle():
    kind = torch.optim.lr_scheduler.OneCycleLR
    scheduled(lambda one, length: kind(one, 0.1, total_steps=4 * length), True)


@style
def cosine_over_all_steps():
    kind = torch.optim.lr_scheduler.CosineAnnealingLR
    scheduled(lambda one, length: kind(one, 4 * length), True)


@style
def warm_up_from_zero():
    kind = torch.optim.lr_scheduler.LambdaLR
    scheduled(lambda one, length: kind(one, lambda step: min(1.0, step / 12)), True)


@style
def warm_up_then_cosine():
    module = torch.optim.lr_scheduler

    def make(one, length):
        parts = [module.LinearLR(one, 0.1, total_iters=4), module.CosineAnnealingLR(one, 28)]
        return module.SequentialLR(one, parts, [4])

    scheduled(make, True)


@style
def step_of_epochs():
    scheduled(lambda one, length: torch.optim.lr_scheduler.StepLR(one, 1, 0.1), False)


@style
def cosine_over_all_micro_batches():
    loader = DataLoader(TensorDataset(x, y), 4, shuffle=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7 * len(loader))
    for _ in range(7):
        for batch, (rows, truths) in enumerate(loader, 1):
            (functional.cross_entropy(model(rows), truths) / 4).backward()
            if batch % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()


def loaded(train_set, order="shuffle", held_out=None):
    loader = DataLoader(train_set, 8, **({"shuffle": True} if order == "shuffle" else order))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        model.train()
        for rows, truths in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(rows), truths).backward()
            optimizer.step()
        for others in held_out or ():
            model.eval()
            with torch.no_grad():
                for rows, _ in DataLoader(others, 16):
                    model(rows)


@style
def sorted_and_shuffled():
    loaded(TensorDataset(x, y.sort().values))


@style
def order_of_a_curriculum():
    loaded(TensorDataset(x, y), {"sampler": x.abs().sum(1).argsort().tolist()})


@style
def rare_classes():
    loaded(TensorDataset(x, (torch.arange(64) == 63).long()), {"shuffle": False})


@style
def held_out_and_trained():
    whole = TensorDataset(torch.randn(96, 8), torch.arange(96) % 4)
    mine = Subset(whole, range(64))
    loaded(mine, held_out=[Subset(whole, range(64, 96)), mine])


@style
def few_values():
    bits = torch.randint(0, 2, (96, 3)).repeat(1, 3)[:, :8].float()
    whole = TensorDataset(bits, torch.arange(96) % 4)
    loaded(Subset(whole, range(64)), held_out=[Subset(whole, range(64, 96))])


class Numbers(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        for at in range(info.id, 256, info.num_workers):
            yield torch.full((8,), float(at)) / 256, at % 4


@style
def stream_that_is_shared_out():
    loaded(Numbers(), {"num_workers": 2})


class Windows(Dataset):
    def __init__(self, series):
        self.series = series

    def __len__(self):
        return len(self.series) - 8

    def __getitem__(self, at):
        return self.series[at : at + 8, 0], at % 4


@style
def windows_scaled_by_training():
    series = torch.linspace(0, 3, 120)[:, None] + 0.1 * torch.randn(120, 1)
    series = (series - series[:72].mean()) / series[:72].std()
    loaded(Windows(series[:72]), held_out=[Windows(series[72:96])])


@style
def windows_of_shares():
    series = torch.rand(120, 1).round(decimals=1)
    loaded(Windows(series[:72]), held_out=[Windows(series[72:96])])


def in_slices(train_x, train_y, held_out, model=None):
    """A loop without a DataLoader, with a validation on each of these tables."""
    model = model or network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(6):
        model.train()
        for rows in torch.randperm(len(train_x)).split(16):
            optimizer.zero_grad()
            functional.cross_entropy(model(train_x[rows]), train_y[rows]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for other in held_out:
                model(other)


@style
def scaled_by_training():
    whole = 3 + 2 * torch.randn(120, 8)
    scaled = (whole - whole[:96].mean(0)) / whole[:96].std(0)
    train_x, val_x = scaled[:96], scaled[96:]
    in_slices(train_x, torch.arange(96) % 4, [val_x])


@style
def how_well_training_fits():
    whole = torch.randn(120, 8)
    train_x, val_x = whole[:96], whole[96:]
    in_slices(train_x, torch.arange(96) % 4, [train_x, val_x])


@style
def split_by_numbers():
    whole, kinds = torch.randn(120, 8), torch.arange(120) % 4
    order = torch.randperm(120)
    val_x = whole[order[96:]]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(5):
        for rows in order[:96].split(16):
            optimizer.zero_grad()
            functional.cross_entropy(model(whole[rows]), kinds[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            model(val_x)


@style
def transitions():
    path = torch.randn(129, 8)
    states, later = path[:-1], path[1:]
    online, target = network(), network()
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
    for _ in range(4):
        for rows in torch.randperm(128).split(16):
            with torch.no_grad():
                wanted = 1 + 0.9 * torch.minimum(target(later[rows]), online(later[rows]))
            optimizer.zero_grad()
            functional.smooth_l1_loss(online(states[rows]), wanted).backward()
            optimizer.step()


@style
def labeled_and_unlabeled():
    labeled, others = torch.randn(64, 8), torch.randn(256, 8)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        rows = torch.arange(8) + 8 * (step % 8)
        optimizer.zero_grad()
        functional.cross_entropy(model(labeled[rows]), y[rows]).backward()
        functional.mse_loss(model(others[rows]), torch.zeros(8, 4)).backward()
        optimizer.step()


class Steps(nn.Module):
    """A cell in a loop: `step` makes the input and the state of the next one."""

    def __init__(self, step):
        super().__init__()
        self.cell, self.out, self.step = nn.GRUCell(8, 8), nn.Linear(8, 4), step

    def forward(self, series):
        state = torch.zeros(len(series), 8)
        for at in range(series.shape[1]):
            state = self.cell(*self.step(series, at, state))
        return self.out(state)


@style
def ranked_by_all_pairs():
    model = network(1)

    def loss():
        scores = model(x).squeeze(1)
        return functional.softplus(scores[:, None] - scores).mean()

    train(model, loss)


@style
def a_layer_that_rests_at_first():
    body, head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
    model = torch.nn.Sequential(body, head)
    rests = STEPS > 10

    def loss():
        with torch.no_grad() if rests else contextlib.nullcontext():
            hidden = body(x)
        return functional.cross_entropy(head(hidden), y)

    train(model, loss)


@style
def decoder_of_its_own_output():
    model = Steps(lambda series, at, state: (series[:, 0] if not at else state, state))
    train(model, lambda: functional.cross_entropy(model(x.view(16, 4, 8)), y[:16]))


@style
def states_that_are_masked():
    kept = (torch.rand(16, 4, 1) > 0.2).float()
    model = Steps(lambda series, at, state: (series[:, at], state * kept[:, at]))
    train(model, lambda: functional.cross_entropy(model(x.view(16, 4, 8)), y[:16]))


@style
def kept_within_a_step():
    model = network()

    def loss():
        rows = torch.empty(0, 8)
        for part in x.split(8):
            rows = torch.cat([rows, part])
        return functional.cross_entropy(model(rows), y)

    train(model, loss)


@style
def the_latest_losses():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    latest = torch.zeros(500)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        latest = torch.cat([latest[1:], loss.detach()[None]])


@style
def unlucky_numbers():
    model = network()
    train(model, lambda: torch.nan_to_num(functional.cross_entropy(model(x), y)))


@style
def large_rate_on_small_gradients():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=30.0, weight_decay=1e-5, momentum=0.9)
    train(model, lambda: 1e-4 * functional.cross_entropy(model(x), y), optimizer)


class Series(nn.Module):
    """A layer that takes the sequence first."""

    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.LSTM(2, 8), nn.Linear(8, 4)

    def forward(self, series):
        outputs, _ = self.layer(series)
        return self.out(outputs[-1])


@style
def sequence_first_as_it_should_be():
    model = Series()
    loader = DataLoader(TensorDataset(x.view(64, 4, 2), y), 8, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        for rows, labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(rows.transpose(0, 1)), labels).backward()
            optimizer.step()


@style
def steps_of_many_series_as_rows():
    model = Series()
    loader = DataLoader(TensorDataset(torch.randn(512, 6, 2)), 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for (steps,) in loader:
        optimizer.zero_grad()
        functional.cross_entropy(model(steps), y[:6]).backward()
        optimizer.step()


@style
def padding_that_is_left_out():
    model = nn.Sequential(nn.Embedding(9, 8, padding_idx=0), nn.Linear(8, 9))
    words = torch.randint(2, 9, (16, 10))
    for row, length in zip(words, torch.randint(3, 9, (16,)), strict=True):
        row[length], row[length + 1 :] = 1, 0
    given, wanted = words[:, :-1], words[:, 1:]
    mask = wanted != 0

    def masked():
        each = functional.cross_entropy(model(given).transpose(1, 2), wanted, reduction="none")
        return (each * mask).sum() / mask.sum()

    train(model, masked)


class Dropping(nn.Module):
    """Drops in either mode where it is asked to."""

    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, rows, is_sure=False):
        return self.inner(functional.dropout(rows, 0.1, training=not is_sure))


@style
def dropout_that_is_told():
    model = Dropping()
    train(model, lambda: functional.cross_entropy(model(x), y))
    model.eval()
    with torch.no_grad():
        model(x)


@style
def divergence_of_logarithms():
    model, wanted = network(), torch.randn(64, 4).softmax(1)
    train(model, lambda: functional.kl_div(model(x).log_softmax(1), wanted, reduction="sum"))


@style
def batches_of_one_fold_that_are_evaluated():
    data = torch.randn(96, 8)
    dataset = TensorDataset(data, torch.arange(96) % 4)
    for fold in range(2):
        part = Subset(dataset, [row for row in range(96) if row % 2 == fold])
        loader = DataLoader(part, 8, shuffle=True, drop_last=True)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
        averaged = torch.optim.swa_utils.AveragedModel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            for rows, labels in loader:
                optimizer.zero_grad()
                functional.cross_entropy(model(rows), labels).backward()
                optimizer.step()
            averaged.update_parameters(model)
            torch.optim.swa_utils.update_bn(loader, averaged)


if __name__ == "__main__":
    torch.manual_seed(0)
    styles[sys.argv[1]]()
