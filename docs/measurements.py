"""Renders the measurements from the JSON files that the benches write.

python docs/measurements.py              # writes both pages
python docs/measurements.py --check      # exit 1 when one of them is out of date

`docs/measurements.md` has all keys in one table, `bench/results/README.md` the tables of all
benches.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PAGE, ALL = ROOT / "docs" / "measurements.md", RESULTS / "README.md"

HEAD = """\
# Measurements

<!-- Made by docs/measurements.py from bench/results/. -->

Each figure comes from a program that you can run yourself. Peers run in their own processes,
several restarts of each, in turn. Ratios are medians with a bootstrap interval over restarts. A/A
is the same job against itself: noise moves it from 1, or from 0.

```text
pip install -c constraints.txt '.[bench]'
python bench/trainer.py --json bench/results/trainer.json
python docs/measurements.py
```

The folder `bench/results` has a file for each program, with its command, hardware, date, commit and
the times of all peers. Its README shows them as tables.

## What falls short

- On a GPU, only the benches with GPU in their name were measured: one run of each, on one machine.
{missed}

## The keys of all benches

| measurement | key | measured | wanted | met | note |
|---|---|---|---|---|---|
"""

ALL_HEAD = """\
# All measurements

<!-- Made by docs/measurements.py from the JSON files in this folder. -->

