"""Reading request traces: real files, every format, rows that are none, and whatever bytes there are."""

import gzip
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvist.errors import BadFile, InputError
from kvist.traces.blocks import chained, offsets_of
from kvist.traces.read import read_trace
from kvist.traces.trace import Trace

TRACES = Path(__file__).parents[2] / "shared" / "data" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason=f"{TRACES} is not there")


def written(folder: Path, content: str | bytes, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def requests_of(trace: Trace) -> list[tuple[float, int, int, list[int]]]:
    return [
        (
            float(trace.arrivals[index]),
            int(trace.prompts[index]),
            int(trace.outputs[index]),
            trace.blocks_of(index).tolist(),
        )
        for index in range(len(trace))
    ]


# -- real files -------------------------------------------------------------------------------------------------


@needs_traces
@pytest.mark.parametrize(
    ("name", "kind", "requests", "failed", "means", "span", "blocks"),
    [
        # Counts, means and spans as the traces' own manifest has them; blocks: size, references, unique.
        ("mooncake_fast25_conversation.jsonl.gz", "Mooncake", 12031, 0, (12035.1, 342.6), 3536.999,
         (512, 288500, 182790)),
        ("mooncake_arxiv_first1000.jsonl.gz", "Mooncake", 1000, 0, (9792.0, 199.1), 177.098, (512, 19686, 12207)),
        ("azure_llm_2023_code.csv.gz", "Azure", 8819, 0, (2047.8, 27.9), 3435.9, None),
        ("azure_llm_2023_conv.csv.gz", "Azure", 19366, 0, (1154.7, 211.1), 3501.7, None),
        ("burstgpt_1_first400.csv", "BurstGPT", 383, 17, (543.6, 288.8), 37269.0, None),
        ("lmcache_agent_miniswe_blk64.jsonl.gz", "Mooncake", 402, 0, (7381.7, 127.5), 552.1, (64, 46564, 3364)),
        ("llmservingsim_sharegpt-llama-3.1-8b-300-sps10_blk16.jsonl.gz", "Mooncake", 300, 0, (857.5, 652.5), 29.1,
         (16, 16225, 15003)),
        # Three turns have no prompt or no answer.
        ("sharegpt_v3_turn_lengths.csv.gz", "ShareGPT turns", 41675, 3, (714.2, 309.4), 0.0, (16, 1840872, 773926)),
    ],
)  # fmt: skip
def test_real_traces_say_what_their_manifest_says(
    name: str,
    kind: str,
    requests: int,
    failed: int,
    means: tuple[float, float],
    span: float,
    blocks: tuple[int, int, int] | None,
) -> None:
    trace = read_trace(TRACES / name)
    assert (trace.format, len(trace), trace.failed, trace.skipped) == (kind, requests, failed, ())
    assert (trace.prompts.mean(), trace.outputs.mean()) == pytest.approx(means, abs=0.06)
    assert trace.arrivals[-1] == pytest.approx(span, abs=0.06)
    assert (trace.timed, trace.out_of_order) == (span > 0, 0)
    found = (trace.block_tokens, trace.blocks.size, int(trace.blocks.max(initial=-1)) + 1)
    assert found == (blocks or (None, 0, 0))
    assert trace.offsets[-1] == trace.blocks.size


@needs_traces
def test_blocks_of_the_real_trace_are_those_of_the_file() -> None:
    path = TRACES / "mooncake_arxiv_first1000.jsonl.gz"
    ids = [block for line in gzip.decompress(path.read_bytes()).splitlines() for block in json.loads(line)["hash_ids"]]
    trace = read_trace(path)
    # Those of the first thousand rows of a longer file leave gaps.
    numbers: dict[int, int] = {}
    assert trace.blocks.tolist() == [numbers.setdefault(block, len(numbers)) for block in ids]
    few = read_trace(path, limit=7)
    assert requests_of(few) == requests_of(trace)[:7]


# -- every format -----------------------------------------------------------------------------------------------

MOONCAKE = '{"timestamp": 2000, "input_length": 600, "output_length": 20, "hash_ids": [0, 1]}\n'


@pytest.mark.parametrize(
    ("text", "requests"),
    [
        (MOONCAKE + MOONCAKE.replace("2000", "2500"), [(0.0, 600, 20, [0, 1]), (0.5, 600, 20, [0, 1])]),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59.9799600,9,3\r\n2023-11-17 00:00:00.9799601,8,2",
         [(0.0, 9, 3, []), (1.0000001, 8, 2, [])]),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 01:00:00+01:00,9,3\n2024-05-10T00:00:02.5Z,8,2",
         [(0.0, 9, 3, []), (2.5, 8, 2, [])]),
        ("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,GPT-4,9,3,12,API log\n7,x,5,0,5,y\n"
         "8,x,8,2,10,y", [(0.0, 9, 3, []), (3.0, 8, 2, [])]),
        # The second turn goes on with the first, the third with nothing that is known.
        ("conv,turn,prompt_tokens,history_tokens,completion_tokens\na,0,40,0,10\nb,0,20,0,9\na,1,8,50,5\na,2,8,40,5\n",
         [(0.0, 40, 10, [0, 1]), (0.0, 20, 9, [2]), (0.0, 58, 5, [0, 1, 3]), (0.0, 48, 5, [4, 5, 6])]),
        ('{"kvist_trace": 1, "block_tokens": 4}\n{"arrival": 1.5, "prompt_tokens": 9, "output_tokens": 3, '
         '"blocks": [7, 3]}\n{"arrival": 2.0, "prompt_tokens": 5, "output_tokens": 1}',
         [(0.0, 9, 3, [0, 1]), (0.5, 5, 1, [])]),
        ('{"arrival_time_ns": 5000000001, "input_toks": 9, "output_toks": 3}\n'
         '{"arrival_time_ns": 5000000002, "input_toks": 8, "output_toks": 2}', [(0.0, 9, 3, []), (1e-9, 8, 2, [])]),
        ("[9, 3]\n[8, 2]\n", [(0.0, 9, 3, []), (0.0, 8, 2, [])]),
        ("9 3\n8 2\n", [(0.0, 9, 3, []), (0.0, 8, 2, [])]),
        ('[\n{"prompt_tokens": 9, "output_tokens": 3},\n{"prompt_tokens": 8, "output_tokens": 2}\n]',
         [(0.0, 9, 3, []), (0.0, 8, 2, [])]),
    ],
)  # fmt: skip
def test_formats(text: str, requests: Sequence[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    halves = text.encode()[:30], text.encode()[30:]
    for content in (
        text.encode(),
        gzip.compress(text.encode(), mtime=0),
        b"".join(map(gzip.compress, halves)) + b"\0\0",
    ):
        assert requests_of(read_trace(written(tmp_path, content))) == list(requests)
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content), isatty=lambda: False))
        trace = read_trace("-")
        assert trace.source == "standard input"
        assert requests_of(trace) == list(requests)


