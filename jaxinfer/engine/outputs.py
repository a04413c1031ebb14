"""What a caller gets back."""

from dataclasses import dataclass, field

from jaxinfer.engine.request import FinishReason, Request, TokenLogprobs
from jaxinfer.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One sample.

    Attributes:
        index: which of the request's n samples.
        text: without stop strings, unless they were asked for.
        token_ids: everything generated, an ending stop token included.
        finish_reason: "stop" (end of sequence, stop id or stop string), "length" or "abort".
        logprobs: one entry per token id, if asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprobs] | None


@dataclass(frozen=True, kw_only=True)
class RequestTimings:
    """Seconds.

    Attributes:
        time_to_first_token: from arrival to the first token, waiting and compiling included.
        total: from arrival to the last token.
        tokens_per_second: tokens after the first over the time after it, all samples together; 0 for a single token.
    """

    time_to_first_token: float
    total: float
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """The answer to one prompt.

    Attributes:
        prompt: the text, if the prompt was text.
        prompt_token_ids: what the model read.
        outputs: the samples, in order.
        prompt_logprobs: one entry per prompt token, the first None, if asked for.
        timings: when it ran.
        error: why the request was refused; such an output has no samples.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    timings: RequestTimings | None = None
    error: RequestError | None = None

    @property
    def text(self) -> str:
        """Text of the first sample.

        Raises:
            RequestError: the request was refused.
        """
        return self._first.text

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first sample; raises as `text` does."""
        return self._first.token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first sample ended; raises as `text` does."""
        return self._first.finish_reason

    @property
    def _first(self) -> CompletionOutput:
        if self.error:
            raise self.error
        return self.outputs[0]


def request_output(request: Request) -> RequestOutput:
    """A finished request as the caller sees it."""
    wants_logprobs = request.params.logprobs is not None
    return RequestOutput(
        prompt=request.prompt,
        prompt_token_ids=request.prompt_ids,
        outputs=[
            CompletionOutput(
                index=sequence.index,
                text=sequence.text,
                token_ids=sequence.output_ids,
                finish_reason=sequence.finish_reason,
                logprobs=sequence.logprobs if wants_logprobs else None,
            )
            for sequence in request.sequences
        ],
        prompt_logprobs=request.prompt_logprobs,
        timings=_timings(request),
    )


def _timings(request: Request) -> RequestTimings | None:
    times = request.timings
    if times.first_token is None or times.finished is None:
        return None
    later = sum(max(0, len(sequence.output_ids) - 1) for sequence in request.sequences)
    span = times.finished - times.first_token
    return RequestTimings(
        time_to_first_token=times.first_token - times.arrived,
        total=times.finished - times.arrived,
        tokens_per_second=later / span if span > 0 else 0.0,
    )
