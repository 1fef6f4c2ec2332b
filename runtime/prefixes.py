"""Which worker has the beginning of a prompt, as far as a router can know: what it has sent where.

A prompt is cut into KV blocks; a block's name depends on all blocks before it, so two prompts share a name
exactly where they agree from the start. A worker's blocks leave in the order of their last use once they
exceed its KV cache, a prompt's end before its beginning; that running requests need room too, and what the
engine really dropped, the router does not hear.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from planner.domain import KV_BLOCK_TOKENS

CHARACTERS_PER_TOKEN = 4  # of prompts in words, for routing alone
Blocks = Sequence[int]


class Sent:
    """Blocks of the prompts that one worker of `kv_tokens` was sent."""

    def __init__(self, kv_tokens: int) -> None:
        self.room = kv_tokens // KV_BLOCK_TOKENS
        self.blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.blocks)

    def tokens(self, blocks: Blocks) -> int:
        """How many tokens of the prompt it has, from the first on."""
        shared = next((k for k, block in enumerate(blocks) if block not in self.blocks), len(blocks))
        return shared * KV_BLOCK_TOKENS

    def add(self, blocks: Blocks) -> None:
        for block in reversed(blocks):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > self.room:
            self.blocks.popitem(last=False)


def blocks_of(prompt: object) -> list[int]:
    """Names of the whole blocks that a cache may spare the prompt: all but its last token. A prompt in words
    is cut by characters; none for anything else, as the messages of a chat."""
    if isinstance(prompt, str):
        step = KV_BLOCK_TOKENS * CHARACTERS_PER_TOKEN
    elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
        step = KV_BLOCK_TOKENS
    else:
        return []
    names, name = [], 0
    for end in range(step, len(prompt), step):
        piece = prompt[end - step : end]
        name = hash((name, piece if isinstance(piece, str) else tuple(piece)))
        names.append(name)
    return names