def test_what_arrived_out_of_order_is_sorted_and_what_came_at_once_stays(tmp_path: Path) -> None:
    rows = [(3000, 1), (1000, 2), (2000, 3), (1000, 4)]
    text = "\n".join(
        json.dumps({"timestamp": time, "input_length": 600 + of, "output_length": of, "hash_ids": [9, of]})
        for time, of in rows
    )
    trace = read_trace(written(tmp_path, text))
    assert trace.outputs.tolist() == [2, 4, 3, 1]
    assert trace.arrivals.tolist() == [0, 0, 1, 2]
    assert trace.out_of_order == 2
    assert [trace.blocks_of(index).tolist() for index in range(4)] == [[0, 1], [0, 2], [0, 3], [0, 4]]


def test_ids_beyond_64_bits_and_texts_are_numbered(tmp_path: Path) -> None:
    ids: list[list[Any]] = [[2**40, 5], [2**40, 2**70], ["a", 5], ["a", 2**70, -(2**80)]]
    text = "\n".join(json.dumps({"input_length": 16 * len(row), "output_length": 1, "hash_ids": row}) for row in ids)
    trace = read_trace(written(tmp_path, text))
    assert trace.block_tokens == 16
    # 5 after "a" is another block than 5 after 2**40.
    assert [trace.blocks_of(index).tolist() for index in range(4)] == [[0, 1], [0, 2], [3, 4], [3, 5, 6]]


def test_blocks_beyond_the_prompt_are_left_out(tmp_path: Path) -> None:
    row = {"prompt_tokens": 9, "output_tokens": 1, "blocks": [0, 1, 2, 3]}
    trace = read_trace(written(tmp_path, f'{{"kvist_trace": 1, "block_tokens": 4}}\n{json.dumps(row)}'))
    assert trace.blocks.tolist() == [0, 1, 2]


