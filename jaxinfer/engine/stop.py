"""Stop strings in a stream of text. Never imports jax."""


class StopStrings:
    """Passes text on until a stop string is complete, and never shows a part of it.

    The stop string that is complete first ends the text; of several that end at the same character, the longest.
    How the text is cut into pieces therefore changes nothing.

    Example:
        >>> stream = StopStrings(("</s>",), include=False)
        >>> stream.push("Yes.<")
        ('Yes.', False)
        >>> stream.push("/s> and more")
        ('', True)
    """

    def __init__(self, stops: tuple[str, ...], include: bool):
        self._stops = stops
        self._include = include
        self._held = ""  # the start of a stop string, perhaps
        self._is_finished = False

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece; returns what is safe to show, and whether a stop string has ended the text."""
        if self._is_finished:
            return "", True
        text = self._held + text
        match = self._first_match(text)
        if match is not None:
            start, end = match
            self._held, self._is_finished = "", True
            return text[: end if self._include else start], True
        shown = len(text) - self._num_held(text)
        self._held = text[shown:]
        return text[:shown], False

    def flush(self) -> str:
        """What was held back, once no more text can come."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int] | None:
        starts = [(text.find(stop), len(stop)) for stop in self._stops]
        matches = [(start, start + length) for start, length in starts if start >= 0]
        return min(matches, key=lambda match: (match[1], match[0]), default=None)

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
