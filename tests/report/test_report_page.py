"""The page of a verdict: what it says, what it must never let in, and how a browser lays it out."""

import html
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from report_prescriptions import BF16, COMPILE, DECODE, ITEM, WORKERS, prescription, trial
from report_verdicts import LANES, finding, observation, verdict

from flatout.doctor import Proof
from flatout.observe import Ablation, DeviceTime, Lapse, LeftOut, ModuleTime, Site
from flatout.report.page import duration, page, sentence
from flatout.report.pictures import MOST_RANKS, lane_bars, lane_rows

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
VOID = {"meta", "br"}
HOSTILE = (
    "</title></style></pre>\"'><script>window.hacked = 1</script>"
    "<img src=x onerror='window.hacked = 1'>{{ 7 * 7 }}"
)


def tried(*proofs):
    """A prescription of these proofs, each measured alone, as plain data."""
    return prescription(proofs=list(proofs), together=None, before_s=None).as_dict()


class Parsed(HTMLParser):
    """Tags with their attributes, and the text of the page; fails where tags do not match."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.text = [], [], []
        self.feed(text.replace("<wbr>", ""))
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            verdict(),
            "With what was proven your whole run takes 4m01s instead of 13m23s, 3.3 times as fast, "
            "warm-up included; 1 danger to the job or its result.",
        ),
        (
            verdict(prescription=None, critical=None, observations=[observation()]),
            "A step takes 105 ms, 38% of it waiting for input; 2 findings may give time back, "
            "nothing is proven yet; 1 danger to the job or its result.",
        ),
        (
            verdict(prescription=tried(WORKERS, BF16), findings=[]),
            "At least one change was proven to make a step faster than noise can explain.",
        ),
        (
            {"prescription": tried(replace(ITEM, trial=trial(1.02, 0.005, floor=0.02)), COMPILE)},
            "No change that was tried is worth it for this run: leave it as it is.",
        ),
        (
            {"observations": [observation()]},
            "A step takes 105 ms, 38% of it waiting for input; no check found anything that holds "
            "it back.",
        ),
        (
            {
                "observations": [observation()],
                "critical": {"words": "the model waits for input: decoding", "share": 0.38},
            },
            "A step takes 105 ms; the model waits for input: decoding (38%); no check found "
            "anything that holds it back.",
        ),
        (
            verdict(
                observations=[observation(0), observation(1, ended="failed", error="a\nE: no.\n")],
                findings=[],
            ),
            "The script failed on rank 1: E: no.",
        ),
        (
            {"observations": [observation(steps=0, step_ms=[], lanes_ms={}, ended="no steps")]},
            "No training step was seen, so there is nothing to say about speed.",
        ),
        ({}, "Nothing was found that holds this job back."),
    ],
)
def test_the_verdict_is_one_plain_sentence_at_the_top(given, said):
    assert sentence(given) == said
    assert f" Flatout doctor {said}" in Parsed(page(given)).words


def test_everything_of_the_verdict_is_told():
    words = Parsed(page(verdict())).words
    for said in (
        "train.py:120",
        "total += loss.item()",
        "gives back at most 4 ms per step (4%)",
        "input.workers = 6",
        "measured 2.30x [2.20, 2.40]",
        "the model waits for input: train.py:88",
        "Could not be seen: sync.",
        "1.01x [0.99, 1.03]",
        "0.1% apart on average over 200 steps, same samples",
        "DCT-scaled decode not measured",
        "2 checks found nothing: pin memory set epoch",
        "the kernel does not count page faults here",
        "numpy 2.4",
        "3.1 µs per step",
        "redrawn: the same distribution, other random draws.",
    ):
        assert said in words, said
    order = [words.index(f" {head} ") for head in ("Dangers", "What was tried", "What costs time")]
    assert order == sorted(order)


def test_words_of_the_script_stay_words():
    nasty = finding(
        HOSTILE, "danger", what=HOSTILE, do=HOSTILE, where=f"{HOSTILE}:1", parity=HOSTILE
    )
    nasty["recipe"] = {HOSTILE: HOSTILE}
    site = {"file": HOSTILE, "line": 1, "code": HOSTILE}
    observed = observation(
        framework=HOSTILE,
        device=HOSTILE,
        notes=[HOSTILE],
        error=HOSTILE,
        lanes_ms={HOSTILE: 3.0, **LANES},
    )
    observed["calls"] = [{"kind": "item", "site": site}]
    nasty_proof = Proof((HOSTILE,), HOSTILE, parity=HOSTILE, loss=HOSTILE, reason=HOSTILE)
    text = page(
        {
            "command": ["python", HOSTILE],
            "environment": {HOSTILE: {HOSTILE: [HOSTILE]}},
            "observations": [observed, observation(1)],
            "findings": [nasty, {**nasty, "kind": "slow"}, {**nasty, "kind": "note"}],
            "passed": [HOSTILE],
            "unknown": [[HOSTILE, HOSTILE]],
            "prescription": tried(nasty_proof),
        }
    )
    parsed = Parsed(text)
    assert parsed.words.count("window.hacked = 1") > 40
    assert "{{ 7 * 7 }}" in parsed.words
    assert {tag for tag, _ in parsed.tags}.isdisjoint({"script", "img", "iframe", "link", "a"})
    for _, attributes in parsed.tags:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "href")]
    assert "49" not in parsed.words


def test_the_page_loads_nothing():
    text = page(verdict())
    assert not re.search(r"https?:|url\(|@import|src=|href=", text)
    policies = [of["content"] for _, of in Parsed(text).tags if "http-equiv" in of]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_what_is_absent_leaves_no_empty_part():
    assert "<section>" not in page({})
    only = Parsed(page({"passed": ["set epoch"]})).words
    assert "1 check found nothing: set epoch" in only
    assert "Environment" not in only
    # Numbers that are none, and a trial that gave none.
    odd = verdict(
        observations=[observation(step_ms=[float("nan")] * 9, lanes_ms={"input": float("nan")})],
        prescription=tried(DECODE),
    )
    assert "DCT-scaled decode not measured" in Parsed(page(odd)).words


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (365e-6, "365us"),
        (0.25, "0.25s"),
        (59.96, "1m00s"),
        (83, "1m23s"),
        (3600 * 5 + 119.7, "5h02m"),
    ],
)
def test_durations(seconds, said):
    assert duration(seconds) == said


def test_bars_share_one_scale_and_have_no_holes():
    slow, fast = lane_bars(
        {0: {"input": 60.0, "forward": 40.0}, 1: {"forward": 50.0, "sync": None}}
    )
    assert [one.lane for one in slow.segments] == ["input", "forward"]
    assert [one.left for one in slow.segments] == [0, 60]
    assert sum(one.width for one in slow.segments) == pytest.approx(100)
    assert [(one.width, one.share) for one in fast.segments] == [(50, 1)]
    assert slow.words == "rank 0: 100 ms per step: input 60, forward 40"


def test_of_many_ranks_the_slowest_are_drawn():
    bars = lane_bars({rank: {"input": 1.0 + rank} for rank in range(100)})
    assert [bar.rank for bar in bars] == list(range(100 - MOST_RANKS, 100))
    drawn = page({"observations": [observation(r, lanes_ms={"input": 1.0 + r}) for r in range(40)]})
    assert "The 16 slowest of 40 ranks." in drawn
    (row,) = lane_rows({rank: {"input": 1.0 + rank} for rank in range(100)})
    assert (row.ms, row.most_ms, row.most_rank) == (50.5, 100.0, 99)


MEASURE = """
<!doctype html><body style="margin:0">FRAMES<pre id="found"></pre><script>
function seen(frame) {
  const page = frame.contentDocument, root = page.documentElement;
  const boxes = [...page.querySelectorAll("svg text")].map(t => [t, t.getBoundingClientRect()])
    .filter(([, box]) => box.width);
  const cross = (x, y) =>
    x.left < y.right - 1 && y.left < x.right - 1 && x.top < y.bottom && y.top < x.bottom;
  const overlaps = boxes.filter(([a, x]) =>
    boxes.some(([b, y]) => a !== b && a.parentNode === b.parentNode && cross(x, y)));
  const outside = [...page.body.querySelectorAll("*")].filter(e => {
    const box = e.getBoundingClientRect();
    return box.width && (box.right > root.clientWidth + 1 || box.left < -1);
  });
  return {
    client: root.clientWidth, scroll: root.scrollWidth, texts: boxes.length,
    overlaps: overlaps.map(([t]) => t.textContent),
    outside: outside.map(e => e.outerHTML.slice(0, 90)),
    loaded: frame.contentWindow.performance.getEntriesByType("resource").length,
    hacked: Boolean(frame.contentWindow.hacked || window.hacked),
    paper: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
    font: parseFloat(frame.contentWindow.getComputedStyle(page.querySelector("p")).fontSize),
  };
}
onload = () => {
  document.getElementById("found").textContent =
    JSON.stringify([...document.querySelectorAll("iframe")].map(seen));
};
</script></body>
"""


def browse(folder, pages, *options):
    """What a browser makes of (page, width) pairs, each in a frame of that width."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    frames = "".join(
        f'<iframe style="border:0; width:{width}px" srcdoc="{html.escape(text)}"></iframe>'
        for text, width in pages
    )
    file = folder / "frames.html"
    file.write_text(MEASURE.replace("FRAMES", frames))
    command = [CHROMIUM, "--headless=new", "--disable-gpu", "--no-first-run", "--dump-dom"]
    command += ["--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND"]
    command += ["--hide-scrollbars", f"--user-data-dir={folder / 'profile'}", *options]
    if os.geteuid() == 0:
        command.append("--no-sandbox")  # it refuses to be root with one
    ran = subprocess.run([*command, file.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="found">(.+?)</pre>', ran.stdout)
    assert found, ran.stderr[-2000:]
    return json.loads(html.unescape(found[1]))


def without_policy(text):
    """So that only the escaping stands between the text and the browser."""
    without = re.sub(r"<meta http-equiv=[^>]*>", "", text)
    assert without != text
    return without


def test_a_browser_shows_it_on_a_phone_and_on_a_screen(tmp_path):
    nasty = [finding(HOSTILE, kind, where=f"/a/{'b' * 90}.py:7") for kind in ("danger", "slow")]
    hostile = verdict(command=HOSTILE + "c" * 200, findings=nasty, passed=[HOSTILE] * 3)
    open_to_all = "<script>window.hacked = 1</script>"
    pages = [
        (page({**verdict(), "prescription": prescription().as_dict()}), 360),
        (page({**verdict(), "prescription": prescription().as_dict()}), 1200),
        (without_policy(page(hostile)), 360),
        ("<p>" + open_to_all, 360),
    ]
    phone, screen, attacked, control = browse(tmp_path, pages)
    for one, width in ((phone, 360), (screen, 1200), (attacked, 360)):
        assert one["client"] == one["scroll"] == width
        assert one["outside"] == []
        assert one["overlaps"] == []
        assert one["loaded"] == 0
        assert not one["hacked"]
        assert one["texts"] > 5
        assert one["font"] >= 14
    assert screen["texts"] > phone["texts"]  # what does not fit is left out, not squeezed
    assert control["hacked"]  # or this test would see nothing


@pytest.mark.slow
def test_a_dark_browser_gets_a_dark_page(tmp_path):
    dark, light = (
        browse(
            tmp_path, [(page(verdict()), 360)], f"--blink-settings=preferredColorScheme={scheme}"
        )[0]
        for scheme in (0, 1)
    )
    assert [sum(map(int, re.findall(r"\d+", one["paper"]))) > 384 for one in (dark, light)] == [
        False,
        True,
    ]


def test_the_page_shows_what_was_left_out_cut_and_done_on_the_gpu():
    call = LeftOut(
        Site("track.py", 34), "tracker.log", Ablation(1.5, 1.45, 1.55, 0.02, 4, 6.0, 4.0)
    )
    faint = LeftOut(Site("a.py", 1), "faint.call", Ablation(1.01, 0.98, 1.04, 0.02, 4))
    gpu = DeviceTime(5, 38.0, {"forward": 12.0, "backward": 25.0}, 0.75, 0.25)
    gpu.kernels = [(HOSTILE, 9.5)]
    seen = observation(
        left_out=[call, faint],
        lapse=Lapse(6.0, 12, 2, ["validation", "checkpoint"], [("train.py:40", 6, 23_438)]),
        device_time=gpu,
        modules=[
            ModuleTime("layers.*", HOSTILE, 6, 120.0, 210.0, "Bmm"),
            ModuleTime("head", "Linear", 1, 0.01, 0.01),
        ],
    )
    parsed = Parsed(page(verdict(observations=[seen])))
    assert f"layers.* (6 {HOSTILE}) forward 120 ms, backward 210 ms, most of it Bmm" in parsed.words
    assert "head (Linear)" not in parsed.words
    assert "tracker.log(...) costs 2 ms a step [1.86, 2.13]" in parsed.words
    assert "faint.call" not in parsed.words
    assert "2 epochs ended early" in parsed.words
    assert "validation, checkpoint. No time above comes from it." in parsed.words
    assert "train.py:40 6 of 23,438 batches" in parsed.words
    assert "busy 38 ms a step (forward 12, backward 25, copies 1)." in parsed.words
    assert not [tag for tag, _ in parsed.tags if tag in ("script", "img")]
