"""A request and its sequences on the host, from prompt ids to finished text. Never imports jax."""

import time
from dataclasses import dataclass, field
from typing import Literal

from jaxinfer.cache.blocks import BlockTable
from jaxinfer.engine.text import TextStream
from jaxinfer.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log probabilities, natural and of the model's raw distribution, at one position.

    Attributes:
        token_id: the token that stands there.
        logprob: its log probability.
        rank: 1 if it was the most likely.
        top: the most likely tokens, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: dict[int, float]


@dataclass(eq=False, kw_only=True)
class Timings:
    """Seconds on `time.perf_counter`'s clock."""

    arrived: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    finished: float | None = None


@dataclass(eq=False, kw_only=True)
class Request:
    """One prompt and how to continue it."""

    prompt_ids: list[int]
    params: SamplingParams
    max_tokens: int  # resolved: params.max_tokens, or what the context leaves
    stop_ids: tuple[int, ...]  # end-of-sequence ids and params.stop_token_ids
    seed: int
    prompt: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    timings: Timings = field(default_factory=Timings)
    sequences: list["Sequence"] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        """All samples have ended."""
        return all(sequence.finish_reason for sequence in self.sequences)


@dataclass(eq=False, kw_only=True)
class Sequence:
    """One sample of a request.

    `num_computed` tokens of prompt and output have their keys and values in `table`'s pages.
    """

    request: Request
    index: int  # which of the request's n samples
    key_data: tuple[int, int] = (0, 0)  # raw threefry key of (request seed, index)
    stream: TextStream | None = None
    output_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    table: BlockTable | None = None
    num_computed: int = 0
    finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.request.prompt_ids) + len(self.output_ids)

    @property
    def num_uncomputed_prompt(self) -> int:
        """Prompt tokens still to be prefilled."""
        return max(0, len(self.request.prompt_ids) - self.num_computed)

    @property
    def max_cached_tokens(self) -> int:
        """Tokens whose keys and values it may need: all but the last one it emits."""
        return len(self.request.prompt_ids) + max(0, self.request.max_tokens - 1)

    def append(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Take one generated token; sets `finish_reason` when it ends the sequence."""
        self.output_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        is_stop = token_id in self.request.stop_ids
        text, met_stop_string = self._push(token_id, is_stop)
        if is_stop or met_stop_string:
            self.finish_reason = "stop"
        elif len(self.output_ids) >= self.request.max_tokens:
            self.finish_reason = "length"
        if self.finish_reason and self.stream and not met_stop_string:
            text += self.stream.flush()
        self.text += text

    def _push(self, token_id: int, is_stop: bool) -> tuple[str, bool]:
        """A token that ends the sequence shows no text of its own unless the request wants it."""
        if self.stream is None or (is_stop and not self.request.params.include_stop_str_in_output):
            return "", False
        return self.stream.push(token_id, may_stop=len(self.output_ids) > self.request.params.min_tokens)
