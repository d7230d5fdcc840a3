import sys

import pytest

from flatout.devices.torch_build import driver_fits, read_torch_build


def installed(folder, text, monkeypatch):
    package = folder / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('it must not be imported')")
    (package / "version.py").write_text(text)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "path", [str(folder)])
    return read_torch_build()


def test_the_installed_torch_is_read_as_it_would_say_itself() -> None:
    import torch

    found = read_torch_build()
    assert (found.version, found.cuda, found.hip) == (
        torch.__version__,
        torch.version.cuda,
        torch.version.hip,
    )


def test_a_cuda_build_is_read_without_importing_it(tmp_path, monkeypatch) -> None:
    text = (
        "from typing import Optional\n__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n"
    )
    found = installed(tmp_path, text, monkeypatch)
    assert (found.version, found.cuda, found.hip) == ("2.13.0+cu130", "13.0", None)


def test_torch_may_be_missing(tmp_path, monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert read_torch_build().version is None


@pytest.mark.parametrize(
    ("torch_cuda", "driver_cuda", "fits"),
    [
        ("13.0", (13, 0), True),
        ("13.1", (13, 0), True),
        ("12.8", (13, 0), True),
        ("13.0", (12, 9), False),
        ("12.6", (12, 2), True),
    ],
)
def test_a_driver_runs_its_major_version_and_older_ones(torch_cuda, driver_cuda, fits) -> None:
    assert driver_fits(torch_cuda, driver_cuda) is fits
