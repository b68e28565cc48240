"""CacheLayout: which physical blocks a sequence needs in each group of layers.

Layers with the same attention window form groups with equal numbers of layers. Every block of
tokens has one physical block in each group, all from one pool. Windowed groups free the blocks that
have left the window:

    tokens       0-15  16-31  32-47  48-63 ...
    group 0        7      3      9      4      full attention
    group 1        .      .      1      6      a window of 20 tokens: two blocks were freed
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

_MAX_TOKENS = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWindow:
    """What a token attends to: the last `window` tokens within its aligned `chunk`; 0: no limit."""

    window: int = 0
    chunk: int = 0

    def first_visible(self, position: int) -> int:
        """The first token that the tokens from `position` on attend to."""
        first = max(position - self.window + 1, 0) if self.window else 0
        return max(first, position // self.chunk * self.chunk) if self.chunk else first

    def within(self, max_tokens: int) -> AttentionWindow:
        """Drop limits that have no effect on sequences of at most `max_tokens` tokens."""
        return AttentionWindow(
            window=self.window if self.window < max_tokens else 0,
            chunk=self.chunk if self.chunk < max_tokens else 0,
        )

    @property
    def is_whole(self) -> bool:
        return not (self.window or self.chunk)

    @property
    def most(self) -> int:
        """The most tokens that one token attends to, itself included."""
        return min((limit for limit in (self.window, self.chunk) if limit), default=_MAX_TOKENS)


WHOLE = AttentionWindow()


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """The groups' `windows`; a step computes at most `step_tokens` tokens of a sequence."""

    block_size: int
    step_tokens: int
    windows: tuple[AttentionWindow, ...] = (WHOLE,)

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @property
    def is_whole(self) -> bool:
        """Whether all groups use full attention, so that a sequence needs its blocks to the end."""
        return all(window.is_whole for window in self.windows)

    def first_needed(self, group: int, position: int) -> int:
        """The first block that the tokens from `position` on attend to in this group."""
        return self.windows[group].first_visible(position) // self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """The most physical blocks that a sequence of `num_tokens` tokens holds at a time."""
        num = -(-num_tokens // self.block_size)
        return sum(min(num, self._most_blocks(window)) for window in self.windows)

    def _most_blocks(self, window: AttentionWindow) -> int:
        return -(-(window.most + self.step_tokens) // self.block_size) + 1

    def longest(self, num_blocks: int) -> int:
        """Length in tokens of the longest sequence that fits; 2**31 stands for unlimited."""
        size = self.block_size
        lengths = range(0, _MAX_TOKENS + 1, size)
        return (bisect_right(lengths, num_blocks, key=self.blocks_for) - 1) * size
