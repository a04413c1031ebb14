"""Edits of raw logits before sampling: penalties on repetition, biases, and bans as -inf.

-inf stays -inf under every temperature and every noise, so that nothing revives a banned token; in a row where every
token is banned, sampling takes id 0. Requests that ban everything are refused on the host.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.types import LogitEdits, TokenCounts


def count_tokens(
    history: Int[Array, "B S"], prompt_lens: Int[Array, " B"], total_lens: Int[Array, " B"], vocab_size: int
) -> TokenCounts:
    """Which tokens each row's prompt holds, and how often each occurs in its output.

    Args:
        history: prompt, then output, then padding; ids in [0, V].
        prompt_lens: tokens of prompt.
        total_lens: tokens of prompt and output.
        vocab_size: V.
    """

    def count(history: Int[Array, " S"], prompt_len: Int[Array, ""], total_len: Int[Array, ""]) -> TokenCounts:
        position = jnp.arange(history.shape[0], dtype=jnp.int32)
        is_output = (position >= prompt_len) & (position < total_len)
        prompt_ids = jnp.where(position < prompt_len, history, vocab_size)
        output_ids = jnp.where(is_output, history, vocab_size)
        return TokenCounts(
            in_prompt=jnp.zeros(vocab_size, jnp.bool_).at[prompt_ids].set(True, mode="drop"),
            in_output=jnp.zeros(vocab_size, jnp.int32).at[output_ids].add(1, mode="drop"),
        )

    return jax.vmap(count)(history, prompt_lens, total_lens)


def add_token(counts: TokenCounts, ids: Int[Array, " B"], active: Bool[Array, " B"]) -> TokenCounts:
    """Count one more output token in each active row."""
    num_rows, vocab_size = counts.in_output.shape
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    in_output = counts.in_output.at[rows, jnp.where(active, ids, vocab_size)].add(1, mode="drop")
    return counts._replace(in_output=in_output)


def edit_logits(logits: Float[Array, "B V"], edits: LogitEdits, counts: TokenCounts) -> Float[Array, "B V"]:
    """Apply the repetition penalty, then the presence and frequency penalties, then the bias.

    The repetition penalty reads prompt and output, the other two the output only.

    Source: CTRL, Keskar et al. 2019 (arXiv 1909.05858), as transformers' RepetitionPenaltyLogitsProcessor, and the
    OpenAI API reference, as vLLM.
    """
    return jax.vmap(_edit_row)(logits, edits, counts)


def _edit_row(logits: Float[Array, " V"], edits: LogitEdits, counts: TokenCounts) -> Float[Array, " V"]:
    in_output = counts.in_output > 0
    penalty = jnp.where(counts.in_prompt | in_output, edits.repetition_penalty, 1)
    logits = jnp.where(logits < 0, logits * penalty, logits / penalty)
    logits = logits - edits.frequency_penalty * counts.in_output.astype(jnp.float32)
    logits = logits - edits.presence_penalty * in_output.astype(jnp.float32)
    return jnp.where(edits.bias == -jnp.inf, -jnp.inf, logits + edits.bias)


def ban_until(
    logits: Float[Array, "B V"], stop_ids: Int[Array, "B Z"], banned: Bool[Array, " B"]
) -> Float[Array, "B V"]:
    """Ban the stop ids of rows that have not produced enough tokens yet.

    Args:
        logits: to edit.
        stop_ids: padded with V.
        banned: rows whose stop ids may not be chosen.
    """
    num_rows, vocab_size = logits.shape
    rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    return logits.at[rows, jnp.where(banned[:, None], stop_ids, vocab_size)].set(-jnp.inf, mode="drop")