@given(st.lists(st.lists(st.integers(-3, 3), max_size=6), max_size=8))
def test_chained_ids_are_equal_where_prefixes_are(rows: list[list[int]]) -> None:
    offsets = offsets_of(np.array([len(row) for row in rows], np.int64))
    found = chained(np.array([each for row in rows for each in row], np.int64), offsets)
    numbers: dict[tuple[int, ...], int] = {}
    expected = [numbers.setdefault(tuple(row[: k + 1]), len(numbers)) for row in rows for k in range(len(row))]
    assert found.tolist() == expected


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text('0123456789 ,-.e[]"', max_size=12) | st.from_regex(r"[1-9]{1,22}(, ?[1-9])*", fullmatch=True)))
@example(["0,0 0"])
@example(["00,0", "-00"])
def test_ids_that_are_read_apart_are_those_of_json(texts: list[str]) -> None:
    rows: list[list[Any]] = [[0]]
    for text in texts:
        try:
            # Leading zeros are forgiven, in lists of nothing but digits.
            plain = re.fullmatch(r"[0-9]+((, [0-9]+)*|(,[0-9]+)*)", text)
            found = json.loads(f"[{re.sub(r'(?<![0-9])0+(?=[0-9])', '', text) if plain else text}]")
        except ValueError:
            continue
        if all(type(each) in (int, str) for each in found):
            rows.append(found)
    head = '{"input_length": 8000, "output_length": 1, "hash_ids": [%s]}\n'
    content = '{"kvist_trace": 1, "block_tokens": 8}\n' + "".join(head % text for text in ["0", *texts])
    trace = read_from_stdin(content.encode(), skip_bad=True)
    offsets = offsets_of(np.array([len(row) for row in rows], np.int64))
    numbers: dict[int | str, int] = {}
    flat = [numbers.setdefault(each, len(numbers)) for row in rows for each in row]
    assert trace.offsets.tolist() == offsets.tolist()
    assert trace.blocks.tolist() == chained(np.array(flat, np.int64), offsets).tolist()


def read_from_stdin(content: bytes, *, skip_bad: bool) -> Trace:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content), isatty=lambda: False))
        return read_trace("-", skip_bad=skip_bad)


# -- rows that are none -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no requests; write one a line, CSV with a head, or JSON lines"),
        (MOONCAKE + '{"timestamp": 1', "line 2 is not JSON"),
        (MOONCAKE + MOONCAKE.strip() + "x", "line 2 is not JSON: Extra data at character 82"),
        (MOONCAKE + MOONCAKE.replace("600", "-1"), "line 2 has a length of '-1'; write a whole number, at most"),
        (MOONCAKE + MOONCAKE.replace("600", "true"), "line 2 has a length of 'True'"),
        (MOONCAKE + MOONCAKE.replace("600", "9" * 5000), "line 2 is not JSON: Exceeds the limit"),
        (MOONCAKE + MOONCAKE.replace("2000", "NaN"), "line 2 has a time of nan; write seconds"),
        (MOONCAKE + MOONCAKE.replace("2000", "1e400"), "line 2 has a time of inf"),
        (MOONCAKE + MOONCAKE.replace("2000", '"soon"'), "line 2 has a time of 'soon'; write seconds, or 2023-11-16"),
        (MOONCAKE + MOONCAKE.replace("2000", '"2023-02-30 00:00:00"'), "line 2 has a time of .*; there is no such day"),
        (MOONCAKE + MOONCAKE.replace("2000", '"2023-02-03 00:00:00"'), "line 2 has a time of .* are of another kind"),
        (MOONCAKE + MOONCAKE.replace("timestamp", "time_stamp"), "line 2 names no time of arrival"),
        (MOONCAKE.replace("timestamp", "x") + MOONCAKE, "line 2 names a time of arrival, which the rows before it"),
        (MOONCAKE + MOONCAKE.replace("[0, 1]", "[0, true]"), r"line 2 has hash_ids .* write \[0, 1, 2\]"),
        (MOONCAKE + MOONCAKE.replace("[0, 1]", "[0, 1.5]"), "line 2 has hash_ids that are no list of whole numbers"),
        (MOONCAKE + MOONCAKE.replace("[0, 1]", "[0, [1]]"), "line 2 has hash_ids"),
        (MOONCAKE + "5\n", "line 2 tells one length; a trace needs prompt_tokens and output_tokens"),
        ("length\n5\n", "line 2 tells one length"),
        ("Timestamp,Model,Request tokens,Response tokens\n5,x,1\n", "line 2 has 3 columns; one is missing"),
        ("some words\n", r"line 1 names no lengths \(some words\)"),
        (MOONCAKE.encode() + b"\xff\xfe", "line 2 is not text; write UTF-8"),
        (MOONCAKE.encode() + b"x" * (2**24 + 2**21), "line 2 is longer than 16 MiB"),
        ('{"kvist_trace": 2}\n', "is of version 2 of kvist's traces; this kvist reads version 1"),
        ('{"kvist_trace": 1, "block_tokens": 0}\n', "has block_tokens of '0'"),
        (
            gzip.compress(MOONCAKE.encode(), mtime=0)[:-9],
            "compressed data end before their end mark; fetch the file again",
        ),
        (b"\x1f\x8b broken", "while decompressing.*; fetch the file again"),
    ],
)  # fmt: skip
def test_bad_rows_name_line_and_remedy(text: str | bytes, says: str, tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=says) as raised:
        read_trace(written(tmp_path, text))
    assert str(raised.value).startswith("trace: /")
    assert "\n" not in str(raised.value)


