"""From trajectories to the batch of an update: checked, laid out, packed into rows.

Modules:

    collate      Check ragged records, and pad them to one `Trajectories` (`collate`)
    layouts      Plain layouts of dense trajectories that compile: one row per trajectory, or per turn
    packing      Pack ragged or dense trajectories into fixed rows: `pack` makes a `Batch`, `account` its ledger
    prefix_tree  Pack trajectories into prefix trees, which hold shared prefixes once (`pack_tree`)
"""

from flowgrpo.batching.collate import collate
from flowgrpo.batching.layouts import place, rows_by_trajectory, rows_by_turn, unpack
from flowgrpo.batching.packing import account, fill_rate, pack
from flowgrpo.batching.prefix_tree import count_tokens, make_packer, pack_tree
