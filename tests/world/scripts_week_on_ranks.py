"""A week of daily training on ids that grow, on several ranks: killed, resumed, and compared.

    python scripts_week_on_ranks.py FOLDER KILLS SEED

The undisturbed week is one of two ranks. A second one is killed and resumed on two ranks, a third
on one, two or three. The ranks are forked by one process that has imported torch. Prints one JSON
object; every failed expectation is an exception. PYTHONPATH must have tests/train.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from scripts_killed_week import DAYS, STATED
from train_clicks import Clicks, batches, trainer, write_day
from train_killed import Slow, digest_of, finished, started
from world_ranks import environment, free_port

from flatout.recipe import Process, Recipe, Save

RECIPE = Recipe(save=Save(every=2), process=Process(threads=1)).replace(
    {"compute.touched_rows": "on"}
)


def fit(folder: Path, week: Path, day: int, own: dict[str, str], pipe: int) -> None:
    """A rank's part of a day, from where it stands; the first writes down what came out."""
    os.environ.update(own)
    torch.manual_seed(day)
    job = trainer(
        Clicks(rows=20),
        recipe=RECIPE,
        allow="exact",
        run=week / str(day),
        warm_start=week / str(day - 1) if day else None,
    )
    train, held_out = batches(folder / f"day-{day}.svm", STATED)
    job.fit(
        train,
        validation_data=held_out,
        epochs=1,
        callbacks=[Slow(pipe)],
        resume=True,
        progress=False,
    )
    if job.world().is_first:
        result = {"digest": digest_of(job.model, job.optimizer), "ids": job.signature.ids.digest}
        (week / str(day) / "result.json").write_text(json.dumps(result))
        torch.save(job.model.state_dict(), week / str(day) / "weights.pt")


def start(folder: Path, week: Path, day: int, size: int) -> list[tuple[int, int]]:
    port = free_port()
    each = [environment(rank, size, port) if size > 1 else {} for rank in range(size)]
    return [started(fit, folder, week, day, own) for own in each]


def ended(ranks: list[tuple[int, int]]) -> bool:
    """Wait for ranks; whether all have ended well."""
    return [finished(*rank) for rank in ranks] == [0] * len(ranks)


def live(folder: Path, week: Path, day: int, kills: int, sizes: list[int], draw: random.Random):
    """A day on these numbers of ranks in turn, killed in all but the last; how often it was."""
    for count in range(kills):
        ranks = start(folder, week, day, sizes[count])
        os.read(ranks[0][1], 1)
        time.sleep(draw.uniform(0, 0.05))
        os.kill(draw.choice(ranks)[0], signal.SIGKILL)
        if ended(ranks):
            return count
    assert ended(start(folder, week, day, sizes[kills])), f"day {day} did not end well"
    return kills


def result(week: Path, day: int) -> dict[str, str]:
    return json.loads((week / str(day) / "result.json").read_text())


def main(folder: Path, kills: int, seed: int) -> dict[str, object]:
    draw = random.Random(seed)
    for day in range(DAYS):
        write_day(folder, day)
    # What a first step imports is here before the forks.
    trainer().fit(batches(folder / "day-0.svm")[0], progress=False)
    whole, same, other = (folder / name for name in ("whole", "same", "other"))
    killed = {"same": 0, "other": 0}
    far = 0.0
    for day in range(DAYS):
        live(folder, whole, day, 0, [2], draw)
        count = draw.randint(0, 2 * kills // DAYS)
        killed["same"] += live(folder, same, day, count, [2] * (count + 1), draw)
        sizes = [draw.choice([1, 2, 3]) for _ in range(kills)] + [1 + day % 3]
        killed["other"] += live(folder, other, day, 1, sizes[-2:], draw)
        wanted = result(whole, day)
        assert result(same, day) == wanted, f"day {day} differs from that of the undisturbed week"
        assert result(other, day)["ids"] == wanted["ids"], f"day {day} has other ids"
        ours, theirs = (torch.load(week / str(day) / "weights.pt") for week in (other, whole))
        for name, value in theirs.items():
            far = max(far, float((ours[name] - value).norm() / value.norm()))
    return {"killed": killed, "far": far}


if __name__ == "__main__":
    torch.set_num_threads(1)  # no thread of torch's may be left behind by a fork
    target, count, number = sys.argv[1:]
    print(json.dumps(main(Path(target), int(count), int(number))))