A peer that is not installed is reported as absent. Where no commit is recorded, the commit that
first reported the figures is named, and the command may lack options that the title or the remarks
tell.
"""


@dataclass(frozen=True)
class Section:
    """One bench on the page.

    Args:
        name: of its file in bench/results, without the ending.
        heading: of its part of the page.
        compares: sentences that say what is compared.
    """

    name: str
    heading: str
    compares: str


SECTIONS = (
    Section(
        "trainer",
        "Overhead of a step",
        "A step of a tiny model, with next to no arithmetic: what the training loop itself costs.",
    ),
    Section(
        "overhead",
        "What a fit costs beyond its steps",
        "One epoch over 80,000 rows of 25 columns in batches of 1,024 (an MLP of 32, one thread, "
        "no cache), by `Trainer.fit` and by a plain loop over the same tensors, in turn in one "
        "process. Then the seconds that a fit of 20 such epochs spends measuring.",
    ),
    Section(
        "breadth",
        "The default beside the best by hand",
        "`Trainer.fit` with nothing set and an empty cache, over families of models, beside loops "
        "written by hand in fp32, bf16, channels_last and with a fused optimizer. The plain loop, "
        "the best by hand and the default are processes that take turns by epochs. Whole runs: "
        "what is measured meanwhile counts. `steady`: the last third of the steps alone.",
    ),
    Section(
        "choices",
        "Whether the default chooses the same again",
        "Five fresh runs of each family, each with an empty cache. `alike`: by setting that any of "
        "the runs has chosen, the share of pairs of runs that agree on it.",
    ),
    Section(
        "breadth_gpu",
        "The default beside the best by hand, on a GPU",
        "`Trainer.fit` with nothing set and an empty cache, beside loops that lie wholly on the "
        "GPU, written by hand in fp32, TF32, bf16 with a fused optimizer, channels_last and CUDA "
        "graphs. One run each. All seconds of the default count, with loading kernels and "
        "measuring; by hand, kernels are loaded before the steps that count. `steady` compares the "
        "steps of the last third alone.",
    ),
    Section(
        "convnet",
        "A small ConvNet",
        "conv32, pool, conv64, pool, conv64, dense64, dense10 on images of 28x28 in memory. One "
        "epoch of warm-up, then three that are timed.",
    ),
    Section(
        "keras",
        "The same ConvNet as a Keras model",
        "`model.fit(...)` of Keras on each backend, and `flatout.Trainer(model).fit(...)` on "
        "Keras' torch backend.",
    ),
    Section(
        "transfer",
        "Transfer learning",
        "VGG16 with its last block trained on a folder of JPEGs: what is frozen is computed once, "
        "where peers compute it in each epoch. First epochs count from the start of the process.",
    ),
    Section(
        "augment",
        "Augmentation",
        "Images in memory changed at random, each library in its best form on as many threads.",
    ),
    Section(
        "click",
        "Click-through models",
        "DeepFM on 39 fields of ids, in memory, with Adam: a step by its tables' rows and its "
        "batch. Each process of Flatout decides its settings for itself, before the timed epochs.",
    ),
    Section(
        "click_gpu",
        "Click-through models on a GPU",
        "The same DeepFM on one GPU, in fp32 with Adam, compared with loops written by hand "
        "whose samples lie on the device. All loops run in one process, in turn. At that commit "
        "the default stepped tables of 134 million numbers and more by rows. Steps by rows were "
        "slower than a dense fused Adam. Later commits step all tables on a GPU whole.",
    ),
    Section(
        "large_batches",
        "Larger batches",
        "What the [learning-rate rules](large_batches.md) do where there are few samples: accuracy "
        "of an MLP (784-128-128-10 with BatchNorm). The rate of SGD is the best of four with batch "
        "64, those of LARS and LAMB with 512, all on another seed.",
    ),
    Section(
        "startup",
        "Start-up",
        "Whole processes, from start to end. Neither loads torch.",
    ),
    Section(
        "recording",
        "What a run folder's Profile costs",
        "The comparison with the clock after every step, a look at CPUs and memory, and writing a "
        "Profile of 65,000 steps, each timed directly while other jobs ran; over an hour they come "
        "to so many microseconds of each step.",
    ),
    Section(
        "input",
        "The input pipeline",
        "From files in the page cache to shuffled batches of tensors; each peer in its best form, "
        "on one CPU and on two with as many threads or processes. LibSVM, TFRecord and Criteo rows "
        "have 39 fields, in batches of 4,096. JPEGs of 512x496 become 224x224, in batches of 32. "
        "Data in memory are images of 28x28, in batches of 512.",
    ),
    Section(
        "input_verifying",
        "Checksums when rows are read",
        "The first pass over a row cache with and without comparing each block with its checksum.",
    ),
    Section(
        "starved",
        "A Dataset that is slower than the model",
        "Fits with each `input.workers`, and with `auto`, trials included.",
    ),
    Section(
        "parallel",
        "Several ranks",
        "Flatout beside a handwritten DistributedDataParallel loop: the time of a step on one "
        "node, and the time to a held-out loss on two.",
    ),
    Section(
        "strategies",
        "Strategies on one node",
        "`fsdp` beside torch's own `fully_shard`, `staged` beside the ideal of its schedule; and "
        "four ranks of which one is three times slower, until a held-out loss is reached.",
    ),
    Section(
        "submit",
        "Jobs on a cluster",
        "What `flatout submit slurm` adds to srun by hand, on SLURM's own daemons for two nodes on "
        "one machine, and what preemptions lose.",
    ),
    Section(
        "servers",
        "Parameter servers",
        "A worker sends a gradient and gets the weights back, a round trip, of Flatout's "
        "asynchronous servers and of an actor of Ray: through memory that both see, and through "
        "sockets.",
    ),
    Section(
        "doctor_look",
        "The doctor's first look",
        "Scripts with a known pitfall, and the same without it, watched for six seconds without "
        "trials.",
    ),
    Section(
        "doctor_busy",
        "The doctor beside other work",
        "Scripts without a pitfall, with trials, beside two processes that compute in bursts of up "
        "to a second. What it prescribes must make whole runs faster when they are gone.",
    ),
    Section(
        "forecast",
        "Forecasts of more hosts",
        "Up to four hosts in namespaces of one machine, with links of 0.1 to 10 Gbit/s and 0 to "
        "10 ms. Each rate is predicted from a run of one rank and from runs of one and two. "
        "Computing is sleep, since the hosts share this machine's CPUs; what ranks send and add up "
        "is real.",
    ),
    Section(
        "doctor",
        "The doctor's trials",
        "Those of the scripts whose pitfall costs time, with trials of 120 s. What the trials "
        "promise for all cures together is measured again by whole runs with and without them.",
    ),
    Section(
        "observing",
        "What the doctor's hooks cost",
        "A raw loop with the hooks in their places and out of them, in one process.",
    ),
    Section(
        "doctor_peers",
        "The doctor and its peers",
        "Scripts with a known pitfall, shown to four tools. One rule for all: words that are "
        "looked for in what each tool says first.",
    ),
    Section(
        "fuzz",
        "Fuzzing the parsers",
        "Random input for the parsers in C.",
    ),
    Section(
        "kills",
        "Random kills",
        "Each series works in its own folder, is killed some times, goes on each time, and is "
        "then left to end.",
    ),
)


def pages() -> dict[Path, str]:
    """Return the text of both pages as Markdown.

    Raises:
        SystemExit: a file of results has no section here, or a section no file.
    """
    names, files = {s.name for s in SECTIONS}, {file.stem for file in RESULTS.glob("*.json")}
    if names != files:
        raise SystemExit(
            f"bench/results and SECTIONS in {Path(__file__).name} differ: {sorted(names ^ files)}"
        )
    runs = {name: json.loads((RESULTS / f"{name}.json").read_text("utf-8")) for name in names}
    missed = [line for s in SECTIONS for line in missed_lines(s, runs[s.name])]
    rows = [row for s in SECTIONS for row in key_rows(s, runs[s.name])]
    head = HEAD.format(missed="\n".join(missed))
    return {
        PAGE: head + "\n".join(rows) + "\n",
        ALL: "\n".join([ALL_HEAD, *(section_text(s, runs[s.name]) for s in SECTIONS)]),
    }


def missed_lines(section: Section, run: Mapping[str, Any]) -> list[str]:
    """Return a line for each key of a bench that is not met."""
    return [
        f"- {section.heading}: `{name}` is {found_text(key)}, wanted {wanted_text(key)}."
        for name, key in run["details"].items()
        if key["met"] is False
    ]


def section_text(section: Section, run: Mapping[str, Any]) -> str:
    """Return one bench's part: what is compared, on what, its tables, keys and remarks."""
    parts = [f"## {section.heading}", section.compares, run_text(run)]
    parts += [f"**{table['title']}**\n\n{table_text(table)}" for table in run["tables"]]
    if run["details"]:
        parts.append(keys_text(run["details"]))
    if run["remarks"]:
        parts.append("\n".join(f"- {remark}" for remark in run["remarks"]))
    return "\n\n".join(parts) + "\n"


