"""What other threads of a script do while it steps."""

import queue
import threading
import time
from types import SimpleNamespace

import PIL

from flatout.observe.observation import Loader, Observation
from flatout.observe.other_threads import OtherThreads, _users
from flatout.observe.sites import site_of
from flatout.observe.watch import Watch
from flatout.observe.within_loader import Probe, _lane_of, fill


def work(end):
    while not end.is_set():
        sum(range(2000))  # the line


def wait(given):
    given.get()


def _is_ours(thread):
    return thread.name in ("maker", "waiter")  # and not one that another test has left


def test_a_busy_thread_is_reported_and_a_waiting_thread_is_not():
    end, given = threading.Event(), queue.Queue()
    threads = [
        # Those of libraries may be many.
        *(threading.Thread(target=end.wait, name=f"library-{at}") for at in range(20)),
        threading.Thread(target=work, args=(end,), name="maker"),
        threading.Thread(target=wait, args=(given,), name="waiter"),
    ]
    watch, seen = Watch(), Observation(["train.py"])
    watch.lanes.thread = threading.get_ident()
    others = OtherThreads(watch, share=1.0)  # sampling takes long on a busy machine
    for thread in threads:
        thread.start()
    try:
        until = time.monotonic() + 60
        while not any(map(_is_ours, seen.other_threads)) and time.monotonic() < until:
            others._begin()  # a thread that was just started may not run code of the user's yet
            time.sleep(0.1)
            others.fill(seen)
    finally:
        others.stop()
        end.set()
        given.put(None)
        for thread in threads:
            thread.join()
    (one,) = filter(_is_ours, seen.other_threads)
    assert (one.name, one.site.file) == ("maker", __file__)
    assert "end.is_set" in one.site.code or "the line" in one.site.code
    assert one.busy > 0.5
    assert others.seconds > 0


def test_a_frame_between_two_lines_is_at_that_of_its_function():
    code = SimpleNamespace(co_filename=__file__, co_firstlineno=7, co_name="work")
    frame = SimpleNamespace(f_code=code, f_lineno=None, f_back=None, f_globals={})
    assert site_of(frame).line == 7
    assert _users(frame) == (__file__, 7)
    assert _lane_of(frame) == "transform"


def _frame(name, file, line=1, function="work", back=None):
    code = SimpleNamespace(co_filename=file, co_firstlineno=line, co_name=function)
    return SimpleNamespace(f_code=code, f_lineno=line, f_back=back, f_globals={"__name__": name})


def test_what_is_done_to_a_decoded_image_is_no_decoding(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "x = augment(Image.open(path).convert('RGB'))\n"
        "x = ImageEnhance.Contrast(x).enhance(2)\n"
        "x = np.roll(x, 1)\n"
        "x = Image.open(path).convert('RGB').resize((8, 8))\n"
    )
    lines = [_frame("__main__", str(script), line) for line in (1, 2, 3, 4)]

    def pillow(name, function, line):
        return _frame(name, PIL.__file__, function=function, back=line)

    assert _lane_of(lines[0]) == "decode"
    assert _lane_of(pillow("PIL.Image", "convert", lines[0])) == "decode"
    assert _lane_of(pillow("PIL.ImageFile", "load", lines[2])) == "decode"  # np.asarray loads it
    enhance = pillow("PIL.ImageEnhance", "__init__", lines[1])
    assert _lane_of(pillow("PIL.Image", "convert", enhance)) == "transform"
    assert _lane_of(pillow("PIL.Image", "resize", lines[3])) == "transform"
    lines[2].f_back = lines[0]  # called by what decodes, as an augmentation is
    assert _lane_of(lines[2]) == "transform"


def test_the_line_that_decodes_is_told_beside_those_that_take_more(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("x = Image.open(path).convert('RGB')\nx = np.roll(x, 1)\n")
    probe, facts = Probe(), Loader("torch")
    for line in (1, 2, 2, 2):
        probe.look(_frame("__main__", str(script), line))
    probe.batches = 1
    fill(facts, [probe.as_dict()])
    assert [site.line for site, _ in facts.hot] == [2, 1]
    assert facts.decodes_at.code == "x = Image.open(path).convert('RGB')"
