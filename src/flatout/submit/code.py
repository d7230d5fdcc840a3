"""The code that travels with a job: its folder without the files that .gitignore names."""

from __future__ import annotations

import gzip
import io
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pathspec

from flatout.atomic_file import atomic_write
from flatout.errors import SubmitError
from flatout.measure import RUNS
from flatout.words import counted, size_words

ARCHIVE = "code.tar.gz"
# Files that are never code, and files that may hold secrets, whatever .gitignore says.
_NEVER = ("__pycache__/", ".git/", ".hg/", ".svn/", ".venv/", "*.pyc")
_SECRET = (
    *(".env", ".env.*", ".netrc", ".pypirc", "*.pem", "*.key", "*.p12", "id_rsa*", "id_ed25519*"),
    *("id_ecdsa*", ".ssh/", ".aws/", ".azure/", ".kube/", ".gnupg/", ".docker/", "credentials"),
)


@dataclass(frozen=True)
class CodeArchive:
    """The files that travel."""

    files: tuple[str, ...]
    bytes: int
    left_out: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{size_words(self.bytes)}, {counted(len(self.files), 'file')}"

    def write(self, root: Path, path: Path) -> None:
        """Write the files as a tar file that depends only on the code, not on the time."""
        try:
            with (
                atomic_write(path, "wb") as file,
                gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0) as packed,
                tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
            ):
                for name in self.files:
                    self._add(tar, root, name)
        except OSError as error:
            raise SubmitError(f"the code cannot be packed: {error}", where=str(path)) from error

    def _add(self, tar: tarfile.TarFile, root: Path, name: str) -> None:
        # A file that grows meanwhile must not tear the archive.
        data = (root / name).read_bytes()
        member = tarfile.TarInfo(name)
        member.size = len(data)
        member.mode = 0o755 if os.access(root / name, os.X_OK) else 0o644
        tar.addfile(member, io.BytesIO(data))


def collect(
    root: Path,
    *,
    without: tuple[Path, ...] = (),
    named: tuple[Path, ...] = (),
    largest: int = 10_000_000,
    largest_archive: int = 200_000_000,
) -> CodeArchive:
    """Collect the code in a folder: all files that no .gitignore names, following links to files.

    Run folders are left out, because a job would resume from their checkpoints.
    """
    files: list[str] = []
    left_out: list[tuple[str, str]] = []
    total = 0
    secret = pathspec.GitIgnoreSpec.from_lines(_SECRET)
    for name, size in sorted(_walk(root, without, named)):
        if name.endswith("/"):
            left_out.append((name, "a run, no code"))
        elif secret.match_file(name):
            left_out.append((name, "may hold a secret"))
        elif size > largest:
            left_out.append((name, f"{size_words(size)}: data, not code"))
        else:
            files.append(name)
            total += size
        if total > largest_archive:
            raise SubmitError(
                f"expected a folder of code; found more than {size_words(largest_archive)} in it",
                where=str(root),
                do="name in .gitignore what is no code, or start from the folder of the script",
            )
    return CodeArchive(tuple(files), total, tuple(left_out))


def _walk(
    root: Path, without: tuple[Path, ...], named: tuple[Path, ...]
) -> Iterator[tuple[str, int]]:
    # Rules of .gitignore files in parent folders hold too, within the repository.
    above = _rules_above(root)
    skipped = {item.resolve() for item in without}
    pending: list[tuple[str, list[tuple[str, pathspec.GitIgnoreSpec]]]] = [("", above)]
    while pending:
        folder, rules = pending.pop()
        at = root / folder
        if folder and _is_run(at) and not any(item.is_relative_to(at) for item in named):
            yield folder, 0
            continue
        rules = [*rules, *_rules(at, folder)]
        with os.scandir(at) as entries:
            for entry in entries:
                name = f"{folder}{entry.name}"
                try:
                    is_folder = entry.is_dir(follow_symlinks=False)
                    result = entry.stat()
                except OSError:  # a link to nothing, or gone meanwhile
                    continue
                if _is_ignored(f"{name}/" if is_folder else name, rules):
                    continue
                if is_folder:
                    if Path(entry.path).resolve() not in skipped:
                        pending.append((f"{name}/", rules))
                elif stat.S_ISREG(result.st_mode):
                    yield name, result.st_size


def _is_run(folder: Path) -> bool:
    return (folder / RUNS).is_file() and (folder / "checkpoints").is_dir()


def _rules(path: Path, prefix: str) -> list[tuple[str, pathspec.GitIgnoreSpec]]:
    try:
        text = (path / ".gitignore").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return []
    return [(prefix, pathspec.GitIgnoreSpec.from_lines(text.splitlines()))]


def _rules_above(root: Path) -> list[tuple[str, pathspec.GitIgnoreSpec]]:
    result = [("", pathspec.GitIgnoreSpec.from_lines(_NEVER))]
    if (root / ".git").exists():
        return result
    around = list(root.resolve().parents)
    top = next((n for n, folder in enumerate(around) if (folder / ".git").exists()), -1)
    for up in range(top, -1, -1):
        below = "/".join(root.resolve().parts[len(around[up].parts) :])
        result += [(f"<{below}/", spec) for _, spec in _rules(around[up], "")]
    return result


def _is_ignored(name: str, rules: list[tuple[str, pathspec.GitIgnoreSpec]]) -> bool:
    for prefix, spec in reversed(rules):
        result = f"{prefix[1:]}{name}" if prefix.startswith("<") else name.removeprefix(prefix)
        included = spec.check_file(result).include
        if included is not None:
            return bool(included)
    return False
