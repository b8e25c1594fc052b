"""Memory that operations use again."""

from __future__ import annotations

import torch

from csbp.comm.buffers import Buffers

CPU = torch.device("cpu")


def operation(buffers: Buffers, *sizes: int) -> list[torch.Tensor]:
    buffers.begin(CPU)
    return [buffers.take((size, 3), torch.float64) for size in sizes]


def test_the_same_memory_once_it_is_known_how_much_is_needed() -> None:
    buffers = Buffers()
    operation(buffers, 5, 0, 7)
    first = operation(buffers, 5, 0, 7)
    again = operation(buffers, 4, 8)
    assert [x.data_ptr() for x in again] == [first[0].data_ptr(), first[2].data_ptr()]
    assert all(x.data_ptr() % 8 == 0 and x.is_contiguous() for x in first + again)


def test_parts_do_not_overlap_and_growth_is_for_the_next_operation() -> None:
    buffers = Buffers()
    for sizes in ([3, 90], [100, 2, 1], [100, 2, 1], [1, 300, 5], [2, 300, 5]):
        parts = operation(buffers, *sizes)
        for number, part in enumerate(parts):
            part.fill_(number)
        assert [part.unique().tolist() for part in parts] == [[float(n)] for n in range(len(sizes))]
        assert [tuple(part.shape) for part in parts] == [(size, 3) for size in sizes]
    storages = {part.untyped_storage().data_ptr() for part in parts}
    assert len(storages) == 1, "all of it lies in one piece"


def test_without_reuse_every_operation_has_memory_of_its_own() -> None:
    buffers = Buffers(reuse=False)
    first, second = operation(buffers, 5, 5), operation(buffers, 5, 5)
    assert len({x.untyped_storage().data_ptr() for x in first + second}) == 4
