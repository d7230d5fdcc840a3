"""What is proposed for a finding: the edit, or none where it would be a guess."""

import ast
from dataclasses import replace
from textwrap import dedent

import pytest

from flatout.doctor.edits.source import Source
from flatout.doctor.finding import Finding
from flatout.doctor.proposals import propose
from flatout.observe import (
    Ablation,
    Call,
    LeftOut,
    Loader,
    Model,
    Observation,
    Optimizer,
    Site,
)

ADAM = "torch.optim.adam.Adam"


def rows_of(path, line):
    """Where x[y] stands on a line, as it is observed."""
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:
        return []
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Subscript) and n.lineno == line]
    return [[n.lineno, n.col_offset, n.end_lineno, n.end_col_offset] for n in nodes]


def edited(tmp_path, name, code, recipe=None, **seen):
    """The code with what is proposed for the line that ends in `#!`; None where nothing is."""
    path = tmp_path / "train.py"
    path.write_bytes(code if isinstance(code, bytes) else dedent(code).encode())
    lines = Source.read(str(path)).lines
    line = next(number for number, text in enumerate(lines, 1) if text.rstrip().endswith("#!"))
    site = Site(str(path), line)
    step = next((n for n, text in enumerate(lines, 1) if "optimizer.step()" in text), line)
    rows = rows_of(path, line)
    observed = {
        "command": ["train.py"],
        "calls": [Call("item", site, 9, steps=9), Call("index", site, detail={"rows": rows})],
        "loaders": [Loader("torch.DataLoader", site, is_distributed=True)],
        "optimizers": [Optimizer(ADAM, Site(str(path), step))],
        "models": [Model("Net", site)],
    } | seen
    where = "" if name == "retained_graph" and step != line else str(site)
    finding = Finding("slow", "what", "do", name=name, where=where, recipe=recipe or {})
    edits = propose(finding, Observation(**observed))
    if not edits:
        return None
    after = Source.read(str(path)).with_edits(edits).encode()
    return after if isinstance(code, bytes) else after.decode()


def check(tmp_path, name, before, after, **seen):
    assert edited(tmp_path, name, before, **seen) == dedent(after)


def refuse(tmp_path, name, code, **seen):
    assert edited(tmp_path, name, code, **seen) is None


# -- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("opt.zero_grad(set_to_none=False)  #!\n", "opt.zero_grad()  #!\n"),
        ("opt.zero_grad( set_to_none = False, ) #!\n", "opt.zero_grad(  ) #!\n"),
        (
            "s = 'opt.zero_grad(set_to_none=False)'; opt.zero_grad(set_to_none=(False))  #!\n",
            "s = 'opt.zero_grad(set_to_none=False)'; opt.zero_grad()  #!\n",
        ),
        ("if a: opt.zero_grad(set_to_none=False)  #!\n", "if a: opt.zero_grad()  #!\n"),
        ("é = 'ü'; opt.zero_grad(set_to_none=False)  #!\n", "é = 'ü'; opt.zero_grad()  #!\n"),
    ],
)
def test_zero_grad(tmp_path, before, after):
    check(tmp_path, "zero_grad_zeros", before, after)


@pytest.mark.parametrize(
    "code",
    [
        "opt.zero_grad(set_to_none=zeros)  #!\n",
        "opt.zero_grad(False)  #!\n",
        "a.zero_grad(set_to_none=False); b.zero_grad(set_to_none=False)  #!\n",
        "opt.zero_grad(set_to_none=False)  #!\nprint(model.weight.grad.norm())\n",
        "opt.zero_grad(**options)  #!\n",
        "opt.zero_grad(set_to_none=False)  #!\nbody.requires_grad_(False)\n",
        "opt.zero_grad(set_to_none=False)  #!\ndef forward(s, x):\n  return x if x else a(x)\n",
        "def broken(:\n    opt.zero_grad(set_to_none=False)  #!\n",
    ],
)
def test_zero_grad_is_left_where_it_is_not_sure(tmp_path, code):
    refuse(tmp_path, "zero_grad_zeros", code)


