"""Where a cure's condition does not hold the script stays as written, and that is said once."""

import pytest

LOOP = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

torch.manual_seed(0)
SAY = []

class Numbers(Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, i):
        return torch.full((4,), float(i)), i % 2

def train(model, loader, optimizer=None, epochs=2):
    optimizer = optimizer or torch.optim.Adam(model.parameters(), 1e-2)
    for epoch in range(epochs):
        before(epoch, loader)
        model.train()
        for x, y in loader:
            optimizer.zero_grad(set_to_none=False)
            output = model(x)
            SAY.append(output.dtype)
            nn.functional.cross_entropy(output, y).backward()
            optimizer.step()
        after(model)

def before(epoch, loader):
    pass

def after(model):
    pass

def tell(model, *more):
    print([round(p.detach().double().sum().item(), 9) for p in model.parameters()], *more)
"""

PLAIN = "model = nn.Linear(4, 2)\nloader = DataLoader(Numbers(), 8, shuffle=True)\n"
TRAIN = "train(model, loader)\ntell(model, loader.num_workers, set(SAY))\n"

STREAM = (
    "class Stream(IterableDataset):\n"
    "    def __iter__(self):\n"
    "        for i in range(24):\n"
    "            if i >= 0:\n"
)

CONDITIONS = {
    "no images": (
        PLAIN + TRAIN,
        "compute.memory_format=channels_last",
        "no convolution in Linear",
    ),
    "iterable": (
        "class Endless(IterableDataset):\n"
        "    def __iter__(self):\n"
        "        return iter([Numbers()[i] for i in range(24)])\n"
        "model = nn.Linear(4, 2)\nloader = DataLoader(Endless(), 8)\n" + TRAIN,
        "input.workers=2",
        "the samples of an IterableDataset depend on the number of workers",
    ),
    "unguarded": (
        "import multiprocessing; multiprocessing.set_start_method('spawn')\n" + PLAIN + TRAIN,
        "input.workers=2",
        "workers start by spawn, and the script has no `if __name__` around its run",
    ),
    "not to be sent": (
        "import multiprocessing\n"
        "if __name__ == '__main__':\n"
        "    multiprocessing.set_start_method('spawn')\n"
        "    class Local(Numbers):\n"
        "        held = property(lambda self: 1)\n"
        "    data = Local(); data.made = lambda: 1\n"
        "    model = nn.Linear(4, 2); loader = DataLoader(data, 8, shuffle=True)\n"
        "    train(model, loader)\n    tell(model, loader.num_workers, set(SAY))\n",
        "input.workers=2",
        "the dataset cannot be sent to workers",
    ),
    "no workers": (PLAIN + TRAIN, "script.persistent_workers=on", "the loader has no workers"),
    "own choice": (
        PLAIN
        + "train(model, loader, torch.optim.Adam(model.parameters(), 1e-2, foreach=False))\n"
        + "tell(model)\n",
        "compute.fused_optimizer=on",
        "Adam was given foreach=False",
    ),
    "no kernel": (
        PLAIN + "train(model, loader, torch.optim.RMSprop(model.parameters()))\ntell(model)\n",
        "compute.fused_optimizer=on",
        "torch has no fused kernel for RMSprop and its parameters",
    ),
    "own autocast": (
        "class Cast(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x)\n"
        "model = Cast(4, 2)\nloader = DataLoader(Numbers(), 8)\n"
        "with torch.autocast('cpu', torch.bfloat16):\n    train(model, loader)\n"
        "tell(model, set(SAY))\n",
        "compute.precision=bf16",
        "the script has its own autocast",
    ),
    "in double": (
        "model = nn.Linear(4, 2).double()\n"
        "loader = DataLoader(TensorDataset(torch.ones(8, 4).double(), torch.ones(8).long()), 8)\n"
        + TRAIN,
        "compute.precision=bf16",
        "the parameters of Linear are float64",
    ),
    "scaled": (PLAIN + TRAIN, "compute.precision=fp16", "fp16 needs a scaled loss"),
    "random stream": (
        STREAM + "                yield torch.full((4,), float(i)) + torch.randn(4), i % 2\n"
        "model = nn.Linear(4, 2)\nloader = DataLoader(Stream(), 8)\n" + TRAIN,
        "script.cache=memory",
        "Stream draws random numbers",
    ),
    "another stream in each epoch": (
        STREAM + "                yield torch.full((4,), float(i + len(SAY))), i % 2\n"
        "model = nn.Linear(4, 2)\nloader = DataLoader(Stream(), 8)\n" + TRAIN,
        "script.cache=memory",
        "samples of Stream are not the same in each epoch",
    ),
    "stream of workers": (
        STREAM + "                yield torch.full((4,), float(i)), i % 2\n"
        "model = nn.Linear(4, 2)\nloader = DataLoader(Stream(), 8, num_workers=1)\n" + TRAIN,
        "script.cache=memory",
        "workers make the samples of Stream, again in each epoch",
    ),
    "random": (
        "class Noisy(Numbers):\n"
        "    def __getitem__(self, i):\n"
        "        return torch.full((4,), float(i)) + torch.randn(4), i % 2\n"
        "model = nn.Linear(4, 2)\nloader = DataLoader(Noisy(), 8)\n" + TRAIN,
        "script.cache=memory",
        "Noisy draws random numbers",
    ),
    "own generator": (
        "class Noisy(Numbers):\n"
        "    def __init__(self):\n"
        "        self.draws = torch.Generator().manual_seed(1)\n"
        "    def __getitem__(self, i):\n"
        "        return torch.randn(4, generator=self.draws), i % 2\n"
        "model = nn.Linear(4, 2)\nloader = DataLoader(Noisy(), 8)\n" + TRAIN,
        "script.cache=memory",
        "Noisy.draws draws random numbers",
    ),
    "by epoch": (
        "class Later(Numbers):\n"
        "    epoch = 0\n"
        "    def __getitem__(self, i):\n"
        "        return torch.full((4,), float(i + self.epoch)), i % 2\n"
        "def before(epoch, loader):\n    loader.dataset.epoch = epoch\n"
        "model = nn.Linear(4, 2)\nloader = DataLoader(Later(), 8)\n" + TRAIN,
        "script.cache=memory",
        "Later.epoch is different in each epoch",
    ),
    "counts": (
        "class Counts(Numbers):\n"
        "    seen = 0\n"
        "    def __getitem__(self, i):\n"
        "        self.seen += 1\n"
        "        return torch.full((4,), float(i)), i % 2\n"
        "model = nn.Linear(4, 2)\nloader = DataLoader(Counts(), 8)\n" + TRAIN,
        "script.cache=memory",
        "Counts.seen changes while samples are made",
    ),
    "differentiated": (
        "def after(model):\n"
        "    model.eval()\n"
        "    for x, y in loader:\n"
        "        nn.functional.cross_entropy(model(x), y).backward()\n" + PLAIN + TRAIN,
        "script.evaluation=no_grad",
        "the script differentiates what Linear computes in eval mode",
    ),
    "nothing there": (
        PLAIN + TRAIN,
        "script.evaluation=no_grad",
        "nothing in the script uses it",
    ),
    "no device": (PLAIN + TRAIN, "input.pin_memory=on", "there is no GPU to copy to"),
    "nothing to wait for": (
        PLAIN + TRAIN,
        "script.host_syncs=deferred",
        "there is no GPU to wait for",
    ),
}


QUICK = ("no images", "not to be sent", "own choice", "by epoch", "differentiated")


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CONDITIONS],
)
def test_the_script_stays_as_written(scripts, tmp_path, name):
    body, setting, reason = CONDITIONS[name]
    path = tmp_path / "train.py"
    path.write_text(LOOP + body)
    plain, cured = scripts.run(path), scripts.run(path, setting)
    assert plain.code == cured.code == 0, cured.err
    assert cured.out == plain.out
    (found,) = cured.left.values()
    assert found.startswith(reason)
    assert cured.err.count("left as written: ") == 1
    assert reason in cured.err


def test_workers_that_stay_see_what_changes_between_epochs(scripts, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(LOOP + CONDITIONS["by epoch"][0].replace("loader.num_workers, ", ""))
    plain, cured = scripts.run(path), scripts.run(path, "input.workers=1")
    assert cured.out == plain.out
    assert cured.applied["input.workers"] == "workers=1"
    assert "Later.epoch is different in each epoch" in cured.err


def test_a_backward_pass_that_finds_no_graph_names_the_cure(scripts, tmp_path):
    path = tmp_path / "train.py"
    late = (
        "epochs = []\n"
        "def after(model):\n"
        "    model.eval(); epochs.append(1)\n"
        "    for x, y in loader:\n"
        "        loss = nn.functional.cross_entropy(model(x), y)\n"
        "        if len(epochs) > 1:\n"
        "            loss.backward()\n"
    )
    path.write_text(LOOP + late + PLAIN + TRAIN)
    assert scripts.run(path).code == 0
    done = scripts.run(path, "script.evaluation=no_grad")
    assert done.code == 1
    assert "drop script.evaluation from the Recipe" in done.err


LACKS = {
    "torch.optim.optimizer.register_optimizer_step_pre_hook": "register_optimizer_step_pre_hook",
    "torch.utils.data.dataloader.DataLoader._get_iterator": "_get_iterator",
}


@pytest.mark.parametrize("lacks", LACKS)
def test_a_torch_that_lacks_what_a_hook_needs_changes_nothing(scripts, tmp_path, lacks):
    path = tmp_path / "train.py"
    path.write_text("import torch\nprint(torch.nn.Linear(2, 2).weight.shape)\n")
    plain = scripts.run(path)
    settings = ["compute.precision=bf16", "input.workers=2", "script.zero_grad=set_to_none"]
    done = scripts.run(path, *settings, lacks=lacks)
    assert done.out == plain.out
    assert done.applied == {}
    (line,) = done.err.splitlines()
    assert line.startswith("flatout: nothing is changed: torch ")
    assert LACKS[lacks] in line


def test_a_script_with_a_loop_is_left_to_the_loop(scripts, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        LOOP
        + PLAIN
        + "import flatout\n"
        + "flatout.Loop\n"
        + TRAIN.replace("train(", "train(").replace("loader.num_workers, ", "")
    )
    done = scripts.run(path, "compute.precision=bf16", "script.zero_grad=set_to_none")
    assert done.code == 0, done.err
    assert done.out == scripts.run(path).out
    assert done.applied == {}
    assert done.err.count("Trainer or Loop") == 1


THREADS = """
import threading, torch
from torch.utils.data import DataLoader