def run_text(run: Mapping[str, Any]) -> str:
    """Return the command of a run, its hardware, date and commit, each named where not recorded."""
    commit = f"`{run['commit']}`" if run["commit"] else "not recorded"
    if "reported_in" in run:
        commit += f" (reported in `{run['reported_in']}`)"
    date = run["date"] or "not recorded"
    return (
        f"Hardware: {run['hardware']}. Date: {date}. Commit: {commit}. Command: `{run['command']}`."
    )


def table_text(table: Mapping[str, Any]) -> str:
    """Return a table as Markdown, without the columns in which no line holds anything."""
    used = [
        place
        for place, header in enumerate(table["headers"])
        if header or any(line[place] for line in table["lines"])
    ]
    rows = [[row[place] for place in used] for row in (table["headers"], *table["lines"])]
    return "\n".join([row_text(rows[0]), "|---" * len(used) + "|", *map(row_text, rows[1:])])


def key_rows(section: Section, run: Mapping[str, Any]) -> Iterator[str]:
    """Yield a row for each key of a bench, the first with the heading of the bench."""
    rows = keys_of(run["details"]) or [["", "", "", "", "its tables are in `bench/results`"]]
    for number, row in enumerate(rows):
        yield row_text(["" if number else section.heading, *row])


def keys_text(details: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the keys of a bench as a table."""
    rows = map(row_text, keys_of(details))
    return "\n".join(["| key | measured | wanted | met | |", "|---|---|---|---|---|", *rows])


def keys_of(details: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return for each key its name, figure, bound, whether that is met, and its note."""
    met = {True: "yes", False: "**no**", None: ""}
    return [
        [f"`{name}`", found_text(key), wanted_text(key), met[key["met"]], key["note"]]
        for name, key in details.items()
    ]


def wanted_text(key: Mapping[str, Any]) -> str:
    """Return a key's bound, or nothing where it has none."""
    if key["at_least"] is not None:
        return f"at least {number(key['at_least'])}"
    return "" if key["at_most"] is None else f"at most {number(key['at_most'])}"


def found_text(key: Mapping[str, Any]) -> str:
    """Return a key's number, with its interval where it has one."""
    if key["value"] is None:
        return "not measured"
    if key["low"] is None:
        return number(key["value"])
    return f"{number(key['value'])} [{number(key['low'])}, {number(key['high'])}]"


def number(value: float) -> str:
    """Return a number with four digits."""
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def row_text(cells: Sequence[str]) -> str:
    """Return cells as a line of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main(options: Sequence[str]) -> int:
    """Write both pages, or with --check compare them; return the exit code."""
    status = 0
    for path, text in pages().items():
        if "--check" not in options:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            name = path.relative_to(ROOT)
            print(f"{name} is out of date: python docs/measurements.py", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