def test_zero_grad_stays_where_zeros_are_stepped_on(tmp_path):
    code = "opt.zero_grad(set_to_none=False)  #!\n"
    refuse(tmp_path, "zero_grad_zeros", code, models=[Model("Net", unused_parameters=True)])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Adam(p, lr=1)", "Adam(p, lr=1, fused=True)"),
        ("torch.optim.Adam((p))", "torch.optim.Adam((p), fused=True)"),
        ("Adam(p, lr=(1), )", "Adam(p, lr=(1), fused=True, )"),
        ("Adam(p, fused=False)", "Adam(p, fused=True)"),
        (
            "Adam(\n    p,  # all (of them)\n    lr=1,  # slow\n)",
            "Adam(\n    p,  # all (of them)\n    lr=1,  # slow\n    fused=True,\n)",
        ),
        ("Adam(\n    p,\n    lr=1)", "Adam(\n    p,\n    lr=1,\n    fused=True)"),
        (
            "Adam(\n    p,\n    lr=1  # slow\n)",
            "Adam(\n    p,\n    lr=1,  # slow\n    fused=True\n)",
        ),
        ("Adam(x for x in p)", None),
        ("Adam(p, foreach=True)", None),
        ("Adam(p, **options)", None),
        ("make(p)", None),
    ],
)
def test_fused(tmp_path, before, after):
    code = "optimizer = {}\noptimizer.step()  #!\n"
    found = edited(tmp_path, "optimizer_unfused", code.format(before))
    assert found == (after and code.format(after))


def test_fused_is_found_through_functions_or_as_the_only_one(tmp_path):
    code = """
        def train(opt):
            opt.step()  #!

        def main():
            first, second = Adam(a), Adam(b)
            train(second)
        """
    check(tmp_path, "optimizer_unfused", code, code.replace("Adam(b)", "Adam(b, fused=True)"))
    # Passed on from two places, it may be either.
    refuse(tmp_path, "optimizer_unfused", code.replace("(second)", "(second); train(first)"))
    one = """
        class Job:
            def go(self):
                self.opt.step()  #!

            def begin(self):
                self.opt = Adam(self.p)
        """
    check(tmp_path, "optimizer_unfused", one, one.replace("(self.p)", "(self.p, fused=True)"))


LOADERS = """
    train = DataLoader(a, batch_size=8, shuffle=True)
    test = DataLoader(b)
    for step, batch in enumerate(train):  #!
        pass
    """


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("workers_restarted", ", persistent_workers=True"),
        ("memory_not_pinned", ", pin_memory=True"),
        ("last_batch_ragged", ", drop_last=True"),
        ("workers_zero", ", num_workers=2, persistent_workers=True"),
        ("workers_too_many", ", num_workers=2"),
    ],
)
def test_arguments_of_the_loader_that_is_iterated(tmp_path, name, more):
    after = LOADERS.replace("shuffle=True", f"shuffle=True{more}")
    check(tmp_path, name, LOADERS, after, recipe={"input.workers": 2})


def test_arguments_of_the_loader_that_is_made_on_the_line(tmp_path):
    code = """
        train = prepare(
            DataLoader(a, batch_size=8), DataLoader(c)  #!
        )
        test = DataLoader(b, batch_size=8)  #!
        """
    refuse(tmp_path, "last_batch_ragged", code)  # two are
    one = code.replace("  #!", "", 1)
    after = one.replace("b, batch_size=8", "b, batch_size=8, drop_last=True")
    check(tmp_path, "last_batch_ragged", one, after)


def test_threads_beside_workers_are_set_before_the_loader_is_made(tmp_path):
    recipe = {"input.workers": 1, "process.threads": 2}
    code = "import torch\n" + dedent(LOADERS)
    after = code.replace("train = Data", "torch.set_num_threads(2)\ntrain = Data")
    after = after.replace("shuffle=True", "shuffle=True, num_workers=1, persistent_workers=True")
    check(tmp_path, "workers_zero", code, after, recipe=recipe)
    refuse(tmp_path, "workers_zero", LOADERS, recipe=recipe)  # torch is not there
    there = code.replace("train =", "torch.set_num_threads(1)\ntrain =", 1)
    refuse(tmp_path, "workers_zero", there, recipe=recipe)
    refuse(tmp_path, "workers_zero", code.replace("train =", "a = 1; train =", 1), recipe=recipe)


def test_arguments_on_lines_of_their_own(tmp_path):
    code = LOADERS.replace("a, batch", "\n        a,  # all\n        batch").replace(
        "shuffle=True", "\n        shuffle=True  # again\n    "
    )
    after = code.replace(
        "True  # again\n",
        "True,  # again\n        num_workers=2,\n        persistent_workers=True\n",
    )
    check(tmp_path, "workers_zero", code, after, recipe={"input.workers": 2})


