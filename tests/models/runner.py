"""Feeds token rows to the decoder over a pool full of NaN, the way the engine does: fixed shapes, scattered pages."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.pages import GatheredKV, commit_columns, gather_context, init_pages
from jaxinfer.config import ModelConfig
from jaxinfer.io.checkpoint import open_checkpoint
from jaxinfer.load import load_params, model_config
from jaxinfer.models.decoder import forward, logits
from jaxinfer.types import Params, StepBatch

PAGE_SIZE = 16
NUM_ROWS = 3
PAGES_PER_ROW = 3
NUM_PAGES = 12
NUM_TOKENS = 80  # of a prefill step, padding included


@partial(jax.jit, static_argnames="config", donate_argnames="kv")
def step(params, kv, batch, *, config):
    kv, hidden = forward(params, kv, batch, config=config)
    return kv, logits(params, hidden)


gather = jax.jit(gather_context, static_argnames="num_columns")
commit = jax.jit(commit_columns, donate_argnames="kv")


def load_folder(folder: Path) -> tuple[ModelConfig, Params]:
    with open_checkpoint(folder) as checkpoint:
        config = model_config(checkpoint)
        return config, load_params(checkpoint, config, dtype=jnp.dtype(jnp.float32))


class Runner:
    """Up to `NUM_ROWS` sequences and their pages, in an order drawn from `seed`."""

    def __init__(self, config: ModelConfig, params: Params, *, seed: int = 0):
        self.config, self.params = config, params
        pool = init_pages(config, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=jnp.dtype(jnp.float32))
        self.kv = jax.tree.map(lambda pages: jnp.full_like(pages, jnp.nan), pool)
        pages = np.random.default_rng(seed).permutation(NUM_PAGES)[: NUM_ROWS * PAGES_PER_ROW]
        self.table = pages.reshape(NUM_ROWS, PAGES_PER_ROW).astype(np.int32)
        self.lens = np.zeros(NUM_ROWS, np.int32)

    def slots(self, row: int, positions: np.ndarray) -> np.ndarray:
        return self.table[row][positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE

    def prefill(self, *rows: Sequence[int]) -> list[np.ndarray]:
        """Append a chunk to each row; logits of every token of it."""
        counts = np.zeros(NUM_ROWS, np.int32)
        counts[: len(rows)] = [len(row) for row in rows]
        bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        ids, positions = np.zeros(NUM_TOKENS, np.int32), np.zeros(NUM_TOKENS, np.int32)
        slots = np.full(NUM_TOKENS, NUM_PAGES * PAGE_SIZE, np.int32)
        for row, tokens in enumerate(rows):
            own = slice(bounds[row], bounds[row + 1])
            ids[own], positions[own] = tokens, self.lens[row] + np.arange(len(tokens))
            slots[own] = self.slots(row, positions[own])
        self.lens += counts
        out = self._step(ids, positions, slots, np.where(counts > 0, self.lens, 0), bounds)
        return [out[bounds[row] : bounds[row + 1]] for row in range(len(rows))]

    def decode(self, *tokens: int) -> np.ndarray:
        """Append one token to each of the first rows; its logits."""
        out = self._step(*self._decode_batch(tokens), None)
        self.lens[: len(tokens)] += 1
        return out[: len(tokens)]

    def decode_gathered(self, tokens: np.ndarray, *, room: int) -> np.ndarray:
        """`decode` of `tokens[row, step]` over a copy of the context that is committed at the end, [row, step, V]."""
        num_rows, num_steps = tokens.shape
        starts = self.lens.copy()
        num_columns = PAGES_PER_ROW * PAGE_SIZE + room
        gathered = gather(self.kv, jnp.asarray(self.table), jnp.asarray(self.lens), num_columns=num_columns)
        first = jnp.int32(int(gathered.column))  # a copy: the steps donate the original
        outs = []
        for column in range(num_steps):
            batch = self._batch(*self._decode_batch(tokens[:, column]), None)
            gathered, out = step(self.params, gathered, batch, config=self.config)
            assert isinstance(gathered, GatheredKV)
            gathered = gathered._replace(column=gathered.column + 1)
            outs.append(np.asarray(out)[:num_rows])
            self.lens[:num_rows] += 1
        slots = np.full((NUM_ROWS, room), NUM_PAGES * PAGE_SIZE, np.int32)
        for row in range(num_rows):
            slots[row, :num_steps] = self.slots(row, starts[row] + np.arange(num_steps))
        self.kv = commit(self.kv, gathered, first, jnp.asarray(slots))
        return np.stack(outs, axis=1)

    def _decode_batch(self, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        ids, positions, lens = (np.zeros(NUM_ROWS, np.int32) for _ in range(3))
        slots = np.full(NUM_ROWS, NUM_PAGES * PAGE_SIZE, np.int32)
        for row, token in enumerate(tokens):
            ids[row], positions[row], lens[row] = token, self.lens[row], self.lens[row] + 1
            slots[row] = self.slots(row, positions[row])
        return ids, positions, slots, lens

    def _step(self, *arrays: np.ndarray | None) -> np.ndarray:
        self.kv, out = step(self.params, self.kv, self._batch(*arrays), config=self.config)
        return np.asarray(out)

    def _batch(self, ids, positions, slots, lens, bounds) -> StepBatch:
        return StepBatch(
            token_ids=jnp.asarray(ids),
            positions=jnp.asarray(positions),
            slot_mapping=jnp.asarray(slots),
            block_table=jnp.asarray(self.table),
            context_lens=jnp.asarray(lens),
            cu_q_lens=None if bounds is None else jnp.asarray(bounds),
        )
