"""A week of daily training on ids that grow, really killed and resumed, and compared.

    python scripts_killed_week.py FOLDER KILLS SEED [SETTING=VALUE ...]

One process imports torch and forks the fits, so that a kill costs milliseconds and not seconds.
Prints one JSON object; every failed expectation is an exception.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from train_clicks import Clicks, batches, schema, trainer, write_day
from train_killed import Slow, digest_of, finished, started

from flatout.data import Ids
from flatout.recipe import Recipe, Save

DAYS = 7
# New ids, ids that have to come twice, ids that are forgotten, and unknown ones that are hashed.
STATED = schema(Ids(admit=2, forget=3, buckets=11))


def fit(folder: Path, week: Path, day: int, settings: list[str], pipe: int) -> None:
    """Train a day to its end, from where it stands, and write down what came out."""
    torch.manual_seed(day)
    recipe = Recipe(save=Save(every=3)).replace(dict(one.split("=") for one in settings))
    job = trainer(
        Clicks(rows=20),
        recipe=recipe,
        allow="exact",
        run=week / str(day),
        warm_start=week / str(day - 1) if day else None,
    )
    train, held_out = batches(folder / f"day-{day}.svm", STATED)
    history = job.fit(
        train,
        validation_data=held_out,
        epochs=2,
        callbacks=[Slow(pipe)],
        resume=True,
        progress=False,
    )
    ids = job.signature.ids.maps["ids"]
    result = {
        "digest": digest_of(job.model, job.optimizer),
        "ids": job.signature.ids.digest,
        "rows": [ids.size, len(job.model.factors.weight), ids.trainings],
        "loss": [logs["val_loss"] for logs in history.epochs],
    }
    (week / str(day) / "result.json").write_text(json.dumps(result))


def main(folder: Path, kills: int, seed: int, settings: list[str]) -> dict[str, object]:
    draw = random.Random(seed)
    for day in range(DAYS):
        write_day(folder, day)
    # What a first step imports is here before the forks.
    trainer().fit(batches(folder / "day-0.svm")[0], progress=False)
    killed = [0] * DAYS
    for day in range(DAYS):
        assert finished(*started(fit, folder, folder / "whole", day, settings)) == 0
        while sum(killed) < kills * (day + 1) // DAYS:
            pid, reading = started(fit, folder, folder / "week", day, settings)
            os.read(reading, 1)
            time.sleep(draw.uniform(0, 0.08))
            os.kill(pid, signal.SIGKILL)
            if finished(pid, reading) == 0:
                break
            killed[day] += 1
        else:
            assert finished(*started(fit, folder, folder / "week", day, settings)) == 0
        ours, theirs = (
            json.loads((folder / which / str(day) / "result.json").read_text())
            for which in ("week", "whole")
        )
        assert ours == theirs, f"day {day} differs from that of the undisturbed week"
    return {"killed": killed, "rows": ours["rows"]}


if __name__ == "__main__":
    torch.set_num_threads(1)  # no thread of torch's may be left behind by a fork
    target, count, number, *asked = sys.argv[1:]
    print(json.dumps(main(Path(target), int(count), int(number), asked)))