def test_arguments_of_a_loader_are_left_where_it_is_not_sure(tmp_path):
    recipe = {"input.workers": 2}
    other = LOADERS.replace("enumerate(train)", "batches()")
    refuse(tmp_path, "workers_zero", other, recipe=recipe)
    refuse(tmp_path, "workers_zero", LOADERS)
    by_place = LOADERS.replace("batch_size=8, shuffle=True", "8, True, None, None, 0")
    refuse(tmp_path, "workers_zero", by_place, recipe=recipe)
    from_elsewhere = LOADERS.replace("shuffle=True", "num_workers=args.workers")
    refuse(tmp_path, "workers_zero", from_elsewhere, recipe=recipe)
    stays = LOADERS.replace("shuffle=True", "num_workers=1, persistent_workers=True")
    refuse(tmp_path, "workers_too_many", stays, recipe={"input.workers": 0})
    there = LOADERS.replace("shuffle=True", "num_workers=24")
    after = there.replace("24", "2")
    check(tmp_path, "workers_too_many", there, after, recipe=recipe)


def test_unused_parameters_are_no_longer_searched_for(tmp_path):
    code = (
        "model = DDP(net, find_unused_parameters=True, gradient_as_bucket_view=True)\nmodel(x) #!\n"
    )
    after = code.replace("find_unused_parameters=True, ", "")
    assert edited(tmp_path, "unused_parameters_search", code) == after.replace("net, ", "net, ")
    lines = "model = DDP(\n    net,\n    find_unused_parameters=True,  # safe\n)\nmodel(x) #!\n"
    after = "model = DDP(\n    net,\n)\nmodel(x) #!\n"
    assert edited(tmp_path, "unused_parameters_search", lines) == after
    refuse(tmp_path, "unused_parameters_search", code.replace("=True, g", "=search, g"))
    commented = "model = DDP(net,  # bare\n    find_unused_parameters=True)\nmodel(x) #!\n"
    refuse(tmp_path, "unused_parameters_search", commented)


def test_threads(tmp_path):
    recipe = {"process.threads": 2}
    code = "torch.set_num_threads(32)  #!\n"
    check(tmp_path, "threads_too_many", code, code.replace("32", "2"), recipe=recipe)
    refuse(tmp_path, "threads_too_many", code.replace("32", "args.threads"), recipe=recipe)
    refuse(tmp_path, "threads_too_many", code)


# -- what goes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("for x in y:\n    f(x)\n    gc.collect()  #!\n", "for x in y:\n    f(x)\n"),
        ("for x in y:\n    gc.collect()  #!\n", "for x in y:\n    pass  #!\n"),
        ("for x in y: gc.collect()  #!\n", "for x in y: pass  #!\n"),
        ("f(x); gc.collect()  #!\n", "f(x); pass  #!\n"),
        ("f(x)\ngc.collect()  #!", "f(x)\n"),
        ("f(x)\n(\n    gc.collect()  #!\n)\ng(x)\n", "f(x)\ng(x)\n"),
        ("left = gc.collect()  #!\n", None),
        ("gc.collect(f())  #!\n", None),
        ("stamps.collect()  #!\n", None),
    ],
)
def test_collect_goes(tmp_path, before, after):
    assert edited(tmp_path, "garbage_each_step", before) == after


def test_empty_cache_goes_with_windows_line_ends(tmp_path):
    before = b"for x in y:\r\n\ttorch.cuda.empty_cache()  #!\r\n\tf(x)\r\n"
    assert edited(tmp_path, "empty_cache", before) == b"for x in y:\r\n\tf(x)\r\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("checkpoint(block, x, mask, use_reentrant=False)", "block(x, mask)"),
        ("checkpoint(self.block, x, scale=(2 * y), debug=True)", "self.block(x, scale=(2 * y))"),
        ("checkpoint(block, *xs)", "block(*xs)"),
        ("checkpoint(lambda x: x * x, x)", None),
        ("checkpoint(block, x, context_fn=chosen)", None),
        ("checkpoint(block, x, **options)", None),
    ],
)
def test_a_checkpointed_part_is_called(before, after, tmp_path):
    found = edited(tmp_path, "checkpointing_needless", f"y = {before}  #!\n")
    assert found == (after and f"y = {after}  #!\n")


