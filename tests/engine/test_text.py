import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.engine.text import TextStream
from jaxinfer.io.tokenizer import Tokenizer, load_tokenizer
from tests.tiny import EOS_ID, SPECIAL_TOKENS, VOCAB_SIZE


@pytest.fixture(scope="module")
def tokenizer(tiny) -> Tokenizer:
    return load_tokenizer(tiny("llama"))


def stream_of(tokenizer: Tokenizer, *stops: str, include_stop=False, skip_special_tokens=True) -> TextStream:
    return TextStream(tokenizer.detokenizer(skip_special_tokens=skip_special_tokens), stops, include_stop=include_stop)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def read(stream: TextStream, ids: list[int], *, may_stop=True) -> tuple[str, bool]:
    """Everything shown, and whether a stop string ended it."""
    shown = ""
    for token_id in ids:
        text, is_stopped = stream.push(token_id, may_stop=may_stop)
        shown += text
        if is_stopped:
            return shown, True
    return shown + stream.flush(), False


@given(ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30))
def test_without_stops_the_pieces_join_to_the_decoded_text(tokenizer, ids):
    assert read(stream_of(tokenizer), ids) == (tokenizer.decode(ids), False)


@given(
    ids=st.lists(st.integers(4, VOCAB_SIZE - 1), max_size=30), stop=st.sampled_from(["a", "th", "é", "e t", "\ufffd"])
)
def test_the_text_ends_before_the_stop_string_or_with_it(tokenizer, ids, stop):
    shown, is_stopped = read(stream_of(tokenizer, stop), ids)
    text, with_stop = tokenizer.decode(ids), read(stream_of(tokenizer, stop, include_stop=True), ids)[0]
    head, found, _ = text.partition(stop)
    assert (shown, with_stop) == (head, head + found)
    assert is_stopped == bool(found) or stop == "\ufffd"  # which may appear only when the rest is flushed


def test_characters_show_when_their_last_byte_has_come(tokenizer):
    stream, ids = stream_of(tokenizer), ids_of(tokenizer, "é€")
    assert len(ids) == 5
    assert [stream.push(token_id)[0] for token_id in ids] == ["", "é", "", "", "€"]


def test_a_stop_string_cut_across_tokens_is_held_back(tokenizer):
    stream, ids = stream_of(tokenizer, "xyz"), ids_of(tokenizer, "axyz")
    assert [stream.push(token_id) for token_id in ids] == [("a", False), ("", False), ("", False), ("", True)]


def test_what_only_looked_like_a_stop_string_shows_in_the_end(tokenizer):
    assert read(stream_of(tokenizer, "xyz"), ids_of(tokenizer, "axy")) == ("axy", False)
    assert read(stream_of(tokenizer, "xyz"), ids_of(tokenizer, "axyb")) == ("axyb", False)


def test_an_incomplete_character_shows_as_a_replacement_in_the_end(tokenizer):
    assert read(stream_of(tokenizer), ids_of(tokenizer, "a€")[:-1]) == ("a\ufffd", False)


def test_a_stop_string_that_the_flush_completes_does_not_show(tokenizer):
    assert read(stream_of(tokenizer, "\ufffd"), ids_of(tokenizer, "a€")[:-1])[0] == "a"


def test_stop_strings_are_text_while_they_may_not_stop(tokenizer):
    stream, (first, second) = stream_of(tokenizer, "x"), ids_of(tokenizer, "xx")
    assert stream.push(first, may_stop=False) == ("x", False)
    assert stream.push(second) == ("", True)


def test_special_tokens_are_skipped_unless_wanted(tokenizer):
    ids = [*ids_of(tokenizer, "a"), EOS_ID]
    assert read(stream_of(tokenizer), ids)[0] == "a"
    assert read(stream_of(tokenizer, skip_special_tokens=False), ids)[0] == "a" + SPECIAL_TOKENS[EOS_ID]
