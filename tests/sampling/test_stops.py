"""Stop strings against a plain function of the whole text (case C03)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfer.sampling.stops import StopStrings


def cut(text: str, stops, include: bool) -> tuple[str, str | None]:
    """The specification: up to the match that starts earliest, the shorter of two that start together."""
    found = sorted((text.find(stop), len(stop), stop) for stop in stops if stop in text)
    if not found:
        return text, None
    start, length, stop = found[0]
    return text[:start + (length if include else 0)], stop


def feed(stops, pieces, include=False) -> tuple[list[str], StopStrings]:
    state = StopStrings(tuple(stops), include)
    return [*(state.push(piece) for piece in pieces), state.flush()], state


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(pieces=st.lists(st.text("ab", max_size=4), max_size=8),
       stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4), include=st.booleans())
def test_equals_the_pure_function(pieces, stops, include):
    expected, stop = cut("".join(pieces), stops, include)
    shown, state = feed(stops, pieces, include)
    assert "".join(shown) == expected
    assert state.matched == stop
    # At no time is anything shown that the final text does not begin with.
    assert all(expected.startswith("".join(shown[:i])) for i in range(len(shown)))


@settings(max_examples=500, deadline=None, derandomize=True)
@given(text=st.text("abc", max_size=20), stop=st.text("abc", min_size=1, max_size=4))
def test_holds_back_no_more_than_needed(text, stop):
    """One stop string, character by character: held is its longest beginning that ends the text."""
    state, shown = StopStrings((stop,)), ""
    for i, char in enumerate(text):
        shown += state.push(char)
        if state.matched:
            assert stop in text[:i + 1]
            break
        held = text[len(shown):i + 1]
        assert held == max((stop[:n] for n in range(len(stop)) if text[:i + 1].endswith(stop[:n])), key=len)


@pytest.mark.parametrize(("pieces", "stops", "text", "matched"), [
    (["AB", "CD", "EF", "g"], ["BCDE"], "A", "BCDE"),
    (["H", "I", "J", "K"], ["HIX"], "HIJK", None),
    (["H", "I", "J", "K"], ["K!"], "HIJK", None),
    (["H", "I"], ["IZ"], "HI", None),
    (["AB", "CD", "EF", "g"], ["EF", "CD"], "AB", "CD"),
    (["H", "I", "J", "K"], ["H"], "", "H"),
    (["H", "I", "J", "K"], ["IJX", "IJ"], "H", "IJ"),
    (["a", "b", "c"], ["abcd", "b"], "a", "b"),
    (["a", "b", "c", "d"], ["abcd", "b"], "", "abcd"),
    (["x"], [], "x", None),
])
def test_cases(pieces, stops, text, matched):
    shown, state = feed(stops, pieces)
    assert ("".join(shown), state.matched) == (text, matched)


def test_include_stop():
    shown, _ = feed(["CD"], ["AB", "CD", "EF"], include=True)
    assert "".join(shown) == "ABCD"


def test_nothing_after_a_match():
    state = StopStrings(("b",))
    assert state.push("ab") == "a"
    assert state.push("more") == ""
    assert state.flush() == ""


def test_undecided_match_is_settled_by_flush():
    state = StopStrings(("abcd", "b"))
    assert state.push("abc") == ""
    assert state.matched is None
    assert state.flush() == "a"
    assert state.matched == "b"
