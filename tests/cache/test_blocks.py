import sys
from collections import Counter
from subprocess import run

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from jaxinfer.cache.blocks import BlockManager, PageCopy
from jaxinfer.errors import MemoryPlanError


def test_allocate_append_and_free_count_pages():
    blocks = BlockManager(4, 2)
    table = blocks.allocate(3)
    assert (len(table.pages), blocks.num_free_pages) == (2, 2)
    assert blocks.append(table, 1) == [] and len(table.pages) == 2
    assert blocks.append(table, 1) == [] and len(table.pages) == 3
    assert blocks.can_allocate(2) and not blocks.can_allocate(3)
    blocks.free(table)
    assert (blocks.num_free_pages, table.pages, table.num_tokens) == (4, [], 0)


def test_running_out_changes_nothing_and_says_what_is_left():
    blocks = BlockManager(3, 2)
    table = blocks.allocate(3)
    with pytest.raises(MemoryPlanError, match="2 free pages of 2 tokens are needed and 1 of 3 are left"):
        blocks.append(table, 4)
    with pytest.raises(MemoryPlanError):
        blocks.allocate(3)
    assert (len(table.pages), table.num_tokens, blocks.num_free_pages) == (2, 3, 1)


def test_running_out_on_copy_changes_nothing():
    blocks = BlockManager(1, 2)
    table = blocks.allocate(1)
    twin = blocks.fork(table)
    with pytest.raises(MemoryPlanError):
        blocks.append(twin, 1)
    assert twin.pages == table.pages and twin.num_tokens == 1


def test_append_after_fork_copies_partial_page_once():
    blocks = BlockManager(8, 4)
    table = blocks.allocate(6)
    twin = blocks.fork(table)
    shared = table.pages[1]
    assert blocks.append(twin, 0) == []
    assert blocks.append(twin, 1) == [PageCopy(src=shared, dst=twin.pages[1])]
    assert twin.pages[0] == table.pages[0] and twin.pages[1] != shared
    assert blocks.append(table, 1) == [] and table.pages[1] == shared


def test_append_after_fork_of_full_pages_copies_nothing():
    blocks = BlockManager(8, 4)
    table = blocks.allocate(8)
    twin = blocks.fork(table)
    assert blocks.append(twin, 1) == [] and twin.pages[:2] == table.pages


def test_tail_pages_are_reused_first():
    blocks = BlockManager(4, 1)
    table = blocks.allocate(4)
    pages = table.pages
    blocks.free(table)
    assert blocks.allocate(4).pages == pages[::-1]


def test_slots_are_page_times_size_plus_offset():
    blocks = BlockManager(4, 4)
    blocks.allocate(4)
    table = blocks.allocate(6)
    slots = blocks.slot_mapping(table, 2, 6)
    assert slots.dtype == np.int32 and slots.tolist() == [6, 7, 8, 9]
    assert blocks.slot_mapping(table, 6, 6).tolist() == []


def test_never_imports_jax():
    code = (
        "import sys, jaxinfer.cache.blocks, jaxinfer.engine.stop, jaxinfer.sampling_params; print('jax' in sys.modules)"
    )
    assert run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


NUM_PAGES, PAGE_SIZE = 12, 3


class Pool(RuleBasedStateMachine):
    """Drives a manager beside a model of the device: what each slot holds, written and copied as told."""

    tables = Bundle("tables")

    @initialize()
    def start(self):
        self.blocks = BlockManager(NUM_PAGES, PAGE_SIZE)
        self.contents = {}  # table -> its tokens, every one distinct unless forked
        self.device = np.full((NUM_PAGES, PAGE_SIZE), -1)
        self.clock = 0

    def write(self, table, start):
        tokens = list(range(self.clock, self.clock + table.num_tokens - start))
        self.clock += len(tokens)
        self.device.reshape(-1)[self.blocks.slot_mapping(table, start, table.num_tokens)] = tokens
        return tokens

    @rule(target=tables, num_tokens=st.integers(0, 20))
    def allocate(self, num_tokens):
        fits, before = self.blocks.can_allocate(num_tokens), self.blocks.num_free_pages
        try:
            table = self.blocks.allocate(num_tokens)
        except MemoryPlanError:
            assert not fits and self.blocks.num_free_pages == before
            return multiple()
        assert fits
        self.contents[table] = self.write(table, 0)
        return table

    @rule(table=tables, num_tokens=st.integers(0, 5))
    def append(self, table, num_tokens):
        before = table.num_tokens, list(table.pages), self.blocks.num_free_pages
        try:
            copies = self.blocks.append(table, num_tokens)
        except MemoryPlanError:
            assert before == (table.num_tokens, table.pages, self.blocks.num_free_pages)
            return
        for src, dst in copies:
            self.device[dst] = self.device[src]
        self.contents[table] = self.contents[table] + self.write(table, before[0])

    @rule(target=tables, table=tables)
    def fork(self, table):
        twin = self.blocks.fork(table)
        self.contents[twin] = list(self.contents[table])
        return twin

    @rule(table=consumes(tables))
    def free(self, table):
        self.blocks.free(table)
        del self.contents[table]

    @invariant()
    def every_page_is_free_or_owned(self):
        owners = Counter(page for table in self.contents for page in table.pages)
        assert self.blocks.num_free_pages + len(owners) == NUM_PAGES
        assert self.blocks._ref_counts == [owners[page] for page in range(NUM_PAGES)]
        assert not owners.keys() & set(self.blocks._free)

    @invariant()
    def every_sequence_reads_its_own_tokens(self):
        for table, tokens in self.contents.items():
            slots = self.blocks.slot_mapping(table, 0, table.num_tokens)
            assert len(set(slots.tolist())) == table.num_tokens
            assert self.device.reshape(-1)[slots].tolist() == tokens
            assert len(table.pages) == -(-table.num_tokens // PAGE_SIZE)


TestPool = Pool.TestCase
