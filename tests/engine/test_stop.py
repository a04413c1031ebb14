from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.engine.stop import StopStrings

texts = st.text("abc", max_size=30)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


def run(pieces, stops, include):
    stream, shown = StopStrings(tuple(stops), include), ""
    for piece in pieces:
        text, is_finished = stream.push(piece)
        shown += text
        if is_finished:
            return shown, True
    return shown + stream.flush(), False


def cut(text, stops, include):
    """The definition: look at every prefix of the text, shortest first."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end if include else end - max(map(len, ended))], True
    return text, False


def split(text, cuts):
    bounds = [0, *sorted(min(at, len(text)) for at in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


@given(text=texts, stops=stop_lists, cuts=st.lists(st.integers(0, 30)), include=st.booleans())
def test_any_split_shows_text_up_to_earliest_stop(text, stops, cuts, include):
    assert run(split(text, cuts), stops, include) == cut(text, stops, include)


@given(text=texts, stops=stop_lists, cuts=st.lists(st.integers(0, 30)))
def test_nothing_shown_is_taken_back_and_no_more_is_held_than_needed(text, stops, cuts):
    stream, shown, pushed = StopStrings(tuple(stops), False), "", ""
    for piece in split(text, cuts):
        new, is_finished = stream.push(piece)
        shown, pushed = shown + new, pushed + piece
        if is_finished:
            return
        held = pushed[len(shown) :]
        assert pushed.startswith(shown)
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize(
    "stops, text, shown",
    [
        (("</s>",), "a</s", "a</s"),
        (("b", "abc"), "xabc", "xa"),  # "b" is complete first
        (("bc", "abc"), "xabc", "x"),  # both end together: the longest
        (("aab",), "aaab", "a"),
        ((), "anything", "anything"),
    ],
)
def test_examples(stops, text, shown):
    assert run(text, stops, False)[0] == shown


def test_nothing_follows_the_end():
    stream = StopStrings(("x",), True)
    assert stream.push("1x2") == ("1x", True)
    assert stream.push("3") == ("", True)
    assert stream.flush() == ""