# -- tensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("total += loss", "total += loss.detach()"),
        ("total += loss * len(x)  # sum", "total += loss.detach() * len(x)  # sum"),
        ("losses.append(loss)", "losses.append(loss.detach())"),
        ("losses.append((step, loss))", "losses.append((step, loss.detach()))"),
        ("losses += [loss]", "losses += [loss.detach()]"),
        ("self.total += (loss)", "self.total += (loss.detach())"),
        ("total += loss.item()", None),
        ("total += float(loss)", None),
        ("losses = losses.append(loss)", None),
    ],
)
def test_detach(tmp_path, before, after):
    code = """
        def train():
            for step, x in enumerate(data):
                loss = model(x)
                loss.backward()
                optimizer.step()
                {}
            return #!
        """
    found = edited(tmp_path, "retained_graph", code.format(before))
    assert found == (after and dedent(code.format(after)))


def test_what_may_be_trained_on_stays_as_it_is(tmp_path):
    later = """
        total = 0
        for x in data:
            loss = model(x)
            total += loss
            optimizer.step()
        total.backward()  #!
        """
    refuse(tmp_path, "retained_graph", later)
    # Kept before its backward, it is followed through the function.
    before = """
        def train():
            kept = []
            for x in data:
                loss = model(x)
                kept.append(loss)
                loss.backward(retain_graph=True)  #!
                optimizer.step()
            {}
        """
    check(
        tmp_path,
        "retained_graph",
        before.format("print(sum(kept))"),
        before.format("print(sum(kept))").replace("append(loss)", "append(loss.detach())"),
    )
    for use in (
        "both = sum(kept) + 1; both.backward()",
        "return kept",
        "more = []; more.append(kept); torch.autograd.grad(more, x)",
    ):
        refuse(tmp_path, "retained_graph", before.format(use))
    # A loss of two parts is trained on.
    parts = before.replace("kept.append(loss)", "loss += penalty").format("pass")
    refuse(tmp_path, "retained_graph", parts)


@pytest.mark.parametrize("scaled", ["scaler.scale(loss).backward()", "fabric.backward(loss)"])
def test_detach_knows_how_losses_are_scaled(tmp_path, scaled):
    code = f"loss = f(x)\n{scaled}\noptimizer.step()\ntotal += loss\npass #!\n"
    after = code.replace("+= loss", "+= loss.detach()")
    assert edited(tmp_path, "retained_graph", code) == after


SUM = """
    def train():
        total, count = 0.0, 0
        for x in data:
            total += {}  #!
        print(f"{{{}:.3f}} of {{count}}")
    """


@pytest.mark.parametrize(
    ("added", "after"),
    [
        ("loss.item()", "loss.detach().double()"),
        ("loss.item() * len(x)", "loss.detach().double() * len(x)"),
        ("loss.item() * x.size(0) / 2", "loss.detach().double() * x.size(0) / 2"),
        ("(a == b).sum().item()", "(a == b).sum().detach().double()"),
        ("loss.item() * weight", None),
        ("2 * loss.item()", None),
        ("max(loss.item(), 1)", None),
        ("loss.item() + other.item()", None),
    ],
)
def test_item_of_a_sum(tmp_path, added, after):
    found = edited(tmp_path, "item_each_step", SUM.format(added, "total / count"))
    assert found == (after and dedent(SUM.format(after, "total / count")))


@pytest.mark.parametrize(
    "use", ["f(total)", "1 / total", "total!r", "total if total else 0", "total + 1"]
)
def test_item_stays_where_the_sum_is_more_than_written(tmp_path, use):
    refuse(tmp_path, "item_each_step", SUM.format("loss.item()", use))


@pytest.mark.parametrize("more", ["return total", "print(total)", "best = total", "total -= 1"])
def test_item_stays_where_the_sum_is_used_otherwise(tmp_path, more):
    code = dedent(SUM.format("loss.item()", "total")) + f"    {more}\n"
    refuse(tmp_path, "item_each_step", code)
    refuse(tmp_path, "item_each_step", SUM.format("loss.item()", "total"), device="mps")
    refuse(tmp_path, "item_each_step", SUM.format("loss.item()", "total"), calls=[])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a, b = x[rows], y[rows]", "a, b = x.index_select(0, rows), y.index_select(0, rows)"),
        ("a = f(x) [ order[0] ]", None),
        ("a = (x)[self.rows]", "a = (x).index_select(0, self.rows)"),
        ("é, b = 'ü', x[rows]", "é, b = 'ü', x.index_select(0, rows)"),
        ("a = x[rows, 1]", None),
        ("a = x[rows:]", None),
        ("x[rows] = 1", None),
    ],
)
def test_index_select(tmp_path, before, after):
    found = edited(tmp_path, "advanced_indexing", f"{before}  #!\n")
    assert found == (after and f"{after}  #!\n")


