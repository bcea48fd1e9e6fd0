"""Which KV blocks are free and how many owners each has. Plain Python; knows nothing of tensors."""

from bisect import insort


class BlockPool:
    """Reference-counted blocks `0 .. num_blocks - 1`.

    Rows take the lowest free blocks and prompts the highest, so that where a row needs one block only the
    rows' blocks tend to be 0, 1, 2, ...: the contiguous cache, which attention reads without a gather.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks))
        self.num_owners = [0] * num_blocks

    def allocate(self, count: int, highest: bool = False) -> list[int]:
        """Takes `count` free blocks; the caller has seen to it that there are as many."""
        assert count <= len(self.free), f"{count=} {len(self.free)=}"
        if highest:
            taken = self.free[len(self.free) - count :]
            del self.free[len(self.free) - count :]
        else:
            taken = self.free[:count]
            del self.free[:count]
        for block in taken:
            self.num_owners[block] = 1
        return taken

    def take(self, block: int) -> None:
        """Takes one given free block."""
        self.free.remove(block)
        self.num_owners[block] = 1

    def share(self, blocks: list[int]) -> list[int]:
        """Adds an owner to each block and returns them."""
        for block in blocks:
            self.num_owners[block] += 1
        return list(blocks)

    def release(self, blocks: list[int]) -> None:
        """Takes an owner from each block and empties the list; a block without owners is free."""
        for block in blocks:
            self.num_owners[block] -= 1
            if self.num_owners[block] == 0:
                insort(self.free, block)
        blocks.clear()
