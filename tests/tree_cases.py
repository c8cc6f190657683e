"""Rows that share prefixes, built by a trie of dicts: the oracle of everything that makes or reads a `PrefixTree`."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flowgrpo.types import PrefixTree


class Context(NamedTuple):
    """Tokens of one context, and the positions of those that are scored (never 0: its token has no predecessor)."""

    tokens: tuple[int, ...]
    scored: tuple[int, ...]


class Entry(NamedTuple):
    """A token to score: the index of its context among all, and its position in it."""

    context: int
    position: int


class Trees(NamedTuple):
    """Trees of rows, and the rows' own tokens [r s]."""

    tree: PrefixTree
    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    entries: list[list[Entry]]  # of each row, by slot


def build_trees(rows: Sequence[Sequence[Context]], nodes: int, slots: int) -> Trees:
    """Each row's contexts as one tree, padded to `nodes` nodes and `slots` slots."""
    tokens_ru, positions_ru, ends_ru = (np.zeros((len(rows), nodes), np.int32) for _ in range(3))
    after_rs, tokens_rs, positions_rs, segments_rs = (np.zeros((len(rows), slots), np.int32) for _ in range(4))
    entries: list[list[Entry]] = [[] for _ in rows]
    first = 0
    for r, contexts in enumerate(rows):
        root: dict = {}
        for context in contexts:
            node = root
            for token in context.tokens:
                node = node.setdefault(token, {})
        index: dict[int, int] = {}  # of a node, by its identity

        def number_nodes(node: dict, depth: int, r: int = r, index: dict = index) -> None:
            for token, child in node.items():
                at = index[id(child)] = len(index)
                tokens_ru[r, at], positions_ru[r, at] = token, depth
                number_nodes(child, depth + 1)
                ends_ru[r, at] = len(index)

        number_nodes(root, 0)
        slot = 0
        for number, context in enumerate(contexts):
            node, path = root, []
            for token in context.tokens:
                node = node[token]
                path.append(index[id(node)])
            for position in context.scored:
                after_rs[r, slot], tokens_rs[r, slot] = path[position - 1], context.tokens[position]
                positions_rs[r, slot], segments_rs[r, slot] = position, number + 1
                entries[r].append(Entry(first + number, position))
                slot += 1
        first += len(contexts)
    return Trees(PrefixTree(tokens_ru, positions_ru, ends_ru, after_rs), tokens_rs, positions_rs, segments_rs, entries)


def plain_rows(contexts: Sequence[Context], slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Each context on a row of its own: tokens and segments [r s]."""
    tokens_rs, segments_rs = (np.zeros((len(contexts), slots), np.int32) for _ in range(2))
    for row, real, context in zip(tokens_rs, segments_rs, contexts, strict=True):
        row[: len(context.tokens)], real[: len(context.tokens)] = context.tokens, 1
    return tokens_rs, segments_rs
