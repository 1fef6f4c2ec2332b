"""Names of the KV blocks of a prompt, and a small number for each name in use, to index arrays with."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from planner.domain import KV_BLOCK_TOKENS

CHARACTERS_PER_TOKEN = 4  # A guess for prompts in words; only routing uses it.
MEDIUM_TOKENS = 1024  # A guess for an image or another part of a message that is not text.


def blocks_of(prompt: object) -> list[int]:
    """Names of the whole KV blocks of a prompt.

    A block's name depends on all blocks before it, so two prompts share a name exactly where they agree from
    the start. Text, of a prompt or of a chat's messages, is cut by characters. Any other prompt has no
    blocks.
    """
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        block_length = KV_BLOCK_TOKENS
    else:
        prompt, block_length = prompt_text(prompt), KV_BLOCK_TOKENS * CHARACTERS_PER_TOKEN
    names, name = [], 0
    for end in range(block_length, len(prompt) + 1, block_length):
        piece = prompt[end - block_length : end]
        # Python hashes text differently in each process, so names are compared within one router only.
        name = hash((name, piece if isinstance(piece, str) else tuple(piece)))
        names.append(name)
    return names


def prompt_text(prompt: object) -> str:
    """The text of a prompt, or of a chat's messages one after the other; empty for token ids."""
    if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
        return "\n".join(
            f"{message.get('role')}: {_content_text(message.get('content'))}" for message in prompt
        )
    return prompt if isinstance(prompt, str) else ""


def _content_text(content: object) -> str:
    """The text of a message, or of its parts one after the other.

    In place of a part that is not text, such as an image of a megabyte, there is a hash of it, made as long
    as MEDIUM_TOKENS tokens of text.
    """
    if not isinstance(content, list):
        return str(content)
    texts = (part.get("text") if isinstance(part, dict) else None for part in content)
    return "\n".join(
        text if isinstance(text, str) else str(hash(str(part))).ljust(MEDIUM_TOKENS * CHARACTERS_PER_TOKEN)
        for part, text in zip(content, texts, strict=True)
    )


class BlockNumbers:
    """A number below `size` for each block name in use. `drop` makes numbers free for other names."""

    def __init__(self, size: int) -> None:
        self.of_name: dict[int, int] = {}
        self.names = [0] * size  # By number: the name that has it now, or had it last.
        self.free = list(range(size - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.names)

    def give(self, names: Sequence[int]) -> npt.NDArray[np.int32]:
        """The numbers of `names`; new names get free numbers, of which there must be enough."""
        numbers = np.empty(len(names), np.int32)
        for k, name in enumerate(names):
            number = self.of_name.get(name)
            if number is None:
                number = self.of_name[name] = self.free.pop()
                self.names[number] = name
            numbers[k] = number
        return numbers

    def drop(self, numbers: Sequence[int]) -> None:
        """Free these numbers, and forget the names that have them."""
        for number in numbers:
            del self.of_name[self.names[number]]
        self.free.extend(numbers)

    def grow(self, size: int) -> None:
        """Have numbers below `size`, which is larger than before."""
        self.free.extend(range(size - 1, len(self.names) - 1, -1))
        self.names.extend([0] * (size - len(self.names)))