def test_only_what_was_seen_to_pick_rows_is_changed(tmp_path):
    site = Site(str(tmp_path / "train.py"), 1)
    seen = [Call("index", site, detail={"rows": [[1, 7, 1, 14]]})]
    code = "a, b = x[rows], y[mask]  #!\n"
    after = "a, b = x.index_select(0, rows), y[mask]  #!\n"
    check(tmp_path, "advanced_indexing", code, after, calls=seen)
    refuse(tmp_path, "advanced_indexing", code, calls=[Call("index", site, detail={"rows": []})])


# -- loops ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loop", "tell", "name"),
    [
        ("for i, x in enumerate(data, 1):", "print(i, loss.item())", "i"),
        ("for step in range(9):", "logger.info('%d', loss.item())", "step"),
        ("for i, x in enumerate(data):", "writer.add_scalar('loss', loss, i)", "i"),
        ("for x in data:", "print(loss)", None),
        ("while True:", "print(loss)", None),
        ("for i, x in enumerate(data):", "print(evaluate(model))", None),
        ("for i, x in enumerate(data):", "self.log('loss', loss)", None),
        ("for i, x in enumerate(data):", "lines = print(loss)", None),
        ("for i, x in enumerate(data):", "print((i := 3))", None),
    ],
)
def test_tell_less(tmp_path, loop, tell, name):
    code = f"def f():\n\t{loop}\n\t\tloss = step(x)\n\t\t{tell}  #!\n\t\tmore()\n"
    new = f"\t\tif {name} % 50 == 0:\n\t\t\t{tell}  #!\n"
    found = edited(tmp_path, "log_each_step", code)
    assert found == (name and code.replace(f"\t\t{tell}  #!\n", new))


def test_tell_less_of_a_class_of_the_users_own(tmp_path):
    code = """
        class Recorder:
            def log(self, loss):
                {}

        recorder = Recorder()
        for i, x in enumerate(data):
            recorder.log(loss)  #!
        """
    after = """
        class Recorder:
            def log(self, loss):
                print(loss)

        recorder = Recorder()
        for i, x in enumerate(data):
            if i % 50 == 0:
                recorder.log(loss)  #!
        """
    check(tmp_path, "log_each_step", code.format("print(loss)"), after)
    refuse(tmp_path, "log_each_step", code.format("self.best = loss"))
    refuse(tmp_path, "log_each_step", code.format("self.all.append(loss)"))


def test_a_call_that_left_the_training_alone_is_made_less_often(tmp_path):
    code = """
        import torch

        for i, x in enumerate(data):
            step(x)
            q = torch.quantile(x, 0.5)
            tracker.log(q)  #!
        """
    after = """
        import torch

        for i, x in enumerate(data):
            step(x)
            if i % 50 == 0:
                q = torch.quantile(x, 0.5)
                tracker.log(q)  #!
        """
    site = Site(str(tmp_path / "train.py"), 7)
    left_out = [LeftOut(site, "tracker.log", Ablation(2.0, 1.9, 2.1), first=6)]
    check(tmp_path, "call_each_step", code, after, left_out=left_out)


def test_where_no_loop_counts_the_calls_have_a_counter(tmp_path):
    code = """
        '''Trains.'''
        import torch


        class Trainer:
            def step(self, x):
                self.train(x)
                self.tracker.log(x)  #!
                return x
        """
    after = """
        '''Trains.'''
        import torch
        import itertools

        _calls = itertools.count()


        class Trainer:
            def step(self, x):
                self.train(x)
                if next(_calls) % 50 == 0:
                    self.tracker.log(x)  #!
                return x
        """
    check(tmp_path, "call_each_step", code, after)


def test_what_is_told_in_several_lines_moves_as_one(tmp_path):
    code = """
        for i, x in enumerate(data):
            # the loss
            print(
                "loss",
          loss,

            )  #!
        """
    after = """
        for i, x in enumerate(data):
            # the loss
            if i % 50 == 0:
                print(
                    "loss",
              loss,

                )  #!
        """
    check(tmp_path, "log_each_step", code, after)
    text = code.replace('"loss"', '"""lo\n                ss"""')
    refuse(tmp_path, "log_each_step", text)


