"""Where gradients are switched off for a call, whatever happens."""

from textwrap import indent

import pytest

from flatout.observe.no_grad import no_grad_above

START = "import contextlib, sys\nimport torch\ndef call():\n    return seen(sys._getframe())\n"


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("with torch.no_grad():\n    found = call()", 6),
        ("@torch.no_grad()\ndef forward():\n    return call()\nfound = forward()", 6),
        ("@torch.inference_mode\ndef forward():\n    return call()\nfound = forward()", 6),
        ("with torch.no_grad() if call else contextlib.nullcontext():\n    found = call()", None),
        ("with torch.inference_mode(1 < 2):\n    found = call()", None),
        ("if call:\n    with torch.no_grad():\n        found = call()\nelse:\n    pass", None),
        ("with torch.no_grad():\n    pass\nfound = call()", None),
    ],
)  # fmt: skip
def test_only_what_is_switched_off_for_certain_is_found(tmp_path, code, line):
    script = tmp_path / "train.py"
    script.write_text(f"{START}def forward():\n{indent(code, '    ')}\n    return found\n")
    names = {"seen": no_grad_above}
    exec(compile(script.read_text(), str(script), "exec"), names)
    site = names["forward"]()
    assert (site and site.line) == line
    assert site is None or site.file == str(script)
