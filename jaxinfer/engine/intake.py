"""From what a caller passes to a checked Request. Every complaint is raised here, before any device work."""

import operator
import reprlib
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NoReturn, no_type_check

from jaxinfer.engine.request import Request, Sequence
from jaxinfer.engine.text import TextStream
from jaxinfer.errors import RequestError
from jaxinfer.io.tokenizer import Tokenizer
from jaxinfer.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class Intake:
    """Checks and builds requests for one model."""

    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    eos_ids: tuple[int, ...]

    @no_type_check  # a type checker at run time must leave wrong types to the checks below, which name the remedy
    def request(self, prompt: str | Seq[int], params: SamplingParams, *, seed: int) -> Request:
        """A request with its n sequences.

        Args:
            prompt: text or token ids.
            params: how to sample.
            seed: used where `params` brings none.

        Raises:
            RequestError: an empty or too long prompt, ids outside the vocabulary, more tokens than the context has,
                or anything of a wrong type.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be a SamplingParams, got {type(params).__name__}")
        eos_ids = () if params.ignore_eos else self.eos_ids
        params.check_ids(self.vocab_size, end_ids=eos_ids)
        prompt_ids = self._prompt_ids(prompt)
        request = Request(
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_ids=prompt_ids,
            params=params,
            max_tokens=self._max_tokens(len(prompt_ids), params),
            stop_ids=eos_ids + tuple(params.stop_token_ids),
            seed=seed if params.seed is None else params.seed,
        )
        request.sequences = [
            Sequence(request=request, index=index, stream=self._stream(params)) for index in range(params.n)
        ]
        return request

    def _prompt_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        elif isinstance(prompt, Iterable) and not isinstance(prompt, bytes | bytearray | Mapping):
            ids = [self._refuse(value) if (i := as_token_id(value)) is None else i for value in prompt]
        else:
            self._refuse(prompt)
        if not ids and self.tokenizer.bos_id is not None:
            ids = [self.tokenizer.bos_id]
        if not ids:
            raise RequestError("prompt must hold at least one token, got an empty one; this tokenizer adds none itself")
        outside = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if outside is not None:
            self._refuse(outside)
        return ids

    def _refuse(self, value: object) -> NoReturn:
        expected = f"a string or a sequence of token ids from 0 to {self.vocab_size - 1}"
        raise RequestError(f"prompt must be {expected}, got {reprlib.repr(value)}")

    def _max_tokens(self, num_prompt: int, params: SamplingParams) -> int:
        room = self.max_model_len - num_prompt
        if room < 0 or (room == 0 and params.max_tokens != 0):
            raise RequestError(
                f"prompt must leave room in a context of {self.max_model_len} tokens, got {num_prompt} prompt tokens; "
                "shorten it or raise max_model_len"
            )
        if params.max_tokens is None:
            limit = min(max(DEFAULT_MAX_TOKENS, params.min_tokens), room)
        else:
            limit = params.max_tokens
        if limit > room or params.min_tokens > limit:
            field, value = ("max_tokens", limit) if limit > room else ("min_tokens", params.min_tokens)
            raise RequestError(
                f"{field} must be at most {room}, what a context of {self.max_model_len} tokens leaves after "
                f"{num_prompt} prompt tokens, got {value}"
            )
        return limit

    def _stream(self, params: SamplingParams) -> TextStream:
        detokenizer = self.tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens)
        return TextStream(detokenizer, tuple(params.stop), include_stop=params.include_stop_str_in_output)


def as_token_id(value: Any) -> int | None:
    """`value` as int if it is one, numpy's included; a bool is not."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