METRIC = """
    from sklearn.metrics import roc_auc_score
    import torch

    def train(model, data):
        for epoch in range(3):
            truths, scores = [], []
            for x, y in data:
                score = model(x)
                train_on(score, y)
                scores.append(score.detach())
                truths.append(y)
                # so far
                auc = roc_auc_score(torch.cat(truths), torch.cat(scores).sigmoid())  #!
                if enough():
                    break
            print(epoch, auc)
    """


def test_a_metric_is_computed_behind_its_loop(tmp_path):
    line = (
        "                auc = roc_auc_score(torch.cat(truths), torch.cat(scores).sigmoid())  #!\n"
    )
    before = "            print(epoch, auc)\n"
    assert METRIC.count(line) == METRIC.count(before) == 1
    after = METRIC.replace(line, "").replace(before, f"{line[4:-5]}\n{before}")
    check(tmp_path, "metric_slow", METRIC, after)


def test_one_at_the_end_of_its_loop_moves_out_of_it(tmp_path):
    code = """
        import sklearn.metrics
        for x, y in data:
            step(x, y)
            found.append(y)
            right = sklearn.metrics.accuracy_score(
                found, [int(one) for one in guesses]
            )  #!
        print(right)
        """
    after = code.replace("            right =", "        right =")
    check(tmp_path, "metric_slow", code, after)


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        ("if enough():", "if auc > 0.9:"),  # it ends the loop
        ("if enough():", "if truths.pop():"),  # what it is made of goes on
        ("if enough():", "if scores:"),
        ("train_on(score, y)", "train_on(score, y) or later(lambda: auc)"),
        ("train_on(score, y)", "if skip(y): continue"),
        ("train_on(score, y)", "if skip(y): return"),
        ("train_on(score, y)", "with a: raise_if(y); raise StopIteration"),
        ("for x, y in data:", "while more():"),
        ("for x, y in data:", "if data:"),
        ("            print(epoch, auc)", "            else: print(epoch, auc)"),
        ("torch.cat(truths)", "model(truths)"),
        ("torch.cat(truths)", "truths.pop(0)"),
        ("torch.cat(truths)", "torch.cat(truths), auc"),
        ("torch.cat(truths)", "(kept := truths)"),
        ("torch.cat(truths)", "*truths"),
        ("auc = roc", "auc, _ = roc"),
        ("auc = roc", "auc = last = roc"),
        ("auc = roc", "auc += roc"),
        ("auc = roc", "self.auc = roc"),
        ("auc = roc", "metric.update("),
        ("from sklearn.metrics import roc_auc_score", "def roc_auc_score(a, b): return a.pop()"),
        ("import torch\n", "import torch\n    roc_auc_score = other\n"),
        ("def train(model, data):", "def train(model, data):\n        global auc"),
        ("def train(model, data):", "def train(model, data):\n        def tell(): print(auc)"),
        ("import torch\n", "import torch\n    def tell(): global auc\n"),
    ],
)
def test_a_metric_that_may_be_read_or_made_otherwise_stays(tmp_path, words, instead):
    assert words in METRIC
    code = METRIC.replace(words, instead)
    if instead.endswith("("):
        code = code.replace(".sigmoid())", ".sigmoid()))")
    refuse(tmp_path, "metric_slow", code)


@pytest.mark.parametrize(
    "code",
    [
        "from m import f\nfor x in data:\n    a = f(x)  #!\n",
        "from m import f\nfor x in data:\n    step(x); a = f(b)  #!\n    more()\n",
        "from m import f\nfor x in data:\n    step(x)\n    if x:\n        a = f(b)  #!\n",
        "from m import f\na = f(b)  #!\n",
        "from m import f\nfor x in data:\n    step(x)\n    a = b  #!\n",
        "from m import f\nfor x in data:\n    step(x)\n    a = f(b)  #!\ndef g():\n    print(a)\n",
        "from m import f\ntry:\n    for x in data:\n        step(x)\n        a = f(b)  #!\n"
        "except StopIteration:\n    print(a)\n",
        "from m import f\nfor x in data:\n    step(x)\n    a = f(a)  #!\n    more()\n",
    ],
)
def test_a_metric_stays_where_its_loop_is_another(tmp_path, code):
    refuse(tmp_path, "metric_slow", code)


