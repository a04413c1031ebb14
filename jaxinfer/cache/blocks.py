"""Which sequence owns which pages of the pool. Host bookkeeping only: never imports jax, never touches a page."""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxinfer.errors import MemoryPlanError


class PageCopy(NamedTuple):
    """The device must copy page `src` to page `dst` before anything else is written."""

    src: int
    dst: int


@dataclass(eq=False)
class BlockTable:
    """One sequence's pages, in order; its tokens fill them from the front."""

    pages: list[int]
    num_tokens: int


class BlockManager:
    """Hands out the pages of a pool and counts how many sequences share each.

    Args:
        num_pages: pages in the pool.
        page_size: tokens a page holds.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.page_size = page_size
        self._free = deque(range(num_pages))  # taken from the left
        self._ref_counts = [0] * num_pages

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free)

    def can_allocate(self, num_tokens: int) -> bool:
        """Whether a new sequence of `num_tokens` fits."""
        return self._num_pages(num_tokens) <= len(self._free)

    def allocate(self, num_tokens: int) -> BlockTable:
        """Start a sequence with room for `num_tokens`.

        Raises:
            MemoryPlanError: too few pages are free; nothing has changed.
        """
        return BlockTable(self._take(self._num_pages(num_tokens)), num_tokens)

    def append(self, table: BlockTable, num_tokens: int) -> list[PageCopy]:
        """Make room for `num_tokens` more, in pages that no other sequence sees.

        Returns:
            The copy that a last page both shared and partly filled needs; collect these from all sequences and run
            them on the device in one call, before the step that writes the tokens.

        Raises:
            MemoryPlanError: too few pages are free; nothing has changed.
        """
        assert num_tokens >= 0, num_tokens
        is_partial = table.num_tokens % self.page_size > 0
        must_copy = num_tokens > 0 and is_partial and self._ref_counts[table.pages[-1]] > 1
        num_new = self._num_pages(table.num_tokens + num_tokens) - len(table.pages)
        fresh = self._take(num_new + must_copy)
        copies = []
        if must_copy:
            shared = table.pages.pop()
            copies.append(PageCopy(src=shared, dst=fresh[0]))
            self._ref_counts[shared] -= 1
        table.pages.extend(fresh)
        table.num_tokens += num_tokens
        return copies

    def fork(self, table: BlockTable) -> BlockTable:
        """A second sequence with the same tokens so far; it shares every page until one of the two appends."""
        for page in table.pages:
            self._ref_counts[page] += 1
        return BlockTable(list(table.pages), table.num_tokens)

    def free(self, table: BlockTable) -> None:
        """End a sequence. Its last pages are reused before its first ones."""
        for page in reversed(table.pages):
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                self._free.append(page)
        table.pages, table.num_tokens = [], 0

    def slot_mapping(self, table: BlockTable, start: int, end: int) -> np.ndarray:
        """The int32 slots of tokens `start` to `end` (exclusive)."""
        assert 0 <= start <= end <= table.num_tokens, (start, end, table.num_tokens)
        positions = np.arange(start, end, dtype=np.int32)
        pages = np.asarray(table.pages, dtype=np.int32)
        return pages[positions // self.page_size] * self.page_size + positions % self.page_size

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _take(self, num_pages: int) -> list[int]:
        if num_pages > len(self._free):
            raise MemoryPlanError(
                f"{num_pages} free pages of {self.page_size} tokens are needed and {len(self._free)} of "
                f"{len(self._ref_counts)} are left; free a sequence first or give the cache more memory."
            )
        pages = [self._free.popleft() for _ in range(num_pages)]
        for page in pages:
            self._ref_counts[page] = 1
        return pages