class Counts(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, i):
        return torch.get_num_threads()

def set_beside():
    torch.set_num_threads(1)
    beside.append(torch.get_num_threads())

torch.set_num_threads(3)
beside = []
thread = threading.Thread(target=set_beside)
thread.start()
thread.join()
in_worker = [int(one) for one in DataLoader(Counts(), num_workers=1)]
before = torch.get_num_threads()
weight = torch.zeros(1, requires_grad=True)
optimizer = torch.optim.SGD([weight], 0.1)
weight.sum().backward()
optimizer.step()
torch.set_num_threads(1)
print(before, in_worker, beside, torch.get_num_threads())
"""


def test_threads_that_a_script_sets_before_its_first_step_give_way(scripts, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(THREADS)
    assert scripts.run(path).out == "3 [1, 1] [1] 1\n"
    done = scripts.run(path, "process.threads=2")
    assert done.err == ""
    # Workers, other threads and what is set while it trains are as they were.
    assert done.out == "2 [1, 1] [1] 1\n"
    assert done.applied == {"process.threads": "threads=2"}


def test_a_script_that_sets_threads_between_operators_itself_does_not_fail(scripts, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\ntorch.set_num_interop_threads(3)\nprint(torch.get_num_interop_threads())\n"
    )
    done = scripts.run(path, "process.interop_threads=2")
    assert (done.code, done.err, done.out) == (0, "", "2\n")
