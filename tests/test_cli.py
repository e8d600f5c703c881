"""The command line from outside: what it prints, where, and its exit codes."""

import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from gguf_files import write_gguf

from kvist import cli
from kvist.cli import main, parse
from kvist.cli_values import in_options
from kvist.commands import listings
from kvist.errors import InputError

DOCS = Path(__file__).parents[1] / "docs"


def test_plan_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["plan", "smollm2-135m", "--json", "--explain", "--cache-memory", "1GiB", "--block", "128"])
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert answer["capacity"]["cache_tokens"] == 46592
    assert {"what", "value", "formula", "source"} == set(answer["explain"][0])


def test_tables_are_readable_at_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gemma-3-270m", "--explain", "--cache-memory", "1GiB", "--engine", "kvist"]) == 0
    assert main(["models"]) == 0
    assert main(["formats"]) == 0
    out, _ = capsys.readouterr()
    assert max(map(len, out.splitlines())) <= 80
    for word in ("18 KiB a token", "33,030,144", "sliding_window_pattern", "users at 8,192 tokens", "int4", "slab"):
        assert word in out


def test_file_names_with_brackets_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(tmp_path / "a[bold]b.gguf")
    assert main(["plan", str(path)]) == 0
    assert "a[bold]b" in capsys.readouterr().out


