"""Dimension key and the pytrees that cross the jit boundary.

Dimension key, used in every annotation of both packages and never redefined:

    B sequences   T flat query tokens   S context positions   L layers       D model width   N query heads
    K kv heads    G = N / K             H head dim            F ffn width    V vocabulary    P pages
    C slots/page  M pages/sequence      J drafts, tree nodes or steps        Z stop ids      E edited ids
"""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int, Key


class Linear(NamedTuple):
    """`y = x @ weight.T + bias`, weights as checkpoints store them."""

    weight: Float[Array, "out in"]
    bias: Float[Array, " out"] | None = None


class Norm(NamedTuple):
    """RMSNorm (`bias` None) or LayerNorm."""

    scale: Float[Array, " width"]
    bias: Float[Array, " width"] | None = None


class LayerParams(NamedTuple):
    """One decoder layer. `qkv` stacks query, key and value heads; a gated `up` stacks gate and up."""

    attn_norm: Norm
    qkv: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    out: Linear
    mlp_norm: Norm
    up: Linear
    down: Linear


class Params(NamedTuple):
    """A whole decoder. `head` is None when it is tied to `embed`; the projections are OPT-350m's."""

    embed: Float[Array, "V E"]
    positions: Float[Array, "max_positions D"] | None
    project_in: Linear | None
    layers: tuple[LayerParams, ...]
    final_norm: Norm | None
    project_out: Linear | None
    head: Linear | None


class StepBatch(NamedTuple):
    """What one forward pass reads besides weights and cache. Rows are sequences, tokens are flat and row-major.

    Padding tokens have `slot_mapping == num_slots` (their writes are dropped) and belong to no row;
    padding rows have `context_lens == 0` and no tokens.
    """

    token_ids: Int[Array, " T"]
    positions: Int[Array, " T"]
    slot_mapping: Int[Array, " T"]
    block_table: Int[Array, "B M"]
    context_lens: Int[Array, " B"]  # tokens attended, this step's own included
    cu_q_lens: Int[Array, " B+1"] | None  # row b owns tokens cu_q_lens[b] to cu_q_lens[b + 1]; None: one token a row


class SamplingRows(NamedTuple):
    """Per-row sampling controls; a row may vary each of them without a recompile.

    Neutral values: temperature 0 is greedy, top_k V, top_p 1, min_p 0, repetition 1, presence and frequency 0.
    """

    keys: Key[Array, " B"]  # one per (request seed, sample index); folded with the position of the sampled token
    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]


class LogitEdits(NamedTuple):
    """What changes raw logits before sampling; absent (None) when no row of the batch asks for it."""

    repetition_penalty: Float[Array, " B"]
    presence_penalty: Float[Array, " B"]
    frequency_penalty: Float[Array, " B"]
    bias: Float[Array, "B V"]  # logit_bias, and -inf where a token is not allowed


class TokenCounts(NamedTuple):
    """How often each token occurred in a row so far; what penalties read."""

    in_prompt: Bool[Array, "B V"]
    in_output: Int[Array, "B V"]


class SamplingBatch(NamedTuple):
    """How the rows of a step choose their tokens and when they are done.

    Padding rows have `max_tokens == 0`; `stop_ids` and `history` pad with V.
    """

    rows: SamplingRows
    stop_ids: Int[Array, "B Z"]  # ids that end a row
    num_outputs: Int[Array, " B"]  # tokens generated before this step
    min_tokens: Int[Array, " B"]  # stop ids are banned before this many outputs
    max_tokens: Int[Array, " B"]
    edits: LogitEdits | None
    history: Int[Array, "B S"] | None  # prompt and outputs so far, for penalties; present when `edits` is
    prompt_lens: Int[Array, " B"] | None


class Logprobs(NamedTuple):
    """Log probabilities of the model's raw distribution at each emitted token."""

    chosen: Float[Array, "*rows"]
    rank: Int[Array, "*rows"]  # 1 for the most likely token
    top: Float[Array, "*rows n"]
    top_ids: Int[Array, "*rows n"]


class StepOutput(NamedTuple):
    """What a step hands to the host."""

    ids: Int[Array, "B J"]  # row b emitted the first `num_tokens[b]`
    num_tokens: Int[Array, " B"]
    logprobs: Logprobs | None