def test_bad_rows_are_left_out_on_request(tmp_path: Path) -> None:
    good = MOONCAKE * 3
    text = b"words\n" + good.encode() + b"\xff\n{\n" * 100 + good.encode()
    path = written(tmp_path, text)
    trace = read_trace(path, skip_bad=True)
    assert len(trace) == 6
    assert trace.skipped_rows == 201
    assert len(trace.skipped) == 100
    assert [row.number for row in trace.skipped[:3]] == [1, 5, 6]
    assert trace.skipped[1].reason == "is not text; write UTF-8"
    with pytest.raises(BadFile, match="holds no requests; 2 rows are bad, the first: line 1 names no lengths"):
        read_trace(written(tmp_path, "words\nwords\n"), skip_bad=True)


def test_wrong_calls_say_what_is_right(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="limit: 0 requests; 1 or more"):
        read_trace(written(tmp_path, MOONCAKE), limit=0)
    with pytest.raises(BadFile, match=r"trace: .*none: no such file"):
        read_trace(tmp_path / "none")
    with pytest.raises(BadFile, match="is not a regular file but a directory"):
        read_trace(tmp_path)


GOOD = [
    MOONCAKE.encode() * 3,
    b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319,31,8\n",
    b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
    * 2,
    b"conv,turn,prompt_tokens,history_tokens,completion_tokens\n0,0,33,0,255\n0,1,35,288,328\n",
    b'{"kvist_trace": 1, "block_tokens": 4}\n{"arrival": 1.5, "prompt_tokens": 9, "output_tokens": 3, "blocks": [7]}\n',
    b"[\n[9, 3],\n[8, 2]\n]\n",
    gzip.compress(MOONCAKE.encode() * 3, mtime=0),
]
PIECES = [
    b"", b"\0", b"\xff", b'"', b"{", b"[", b"]", b",", b"-", b"9" * 30, b"1e999", b"null", b"true", b"\n", b"\r",
    b"NaN", b"\\u0000", "\u0661".encode(), b"\x1f\x8b", b"#", b";", b'"a"', b"0" * 5000,
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(GOOD),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 12), st.sampled_from(PIECES)), max_size=4),
    st.integers(0, 400),
    st.booleans(),
)
def test_whatever_the_bytes_there_is_a_trace_or_one_line(
    content: bytes, changes: list[tuple[int, int, bytes]], end: int, skip: bool
) -> None:
    for at, length, piece in changes:
        content = content[:at] + piece + content[at + length :]
    if end < 200:
        content = content[:end]
    raised: BadFile | None = None
    try:
        trace = read_from_stdin(content, skip_bad=skip)
    except BadFile as error:
        raised = error
    if raised is not None:
        assert "\n" not in str(raised)
        return
    assert len(trace) > 0
    assert trace.prompts.min() >= 1
    assert trace.outputs.min() >= 1
    assert np.all(np.diff(trace.arrivals) >= 0)
    assert np.isfinite(trace.arrivals).all()
    assert trace.offsets.size == len(trace) + 1
    if trace.block_tokens is not None:
        assert np.all(np.diff(trace.offsets) <= -(-trace.prompts // trace.block_tokens))
