"""From token ids to text that is safe to show: whole characters only, and nothing of a stop string."""

from jaxinfer.engine.stop import StopStrings
from jaxinfer.io.tokenizer import Detokenizer


class TextStream:
    """Detokenises one sequence and watches for its stop strings."""

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...], *, include_stop: bool):
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, include_stop)

    def push(self, token_id: int, *, may_stop: bool = True) -> tuple[str, bool]:
        """New text, and whether a stop string ended it; without `may_stop` stop strings are ordinary text."""
        text = self._detokenizer.push([token_id])
        return self._stops.push(text) if may_stop else (self._stops.flush() + text, False)

    def flush(self) -> str:
        """The rest of the text, once the sequence has ended otherwise."""
        text, is_stopped = self._stops.push(self._detokenizer.flush())
        return text if is_stopped else text + self._stops.flush()
