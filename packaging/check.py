"""Checks what a release would hand out: the sdist, the wheel, and an install without a compiler.

python packaging/check.py

Builds both (the wheel from the sdist), installs them into fresh virtual environments that borrow
the dependencies of the present one, and trains there. Nothing is left in the checkout.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
NAME = f"flatout-{VERSION}"

# What a checkout may hold beside the project: never part of a release.
NOT_THE_PROJECT = (".git", "build", "dist", "site", "runs", "*.egg-info", "*.so", "__pycache__")
CACHES = (".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".venv")

EXTENSIONS = (
    "_augment",
    "_batch_norm",
    "_clock",
    "_criteo",
    "_dropout",
    "_example",
    "_gather",
    "_ids",
    "_libsvm",
    "_lines",
    "_relu_pool",
    "_resize",
    "_stacks",
    "_table_rows",
)

# Trains by the gather path, which the C extension serves where it was built.
TRAINS = """
import sys
import torch
import flatout
from flatout.kernels import relu_pool
from flatout.kernels.gather import available

assert flatout.__file__.startswith(sys.prefix), flatout.__file__
assert available() is (sys.argv[1] == "with extension"), available()
assert (relu_pool._c is not None) is available()
train, test = flatout.data.digits(size=8)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
trainer = flatout.Trainer(model, lr=0.01, metrics=["accuracy"])
trainer.fit(train, batch_size=32, epochs=2)
trainer.fit(train, batch_size=32, epochs=1)
assert trainer.evaluate(test)["accuracy"] > 0.8, trainer.evaluate(test)
"""


def main() -> None:
    """Run every check; the first that fails ends the program with what it found."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        sdist, wheel = build(work)
        check_wheel(wheel)
        check_sdist(sdist)
        check_installed(work / "of-wheel", wheel, {}, "with extension")
        check_installed(work / "of-sdist", sdist, {"CC": "/bin/false"}, "without extension")
    print("packaging: all as it should be")


def build(work: Path) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from the sdist, of a clean copy of the project."""
    clean = work / "project"
    shutil.copytree(ROOT, clean, ignore=shutil.ignore_patterns(*NOT_THE_PROJECT, *CACHES))
    dist = work / "dist"
    run([sys.executable, "-m", "build", "--outdir", str(dist), str(clean)])
    (sdist,) = dist.glob("*.tar.gz")
    (wheel,) = dist.glob("*.whl")
    expect(sdist.name == f"{NAME}.tar.gz", f"the sdist is called {sdist.name}")
    return sdist, wheel


def check_wheel(wheel: Path) -> None:
    """The package, its types, its license and the extensions for all Pythons; nothing else."""
    names = set(zipfile.ZipFile(wheel).namelist())
    suffix = ".abi3.so"
    python, abi, _ = wheel.stem.split("-")[2:]
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
    else:
        expect((python, abi) == ("cp311", "abi3"), f"the wheel is for {python}-{abi}")
    metadata = f"{NAME}.dist-info"
    wanted = {name for name in source_files() if not name.endswith((".c", ".h"))} | {
        *(f"flatout/kernels/{name}{suffix}" for name in EXTENSIONS),
        f"{metadata}/licenses/LICENSE",
        f"{metadata}/METADATA",
        f"{metadata}/RECORD",
        f"{metadata}/WHEEL",
        f"{metadata}/entry_points.txt",
        f"{metadata}/top_level.txt",
    }
    same(names, wanted, wheel.name)


def source_files() -> set[str]:
    """Every file of src/flatout that belongs into an sdist; a wheel goes without the C."""
    package = ROOT / "src" / "flatout"
    kinds = ("*.py", "*.pyi", "*.c", "*.h", "*.jinja", "*.toml", "*.json", "py.typed")
    return {f"flatout/{p.relative_to(package)}" for kind in kinds for p in package.rglob(kind)}


def check_sdist(sdist: Path) -> None:
    """Whatever is needed to build, to test and to read."""
    with tarfile.open(sdist) as archive:
        names = {name.removeprefix(f"{NAME}/") for name in archive.getnames()}
    wanted = {
        "CHANGELOG.md",
        "LICENSE",
        "README.md",
        "constraints.txt",
        "docs/index.md",
        "mkdocs.yml",
        "pyproject.toml",
        "setup.py",
        "tests/test_packaging.py",
        *(f"src/{name}" for name in source_files()),
    }
    expect(wanted <= names, f"{sdist.name} lacks {sorted(wanted - names)}")
    built = [name for name in names if name.endswith((".so", ".pyc"))]
    expect(not built, f"{sdist.name} holds built files: {built}")


def check_installed(home: Path, package: Path, env: dict[str, str], expected: str) -> None:
    """Install into a fresh environment and use it there, outside of the source tree."""
    venv.create(home, with_pip=True)
    python = str(home / "bin" / "python")
    run([python, "-m", "pip", "install", "-q", "--no-deps", str(package)], env=env)
    # Only now: pip would take the project installed over there for this one.
    borrow_dependencies(home)
    version = run([str(home / "bin" / "flatout"), "--version"], cwd=home)
    expect(version.strip() == f"flatout {VERSION}", f"flatout --version said {version!r}")
    # -W always: that the warning comes once must not be the doing of Python's filters.
    env = {"FLATOUT_CACHE": str(home / "cache")}
    said = run([python, "-W", "always", "-c", TRAINS, expected], cwd=home, env=env)
    warned = said.count("C extensions are missing")
    times = 0 if expected == "with extension" else 1
    expect(warned == times, f"{expected}: warned {warned} times, expected {times}\n{said}")
    print(f"packaging: {package.name} {expected}: installs, trains, warns {warned} times")


def borrow_dependencies(home: Path) -> None:
    """Let an environment find what is installed in the present one, behind its own packages."""
    paths = sysconfig.get_paths(vars={"base": str(home), "platbase": str(home)})
    here = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    Path(paths["purelib"], "borrowed.pth").write_text("\n".join(sorted(here)))


def run(command: list[str], cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """Run a command and return what it said on both streams; its failure ends the program."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    expect(done.returncode == 0, f"{' '.join(command[:4])} ... failed:\n{done.stdout}")
    return done.stdout


def same(found: Iterable[str], wanted: Iterable[str], where: str) -> None:
    """Refuse a list of files that is not the wanted one."""
    missing, extra = set(wanted) - set(found), set(found) - set(wanted)
    expect(not missing and not extra, f"{where} lacks {sorted(missing)}, has too {sorted(extra)}")


def expect(holds: bool, otherwise: str) -> None:
    """End the program with a sentence if something does not hold."""
    if not holds:
        raise SystemExit(f"packaging: {otherwise}")


if __name__ == "__main__":
    main()