def test_set_epoch(tmp_path):
    code = """
        sampler = DistributedSampler(data)
        loader = DataLoader(data, sampler=sampler)
        for epoch in range(9):
            # steps
            model.train()
            for x in loader:  #!
                pass
        """
    after = code.replace("    model", "    sampler.set_epoch(epoch)\n            model")
    check(tmp_path, "set_epoch_missing", code, after)
    inline = code.replace("sampler=sampler", "sampler=DistributedSampler(data)")
    after = inline.replace("    model", "    loader.sampler.set_epoch(epoch)\n            model")
    check(tmp_path, "set_epoch_missing", inline, after)
    refuse(tmp_path, "set_epoch_missing", code, loaders=[])
    refuse(tmp_path, "set_epoch_missing", code.replace("for epoch in range(9):", "while True:"))
    again = code.replace("    # steps", "    loader = DataLoader(data, sampler=sampler)")
    again = again.replace("sampler=sampler)", "sampler=Own(data))")
    refuse(tmp_path, "set_epoch_missing", again)
    function = """
        def train(loader, epoch):
            for x in loader:  #!
                pass

        def main():
            loader = DataLoader(data, sampler=DistributedSampler(data))
            train(loader, 1)
        """
    after = function.replace("    for", "    loader.sampler.set_epoch(epoch)\n            for")
    check(tmp_path, "set_epoch_missing", function, after)


def test_sampler(tmp_path):
    code = """
        import torch
        loader = DataLoader(data, batch_size=8, shuffle=True)
        for epoch in range(9):
            for x in loader:  #!
                pass
        """
    after = """
        import torch
        loader = DataLoader(data, batch_size=8, sampler=torch.utils.data.DistributedSampler(data))
        for epoch in range(9):
            loader.sampler.set_epoch(epoch)
            for x in loader:  #!
                pass
        """
    check(tmp_path, "sampler_missing", code, after)
    made = code.replace("  #!", "").replace("True)", "True)  #!")
    site = Site(str(tmp_path / "train.py"), 5)
    mine = Loader("torch.DataLoader", site, made_at=replace(site, line=3))
    there = after.replace("  #!", "").replace("pler(data))", "pler(data))  #!")
    check(tmp_path, "sampler_missing", made, there, loaders=[mine])
    refuse(tmp_path, "sampler_missing", code.replace("import torch", "import torch as t"))
    refuse(tmp_path, "sampler_missing", code.replace("shuffle=True", "sampler=mine"))
    refuse(tmp_path, "sampler_missing", code.replace("(data,", "(Data(9),"))


# -- modes of the model --------------------------------------------------------------------------


def test_train_again(tmp_path):
    code = """
        for epoch in range(9):
            for x in data:
                loss = criterion(model(x), y)  #!
        """
    after = code.replace("    for x", "    model.train()\n            for x")
    check(tmp_path, "train_not_restored", code, after)
    # Evaluated between the steps, it must be told before each of them.
    within = code + "        if step % 9 == 0:\n            validate(model)\n"
    within = dedent(
        within.replace("\n        if", "\n                if").replace(
            "\n            val", "\n                    val"
        )
    )
    within += "def validate(model):\n    model.eval()\n"
    after = within.replace("        loss", "        model.train()\n        loss")
    check(tmp_path, "train_not_restored", within, after)
    refuse(tmp_path, "train_not_restored", code.replace("criterion(", "other("))


def test_no_grad_over_a_function(tmp_path):
    code = """
        import torch

        class Job:
            @timed
            def validate(self, model):
                model.eval()
                for x in data:
                    right += model(x)  #!
                return right
        """
    after = code.replace("            def", "            @torch.no_grad()\n            def")
    check(tmp_path, "evaluate_with_grad", code, after)
    refuse(tmp_path, "evaluate_with_grad", code.replace("import torch", "from torch import nn"))
    refuse(tmp_path, "evaluate_with_grad", code.replace("model.eval()", "pass"))
    elsewhere = [Model("Net", Site(str(tmp_path / "train.py"), 8))]
    refuse(tmp_path, "evaluate_with_grad", code, models=elsewhere)


def test_no_grad_around_what_follows_eval(tmp_path):
    code = """
        import torch
        for epoch in range(9):
            loss.backward()
            model.eval()

            for x in data:
                # one
                right += model(x)  #!
            print(right)
        """
    after = """
        import torch
        for epoch in range(9):
            loss.backward()
            model.eval()

            with torch.no_grad():
                for x in data:
                    # one
                    right += model(x)  #!
            print(right)
        """
    check(tmp_path, "evaluate_with_grad", code, after)
    refuse(tmp_path, "evaluate_with_grad", code.replace("# one", "right.backward()"))