def test_rows_of_formats_and_models(capsys: pytest.CaptureFixture[str]) -> None:
    main(["formats", "--json"])
    rows = {row["name"]: row["bytes_per_32"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows == {"f32": 128, "f16": 64, "bf16": 64, "fp8": 32, "int8": 34, "int4": 18, "int4a": 20, "int4c": 20}
    main(["models", "--json"])
    names = [row["name"] for row in json.loads(capsys.readouterr().out)["rows"]]
    assert {"smollm2-135m", "gemma-3-270m", "llama-3-8b"} <= set(names)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("", 2, "COMMAND; see kvist --help"),
        ("fly", 2, "invalid choice: 'fly'"),
        ("plan", 2, "MODEL; see kvist plan --help"),
        ("plan nothing-like-it", 2, "no model 'nothing-like-it'"),
        ("plan ./nothing", 2, "./nothing: no such file or directory"),
        ("plan smollm2-135m --memory much", 2, "--memory: 'much' is not a size; write 512MiB"),
        ("plan smollm2-135m --context 8q", 2, "--context: '8q' is not a token count"),
        ("plan smollm2-135m --users -3", 2, "--users"),
        ("plan smollm2-135m --key int3", 2, "--key: 'int3' is not a codec; choose one of f32"),
        ("plan smollm2-135m --value int4a/int8", 2, "--value: 'int4a/int8' is not a codec; choose one of f32"),
        ("plan smollm2-135m --keep-layers -1", 2, "--keep-layers: '-1' is not a whole number of layers, 0 or more"),
        ("plan smollm2-135m --keep-layers 16", 2, "--keep-layers: 16 at either end; smollm2-135m has 30 layers: at m"),
        ("plan smollm2-135m --keep-layers 2=int8", 2, "--keep-layers: 'int8' is not a codec for kept layers; choose o"),
        ("plan smollm2-135m --layer-format 3", 2, "--layer-format: '3'; write LAYER=KEY/VALUE, such as 0=bf16 or 7="),
        ("plan smollm2-135m --layer-format x=bf16", 2, "--layer-format: 'x' is not a whole number of layers, 0 or mo"),
        ("plan smollm2-135m --layer-format 3=int8/f8", 2, "--layer-format: 'f8' is not a codec; choose one of f32"),
        ("plan smollm2-135m --layer-format 30=bf16", 2, "--layer-format: 30; smollm2-135m has 30 layers, 0 to 29"),
        ("plan smollm2-135m --layer-format 3=bf16 --layer-format 3=f16", 2, "--layer-format: layer 3 is there twice"),
        ("plan smollm2-135m --state fp8", 2, "--state: 'fp8' is not a codec for recurrent states; choose one of f32"),
        (
            "plan opt-2.7b --value int4",
            2,
            "--value: codec int4 stores groups of 32 elements; a width of 80 is not a mult",
        ),
        (
            "models opt-2.7b --key int8",
            2,
            "opt-2.7b cannot be stored in int8/bf16: key: codec int8 stores groups of 32 elem",
        ),
        (
            "simulate --mean-length 9 --model smollm2-135m --keep-layers 16 --cache-memory 1GiB",
            2,
            "--keep-layers: 16 at",
        ),
        (
            "simulate --mean-length 9 --model smollm2-135m --state int4",
            2,
            "--state: 'int4' is not a codec for recurrent",
        ),
        ("generate a b --keep-layers 1=int4", 2, "--keep-layers: 'int4' is not a codec for kept layers; choose one of"),
        ("serve a --layer-format 1=int3", 2, "--layer-format: 'int3' is not a codec; choose one of f32"),
        ("plan smollm2-135m --memory 1GiB --cache-memory 1GiB", 2, "not allowed with argument --memory"),
        ("plan smollm2-135m --gpu H1000", 2, "--gpu: no device 'H1000'; nearest are H100 SXM5 80GB"),
        ("plan smollm2-135m --gpu H100 --cache-memory 1GiB", 2, "--gpu and --cache-memory are both given"),
        ("plan smollm2-135m --gpu H100x3 --tp 2", 2, "--gpu: 3 devices cannot be shared by 2 ranks x 1 stage"),
        ("plan smollm2-135m --gpu L4 --tp 2", 2, "--tp: 2 ranks cannot share the 9 query heads of smollm2-135m"),
        ("plan smollm2-135m --gpu L4 --pp 99", 2, "--pp: 99 stages for 30 layers"),
        ("plan smollm2-135m --tp 2", 2, "--tp: 2 needs a memory to count in; add --gpu, --memory or --cache-memory"),
        ("plan smollm2-135m --weights int3", 2, "--weights: 'int3' is not a codec for weights; choose one of f32"),
        ("plan smollm2-135m --gpu L4 --lengths ./none.csv", 2, "--lengths: ./none.csv: no such file"),
        ("plan smollm2-135m --lengths ./none.csv", 2, "--lengths: ./none.csv needs a memory to count in"),
        ("plan smollm2-135m --gpu L4 --shared-prefix 8k", 2, "--shared-prefix: 8,192 tokens of sequences of 8,192"),
        ("plan smollm2-135m --gpu L4 --users 999999", 3, "999,999 users x 8,192 tokens need"),
        ("plan smollm2-135m --gpu L4 --overhead 24GiB", 3, "leaves no cache"),
        ("plan smollm2-135m --engine tgi", 2, "--engine: 'tgi' is not accounted for; choose one of kvist, vllm"),
        ("plan smollm2-135m --set block_size=32", 2, "block_size is a setting of no engine; name it with --engine"),
        ("gpus h1000", 2, "gpus: no device has 'h1000'; `kvist gpus` alone lists all"),
        ("plan smollm2-135m --assume kv", 2, "--assume: 'kv' is not KEY=VALUE"),
        ("plan smollm2-135m --assume kv=1", 2, "--assume: 'kv' is no key that is read"),
        ("plan smollm2-135m --cache-memory 1GiB --users 99", 3, "99 users x 8,192 tokens need"),
        ("plan smollm2-135m --memory 1MiB", 3, "leaves no cache"),
        ("generate", 2, "generate: 0 words; give [MODEL] PROMPT"),
        ("generate a b c", 2, "generate: 3 words"),
        ("generate a b --temperature warm", 2, "--temperature: 'warm' is not a number"),
        ("serve a --prot 1", 2, "serve: unknown argument '--prot'"),
        ("serve a --port x", 2, "--port: 'x' is not a whole number"),
        ("serve a --port 65536", 2, "--port: '65536' is out of range; 0 to 65535"),
        ("serve a --max-running 0", 2, "--max-running: '0' is out of range; 1 or more"),
        ("serve a --max-context 0", 2, "--max-context: '0' is out of range; 1 or more"),
        ("serve a --block 0", 2, "--block: '0' is out of range; 1 to 1048576"),
        ("generate a b --value int3", 2, "--value: 'int3' is not a codec"),
        ("generate a b --seed 9223372036854775808", 2, "--seed: '9223372036854775808' is out of range; -9223372036854"),
        ("generate a b --seed 1.5", 2, "--seed: '1.5' is not a whole number"),
        ("generate a b --top-k -2", 2, "--top-k: '-2' is out of range; -1 or more"),
        ("generate a b --top-p 0", 2, "--top-p: '0' is out of range; above 0, at most 1"),
        ("generate a b --min-p -.5", 2, "--min-p: '-.5' is out of range; 0 to 1"),
        ("generate a b --temperature nan", 2, "--temperature: 'nan' is out of range; 0 to 100"),
        ("generate a b --temperature -1", 2, "--temperature: '-1' is out of range"),
        ("generate a b --max-tokens 0", 2, "--max-tokens: '0' is out of range; 1 or more"),
        ("generate a b --max-tokens -3", 2, "--max-tokens: '-3' is negative; a token count is 0 or more"),
        ("generate a b --stop=", 2, "--stop: an empty text cannot be found"),
        ("generate a b --memory -1GiB", 2, "--memory: '-1GiB' is negative; a size is 0 or more bytes"),
        ("plan smollm2-135m --cache-memory -1GiB", 2, "--cache-memory: '-1GiB' is negative; a size is 0 or more"),
        ("plan smollm2-135m --cache-memory 9999PiB", 2, "--cache-memory: '9999PiB' is too large"),
        ("plan smollm2-135m --cache-memory 1GiB --context 9k", 2, "--context: 9,216 tokens; smollm2-135m allows 1 to"),
        ("plan smollm2-135m --context 4k", 2, "--context: 4096 needs a memory to count in; add --gpu, --memory or --c"),
        ("plan smollm2-135m --block 16", 2, "--block: 16 needs a memory"),
        ("plan smollm2-135m --engine kvist", 2, "--engine: kvist needs a memory to count in; add --gpu, --memory or"),
        ("plan smollm2-135m --tokens 0", 2, "--tokens: '0' is out of range; 1 or more"),
        ("plan smollm2-135m --tokens 2000000M", 2, "--tokens: '2000000M' is too large"),
        ("plan smollm2-135m --cache-memory 1", 3, "the cache: 1 B holds 0 slabs"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(
    words: str, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvist: ")
    assert err.count("\n") == 1
    assert says in err


def test_overrides_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "smollm2-135m", "--json", "--assume", "num_key_value_heads=9"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["append_bytes_per_token"] == 3 * 23040
    assert answer["exact"] is False
    assert answer["assumed"] == [{"key": "num_key_value_heads", "value": 9, "source": "--assume"}]


def test_generate_and_serve_get_their_options_by_name() -> None:
    args = parse(["generate", "m", "--max-tokens", "1k", "a prompt", "--stop", "x", "--stop", "y", "--raw"])
    assert (args.model, args.prompt, args.max_tokens, args.stop) == ("m", "a prompt", 1024, ["x", "y"])
    assert (args.chat, args.memory, args.key, args.temperature, args.json) == (False, None, None, None, False)
    only = parse(["generate", "--memory", "1MiB", "only a prompt", "--chat"])
    assert (only.model, only.prompt, only.memory, only.chat) == (None, "only a prompt", 2**20, True)
    serve = parse(["serve", "--max-context", "4k", "--key", "int8"])
    wanted = {
        "model",
        "host",
        "port",
        "memory",
        "key",
        "value",
        "dtype",
        "block",
        "max_running",
        "max_context",
        "api_key",
    }
    assert wanted <= set(vars(serve))
    assert (serve.model, serve.host, serve.port, serve.max_context) == (None, "127.0.0.1", 8000, 4096)


def test_negative_values_are_values() -> None:
    args = parse(["generate", "a prompt", "--seed", "-1", "--top-k", "-1"])
    assert (args.seed, args.top_k, args.prompt) == (-1, 0, "a prompt")
    assert parse(["generate", "p", "--seed", str(-(2**63))]).seed == -(2**63)
    assert parse(["generate", "p", "--stop", "-1"]).stop == ["-1"]


@pytest.mark.parametrize(
    ("key", "just_outside"),
    [
        ("temperature", (-0.01, 100.1, float("nan"))),
        ("top_p", (0, 1.01)),
        ("min_p", (-0.01, 1.01)),
        ("seed", (-(2**63) - 1, 2**63)),
        ("max_tokens", (0,)),
        ("top_k", (-2,)),
    ],
)
def test_what_the_sampler_refuses_is_refused_before_it_is_loaded(key: str, just_outside: tuple[float, ...]) -> None:
    from kvist.engine.sampler import SamplingParams

    for value in just_outside:
        with pytest.raises(InputError):
            SamplingParams.of({key: value})
        with pytest.raises(InputError, match=f"--{key.replace('_', '-')}: "):
            parse(["generate", "p", f"--{key.replace('_', '-')}={value}"])


@pytest.mark.parametrize(
    ("key", "accepted"),
    [("temperature", (0, 100)), ("top_p", (0.01, 1)), ("min_p", (0, 1)), ("seed", (-(2**63), 2**63 - 1))],
)
def test_what_the_sampler_accepts_is_accepted(key: str, accepted: tuple[float, ...]) -> None:
    from kvist.engine.sampler import SamplingParams

    for value in accepted:
        SamplingParams.of({key: value})
        assert getattr(parse(["generate", "p", f"--{key.replace('_', '-')}={value}"]), key) == value


def test_wrong_settings_are_told_before_the_engine_is_loaded() -> None:
    code = (
        "import sys; from kvist.cli import main; code = main(['generate', 'p', '--top-p', '2']);"
        "print(code, [name for name in ('torch', 'numpy', 'kvist.engine') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2 []"


def test_messages_about_parameters_are_about_options_at_the_command_line() -> None:
    names = {"cache_memory": "--cache-memory", "block": "--block", "key": "--key"}
    assert in_options("block_tokens: 3; add `cache_memory`", "block_tokens", names) == "--block: 3; add --cache-memory"
    assert in_options("key: no", "key", names) == "--key: no"
    assert in_options("key: no", None, names) == "key: no"
    assert in_options("a/file: `pip config` and `other`", "model", names) == "a/file: `pip config` and `other`"


def raising(error: BaseException) -> Any:
    def run(args: Namespace) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyboardInterrupt(), 130, ""),
        (ZeroDivisionError("one\ntwo"), 1, "kvist: internal error: ZeroDivisionError: one two (KVIST_DEBUG=1 shows"),
        (
            ModuleNotFoundError("no", name="torch.nn"),
            2,
            "kvist: torch is not installed; this command needs it: pip install",
        ),
        (ModuleNotFoundError("no", name="kvist.x"), 1, "kvist: internal error: ModuleNotFoundError"),
    ],
)
def test_what_goes_wrong_inside_is_one_line_too(
    error: BaseException, code: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KVIST_DEBUG", raising=False)
    monkeypatch.setattr(listings, "run_formats", raising(error))
    assert main(["formats"]) == code
    err = capsys.readouterr().err
    assert err.startswith(says)
    assert err.count("\n") == bool(says)


def test_debugging_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KVIST_DEBUG", "1")
    assert main(["plan", "nothing-like-it"]) == 2
    assert "Traceback" in capsys.readouterr().err


def kvist(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvist", *words], capture_output=True, text=True, check=False, **options
    )


def test_as_a_module_and_its_version() -> None:
    done = kvist("--version")
    assert (done.returncode, done.stdout.split()[0]) == (0, "kvist")


def test_a_reader_that_has_seen_enough_is_not_an_error() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "kvist", "formats"], stdout=closed, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("words", [["formats"], ["models", "--json"], ["plan", "--help"], ["--version"]])
def test_a_full_disk_is_one_line(words: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvist", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr == "kvist: standard output cannot be written: No space left on device\n"


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
@pytest.mark.parametrize(
    ("words", "code", "err"),
    [
        ("formats >&-", 1, "kvist: standard output is closed; the answer has nowhere to go\n"),
        ("formats >&- 2>&-", 1, ""),
        ("plan nothing-like-it 2>&-", 2, ""),
        ("plan nothing-like-it >&-", 1, "kvist: standard output is closed; the answer has nowhere to go\n"),
    ],
)
def test_closed_streams_are_no_internal_error(words: str, code: int, err: str) -> None:
    done = subprocess.run(f"{sys.executable} -m kvist {words}", shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", err)


def test_plan_loads_neither_torch_nor_numpy_nor_rich() -> None:
    code = (
        "import sys; from kvist.cli import main; main(['plan', 'smollm2-135m', '--json']);"
        "print([name for name in ('torch', 'numpy', 'rich', 'gguf', 'transformers') if name in sys.modules],"
        "file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert json.loads(done.stdout)["model"] == "smollm2-135m"


def test_importing_kvist_loads_nothing_of_the_engine() -> None:
    code = "import sys, kvist; print(sorted(name for name in sys.modules if name.startswith('kvist')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['kvist', 'kvist._version']"


def test_the_page_of_commands_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)
    import generate_cli

    if sys.version_info[:2] == (3, 11):
        # Later versions of argparse lay some lines out otherwise.
        assert generate_cli.page() == generate_cli.PAGE.read_text(), "run python docs/generate_cli.py"
    for name, command in generate_cli.commands(cli.build_parser()).items():
        assert "example:\n  kvist" in command.format_help(), name


def test_weights_of_no_known_type_are_a_size_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3-8b"]) == 0
    assert re.search(r"^weights +14\.96 GiB$", capsys.readouterr().out, re.MULTILINE)
