"""Values that ranks exchange through shared memory."""
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megacompile.runtime.letters import MOST_BYTES, RANK_BYTES, Mailbox


@settings(max_examples=30)
@given(st.integers(1, 4), st.lists(st.binary(max_size=40), min_size=1, max_size=20))
def test_every_rank_reads_what_all_ranks_have_put(ranks: int, values: list[bytes]) -> None:
    memory = torch.zeros(ranks * RANK_BYTES, dtype=torch.uint8)

    def run(rank: int) -> list[list[bytes]]:
        box, found = Mailbox(memory, rank), []
        for value in values:
            box.put(value + bytes([rank]))
            while (letters := box.all()) is None:
                pass
            found.append([told for _, told in letters])
        return found

    with ThreadPoolExecutor(ranks) as threads:
        for found in threads.map(run, range(ranks)):
            assert found == [[value + bytes([rank]) for rank in range(ranks)] for value in values]


def test_a_round_is_complete_once_the_last_rank_has_begun_it() -> None:
    memory = torch.zeros(2 * RANK_BYTES, dtype=torch.uint8)
    one, other = (Mailbox(memory, rank) for rank in range(2))
    one.put(b"first")
    assert one.all() is None and one.get(1) is None
    other.put(b"second")
    assert one.all() == other.all() == [(5, b"first"), (6, b"second")]
    one.put(b"third")
    assert one.all() is None
    assert other.all() == [(5, b"first"), (6, b"second")], "the other rank can still read its round"


def test_of_a_value_that_is_too_long_only_the_size_is_told() -> None:
    box = Mailbox(torch.zeros(RANK_BYTES, dtype=torch.uint8), 0)
    box.put(bytes(MOST_BYTES))
    assert box.all() == [(MOST_BYTES, bytes(MOST_BYTES))]
    box.put(bytes(MOST_BYTES + 1))
    assert box.all() == [(MOST_BYTES + 1, b"")]


def test_a_letter_that_is_being_written_is_not_read() -> None:
    """Some processors show the writes of another one in another order."""
    memory = torch.zeros(2 * RANK_BYTES, dtype=torch.uint8)
    one, other = (Mailbox(memory, rank) for rank in range(2))
    one.put(b"value")
    other.put(b"")
    memory[RANK_BYTES // 2 + 20] ^= 1  # in the letter of the first, odd round
    assert other.all() is None
