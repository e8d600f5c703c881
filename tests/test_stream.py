"""Stop strings over pieces of text, held against a search in the whole text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.engine.stream import StopMatcher
from kvist.errors import InputError

LETTERS = st.text("ab<", max_size=12)
STOPS = st.lists(st.text("ab<", min_size=1, max_size=4), max_size=4)


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """Cut before the match that ends first, the longer one where two end together."""
    found = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not found:
        return text, False
    end, minus_length = min(found)
    return text[: end + minus_length], True


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS)
def test_equals_a_search_in_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    stopped = False
    for piece in pieces:
        emit, stopped = matcher.push(piece)
        shown += emit
        assert not any(stop in shown for stop in stops)
        if stopped:
            break
    else:
        shown += matcher.flush()
    assert (shown, stopped) == expected("".join(pieces), stops)


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS)
def test_holds_back_only_what_may_become_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    text = shown = ""
    for piece in pieces:
        emit, stopped = matcher.push(piece)
        text, shown = text + piece, shown + emit
        if stopped:
            return
        held = text.removeprefix(shown)
        assert shown + held == text
        assert held == max(
            (text[start:] for start in range(len(text)) if any(s.startswith(text[start:]) for s in stops)),
            key=len,
            default="",
        )


def test_a_stop_string_over_three_pieces_and_nothing_after_it() -> None:
    matcher = StopMatcher(["\n\n", "<|end|>"])
    assert matcher.push("Paris.<|e") == ("Paris.", False)
    assert matcher.push("nd|") == ("", False)
    assert matcher.push("> and more") == ("", True)
    assert matcher.push("still more") == ("", True)
    assert matcher.flush() == ""


def test_a_false_start_is_shown_after_all() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("ST") == ("", False)
    assert matcher.push("AY") == ("STAY", False)
    assert matcher.push("S") == ("", False)
    assert matcher.flush() == "S"


def test_without_stop_strings_everything_passes() -> None:
    assert StopMatcher([]).push("text") == ("text", False)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InputError, match="stop: '' is an empty string"):
        StopMatcher(["a", ""])
