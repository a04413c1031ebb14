"""`LLM`: a model, its tokenizer and an engine behind a few calls. Start reading here."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from jaxinfer.compile_cache import enable_compile_cache
from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.intake import Intake, as_token_id
from jaxinfer.engine.outputs import RequestOutput, request_output
from jaxinfer.engine.request import Request
from jaxinfer.errors import RequestError
from jaxinfer.load import Progress, load_model
from jaxinfer.sampling_params import SamplingParams

Prompt = str | Sequence[int]
Message = dict[str, str]


class LLM:
    """A language model ready to generate.

    Args:
        model: a built-in name, a Hugging Face folder, a GGUF file, or a hub id.
        dtype: of weights and cache, "float32", "bfloat16" or "float16"; None is float32 on CPU, bfloat16 elsewhere.
        max_model_len: longest prompt plus output in tokens; None is the model's context, or what fits in memory.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: prompt tokens per prefill step.
        page_size: tokens per page of the KV cache.
        kv_cache_bytes: memory for pages; None is 1 GiB on CPU, else what weights and temporaries leave.
        seed: draws the seeds of requests that bring none.
        progress: called with (what is happening, done, total); total is 0 where it is unknown.

    Raises:
        JaxinferError: the model can't be found, read, understood or fitted.
    """

    def __init__(
        self,
        model: str | Path = "smollm2-135m-instruct",
        *,
        dtype: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 1024,
        page_size: int = 16,
        kv_cache_bytes: int | None = None,
        seed: int = 0,
        progress: Progress | None = None,
    ):
        options = EngineConfig(
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            page_size=page_size,
            kv_cache_bytes=kv_cache_bytes,
        )
        enable_compile_cache()
        loaded = load_model(model, options, progress=progress)
        self.config, self.plan, self.tokenizer = loaded.config, loaded.plan, loaded.tokenizer
        self._engine = Engine(loaded.params, loaded.config, options, loaded.plan, progress=progress)
        self._intake = Intake(
            tokenizer=loaded.tokenizer,
            vocab_size=loaded.config.vocab_size,
            max_model_len=loaded.plan.max_model_len,
            eos_ids=loaded.eos_ids,
        )
        self.buckets = self._engine.buckets
        self._seeds = np.random.default_rng(seed)

    @overload
    def generate(self, prompts: str | Sequence[int], params: SamplingParams | None = None) -> RequestOutput: ...
    @overload
    def generate(
        self, prompts: list[str] | list[list[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]: ...
    def generate(self, prompts: Any, params: Any = None) -> RequestOutput | list[RequestOutput]:
        """Continue one prompt, or each of a list, in order.

        Args:
            prompts: text or token ids, or a list of either.
            params: how to sample; one for all, or one per prompt. None is SamplingParams().

        Returns:
            A RequestOutput, or a list of them. In a list a bad request does not stop the others: its output carries
            the error, and raises it when its text is read.

        Raises:
            RequestError: the single prompt is bad, or `params` and `prompts` differ in number.
        """
        if not isinstance(prompts, list | tuple) or _is_token_ids(prompts):
            request = self._request(prompts, params)
            self._engine.run([request])
            return request_output(request)
        if not isinstance(params, list | tuple):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(f"params must be one, or one per prompt: expected {len(prompts)}, got {len(params)}")
        requests = [self._try_request(*pair) for pair in zip(prompts, params, strict=True)]
        self._engine.run([request for request in requests if isinstance(request, Request)])
        return [request_output(request) if isinstance(request, Request) else request for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Continue one prompt, yielding text as it becomes complete; leaving the loop early ends the request.

        Raises:
            RequestError: the prompt is bad, or `params.n` is not 1.
        """
        request = self._request(prompt, params)
        if len(request.sequences) != 1:
            raise RequestError(f"n must be 1 to stream, got {request.params.n}; use generate")
        return self._engine.stream(request)

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> RequestOutput:
        """Answer a conversation of {"role", "content"} messages, laid out by the model's chat template."""
        return self.generate(self.tokenizer.chat_ids(messages), params)

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Iterator[str]:
        """`chat`, yielding text as it becomes complete."""
        return self.stream(self.tokenizer.chat_ids(messages), params)

    def close(self) -> None:
        """Free the device's memory; the object is of no use afterwards."""
        self._engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, prompt: Any, params: Any) -> Request:
        params = SamplingParams() if params is None else params
        return self._intake.request(prompt, params, seed=int(self._seeds.integers(2**63)))

    def _try_request(self, prompt: Any, params: Any) -> Request | RequestOutput:
        try:
            return self._request(prompt, params)
        except RequestError as error:
            text = prompt if isinstance(prompt, str) else None
            return RequestOutput(prompt=text, prompt_token_ids=[], error=error)


def _is_token_ids(prompts: Sequence[Any]) -> bool:
    return len(prompts) > 0 and all(isinstance(item, bool) or as_token_id(item) is not None for item in prompts)