def test_eval_before_what_has_no_gradients(tmp_path):
    code = """
        import torch
        for epoch in range(9):
            with torch.no_grad():
                right = model(x)  #!
            print(right)
        """
    after = """
        import torch
        for epoch in range(9):
            model.eval()
            with torch.no_grad():
                right = model(x)  #!
            model.train()
            print(right)
        """
    check(tmp_path, "eval_missing", code, after)
    refuse(
        tmp_path,
        "eval_missing",
        code.replace("print(right)", "").replace("right = model(x)", "right = model(x); break"),
    )
    function = """
        @torch.inference_mode()
        def validate(net, x):
            return net(x)  #!

        for epoch in range(9):
            right = validate(model, y)
        """
    after = function.replace(
        "    right = validate(model, y)",
        "    model.eval()\n            right = validate(model, y)\n            model.train()",
    )
    check(tmp_path, "eval_missing", function, after)
    twice = function.replace("model, y)", "model, y) + validate(model, z)")
    refuse(tmp_path, "eval_missing", twice)
    refuse(tmp_path, "eval_missing", function.replace("@torch.inference_mode()", "@timed"))


# -- models --------------------------------------------------------------------------------------


def test_channels_last(tmp_path):
    code = "import torch\nmodel = Net()  # small\nout = model(x)  #!\n"
    new = "# small\nmodel.to(memory_format=torch.channels_last)\n"
    check(tmp_path, "channels_first", code, code.replace("# small\n", new))
    refuse(tmp_path, "channels_first", code.replace("model = Net()", "model, other = make()"))
    refuse(tmp_path, "channels_first", code.replace("model = Net()", "model = Net(); model = 1"))


def test_autocast_around_forward_and_loss(tmp_path):
    code = """
        import torch
        for x in data:
            out = model(x)  #!
            loss = f(out)
            optimizer.zero_grad()
            loss.backward()
        """
    after = """
        import torch
        for x in data:
            with torch.autocast("cpu", torch.bfloat16):
                out = model(x)  #!
                loss = f(out)
            optimizer.zero_grad()
            loss.backward()
        """
    check(tmp_path, "fp32_slow", code, after)
    refuse(tmp_path, "fp32_slow", code.replace("f(out)", "f(out.numpy())"))
    early = code.replace(
        "loss = f(out)\n            optimizer.zero_grad()",
        "optimizer.zero_grad()\n            loss = f(out)",
    )
    refuse(tmp_path, "fp32_slow", early)
    refuse(tmp_path, "fp32_slow", code + "torch.autocast\n")


def test_saved_bare(tmp_path):
    code = """
        model = Net()
        model = DistributedDataParallel(model)
        torch.save({"m": model.state_dict(), "o": optimizer.state_dict()}, path)  #!
        optimizer = Adam()
        """
    after = code.replace("model.state", "model.module.state")
    check(tmp_path, "saved_wrapped", code, after)
    refuse(tmp_path, "saved_wrapped", code + "model.load_state_dict(torch.load(path))\n")
    refuse(tmp_path, "saved_wrapped", code.replace("= Distributed", "= Other"))


def test_seeds_of_workers(tmp_path):
    code = """
        import torch
        def begin(worker):
            random.seed(0)
            np.random.seed(0)
        for x in DataLoader(data, worker_init_fn=begin):  #!
            pass
        """
    after = code.replace("seed(0)", "seed(torch.initial_seed() % 2**32)")
    check(tmp_path, "worker_seeds_equal", code, after)
    refuse(tmp_path, "worker_seeds_equal", code.replace("seed(0)", "seed(worker)"))
    own = [Loader("torch.DataLoader", worker_draws="dataset.rng")]
    refuse(tmp_path, "worker_seeds_equal", code, loaders=own)


def test_a_line_that_is_no_longer_the_one_that_was_seen_stays(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("opt.zero_grad(set_to_none=False)\n")
    for code, count in (("opt.zero_grad(set_to_none=False)", 1), ("a.zero_grad()", 0), ("", 1)):
        site = Site(str(path), 1, code)
        seen = Observation(["train.py"], calls=[Call("zero_grad", site)])
        finding = Finding("slow", "", "", name="zero_grad_zeros", where=str(site))
        assert len(propose(finding, seen)) == count


def test_a_finding_without_a_place_or_file_has_no_edit(tmp_path):
    seen = Observation(["train.py"])
    for where in ("", "gone.py:3", f"{tmp_path}:1", "nonsense"):
        assert propose(Finding("slow", "", "", name="zero_grad_zeros", where=where), seen) == ()
    assert propose(Finding("slow", "", "", name="starvation", where="x.py:1"), seen) == ()
