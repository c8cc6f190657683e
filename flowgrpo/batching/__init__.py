"""Trajectories on their way to an update: checked, laid out, packed into rows.

Modules:

    collate      Check ragged records, and pad them to one `Trajectories` (`collate`)
    layouts      Lay dense trajectories out plainly, in programs that compile: one row per trajectory or per turn
    packing      Pack ragged or dense trajectories into fixed rows: `pack` makes a `Batch`, `account` its ledger
    prefix_tree  Pack them into trees, in which what contexts begin with alike stands once (`pack_tree`)
"""

from flowgrpo.batching.collate import collate
from flowgrpo.batching.layouts import place, rows_by_trajectory, rows_by_turn, unpack
from flowgrpo.batching.packing import account, fill_rate, pack
from flowgrpo.batching.prefix_tree import count_tokens, make_packer, pack_tree
