"""How one request wants its tokens chosen and when it ends. Never imports jax."""

import math
import operator
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NoReturn, no_type_check

from jaxinfer.errors import RequestError

MAX_LOGPROBS = 20  # as the OpenAI API; the step programs are compiled for few sizes
MAX_COUNT = 2**31 - 1
MAX_SEED = 2**64 - 1
MAX_FLOAT = (2 - 2**-23) * 2.0**127  # of float32; beyond it a value would reach the device as inf
MIN_POSITIVE = 2.0**-126  # of float32's normal numbers; below it a value would reach the device as 0


@no_type_check  # a type checker at run time must leave wrong types to __post_init__, which names the remedy
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request; every one acts, and one out of range raises.

    Sequences are stored as tuples and `logit_bias` as a tuple of pairs, so that instances hash and compare.

    Attributes:
        n: samples to draw for the prompt.
        temperature: 0 takes the most likely token, and then no filter acts; 1 is the model's own distribution.
        top_k: keep only the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the fewest most likely tokens whose probabilities reach this sum; in (0, 1].
        min_p: keep tokens at least this many times as probable as the most probable one; in [0, 1].
        repetition_penalty: above 1 discourages tokens of prompt and output; divides positive logits, multiplies
            negative ones.
        presence_penalty: subtracted from the logit of every token in the output; in [-2, 2].
        frequency_penalty: the same for each time it occurs there; in [-2, 2].
        logit_bias: token id to what is added to its logit.
        allowed_token_ids: only these may be chosen.
        bad_token_ids: these may not.
        min_tokens: tokens to generate before an end-of-sequence or stop id may be chosen.
        max_tokens: tokens to generate at most; None is 256, or what the context leaves if that is less; 0 only scores
            the prompt.
        stop: strings that end the text.
        stop_token_ids: ids that end it, beside the model's end-of-sequence ids.
        ignore_eos: the model's end-of-sequence ids do not end it.
        seed: the same seed gives the same tokens; None draws one.
        logprobs: report the chosen token's log probability and that of so many most likely ones, 0 to 20.
        prompt_logprobs: the same at every prompt token.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: let the text end with the stop string instead of before it.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    max_tokens: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        """Check ranges and normalise types.

        Raises:
            RequestError: a field has a value or type it may not have.
        """
        self._integer("n", 1)
        self._number("temperature", 0, MAX_FLOAT, "be a finite number from 0, which is greedy")
        self._integer("top_k", -1)
        self._set("top_k", max(self.top_k, 0))
        self._number("top_p", MIN_POSITIVE, 1, "be a number above 0 and up to 1, which keeps all")
        self._number("min_p", 0, 1, "be a number from 0, which keeps all, to 1")
        self._number("repetition_penalty", MIN_POSITIVE, MAX_FLOAT, "be a finite number above 0; 1 changes nothing")
        self._number("presence_penalty", -2, 2, "be a number from -2 to 2; 0 changes nothing")
        self._number("frequency_penalty", -2, 2, "be a number from -2 to 2; 0 changes nothing")
        self._set("logit_bias", _bias(self.logit_bias))
        for name in ("allowed_token_ids", "bad_token_ids"):
            ids = getattr(self, name)
            self._set(name, None if ids is None else _ids(name, ids))
        self._set("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        self._integer("min_tokens", 0)
        self._integer("max_tokens", 0, is_optional=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", f"be at most max_tokens, which is {self.max_tokens}", self.min_tokens)
        self._set("stop", _strings(self.stop))
        self._integer("seed", 0, MAX_SEED, is_optional=True)
        self._integer("logprobs", 0, MAX_LOGPROBS, is_optional=True)
        self._integer("prompt_logprobs", 0, MAX_LOGPROBS, is_optional=True)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, "be True or False", getattr(self, name))

    def check_ids(self, vocab_size: int, end_ids: Iterable[int] = ()) -> None:
        """Check token ids against the model, and that they leave something to choose.

        Args:
            vocab_size: of the model.
            end_ids: ids that end a sequence beside `stop_token_ids`: the model's end-of-sequence ids, unless ignored.

        Raises:
            RequestError: an id is outside the vocabulary, or every token is banned.
        """
        allowed, bad = self.allowed_token_ids, self.bad_token_ids or ()
        fields = {
            "logit_bias": dict(self.logit_bias or ()),
            "allowed_token_ids": allowed or (),
            "bad_token_ids": bad,
            "stop_token_ids": self.stop_token_ids,
        }
        for name, ids in fields.items():
            if (largest := max(ids, default=0)) >= vocab_size:
                _refuse(name, f"hold ids of the vocabulary only, which are those from 0 to {vocab_size - 1}", largest)
        if allowed is not None and not allowed:
            _refuse("allowed_token_ids", "hold at least one id, or be None to allow all", allowed)
        num_left = lambda banned: vocab_size - len(banned) if allowed is None else len(set(allowed) - banned)
        if num_left(set(bad)) == 0:
            _refuse("bad_token_ids", "leave at least one token that may be chosen", bad)
        ends = {token_id for token_id in (*self.stop_token_ids, *end_ids) if token_id < vocab_size}
        if self.min_tokens and num_left(ends.union(bad)) == 0:
            _refuse("min_tokens", "be 0 when every token that may be chosen ends the text", self.min_tokens)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _integer(self, name: str, low: int, high: int = MAX_COUNT, *, is_optional: bool = False) -> None:
        value = getattr(self, name)
        if is_optional and value is None:
            return
        number = _as_integer(value)
        if number is None or not low <= number <= high:
            _refuse(name, f"be an integer from {low} to {high}" + (" or None" if is_optional else ""), value)
        self._set(name, number)

    def _number(self, name: str, low: float, high: float, rule: str) -> None:
        number = _as_number(getattr(self, name))
        if number is None or not low <= number <= high:
            _refuse(name, rule, getattr(self, name))
        self._set(name, number)


def _refuse(name: str, rule: str, value: object) -> NoReturn:
    raise RequestError(f"{name} must {rule}, got {reprlib.repr(value)}.")


def _as_integer(value: Any) -> int | None:
    """`value` as int if it is one, NumPy's included; a bool is not."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _as_number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _ids(name: str, values: Any) -> tuple[int, ...]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        _refuse(name, "be a sequence of token ids", values)
    ids = []
    for value in values:
        token_id = _as_integer(value)
        if token_id is None or token_id < 0:
            _refuse(name, "hold token ids, which are integers from 0", value)
        ids.append(token_id)
    return tuple(ids)


def _bias(bias: Any) -> tuple[tuple[int, float], ...] | None:
    if bias is None:
        return None
    try:
        items = dict(bias).items()
    except (TypeError, ValueError):
        _refuse("logit_bias", "be a mapping from token id to number, or None", bias)
    pairs = []
    for key, value in items:
        token_id, number = _as_integer(key), _as_number(value)
        if token_id is None or token_id < 0:
            _refuse("logit_bias", "have token ids as keys, which are integers from 0", key)
        if number is None or not abs(number) <= MAX_FLOAT:
            _refuse("logit_bias", f"have a finite number for token {token_id}; to ban it use bad_token_ids", value)
        pairs.append((token_id, number))
    return tuple(sorted(pairs))


def _strings(stop: Any) -> tuple[str, ...]:
    if isinstance(stop, bytes | Mapping) or not isinstance(stop, Iterable):
        _refuse("stop", "be a string or a sequence of strings", stop)
    stops: tuple[Any, ...] = (stop,) if isinstance(stop, str) else tuple(stop)
    for string in stops:
        if not isinstance(string, str) or not string:
            _refuse("stop", "hold strings of at least one character", string)
    return stops
