"""The replay buffer: what is added is taken once, with the oldest version that spoke; nothing is changed in place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgrpo.distributed import cluster_state
from flowgrpo.types import BadInput


def test_a_group_keeps_its_oldest_version_when_it_goes_on():
    kept = cluster_state.add(cluster_state.EMPTY, 7, "half", version=3)
    kept = cluster_state.add(kept, 7, "whole", version=5)
    assert kept[7] == cluster_state.BufferedGroup("whole", 3)
    assert cluster_state.EMPTY == {}


@given(st.dictionaries(st.integers(0, 50), st.integers(0, 9), min_size=1), st.data())
def test_what_is_taken_is_gone_and_the_rest_is_there(versions, data):
    full = cluster_state.EMPTY
    for number, version in versions.items():
        full = cluster_state.add(full, number, f"group {number}", version=version)
    asked = data.draw(st.lists(st.sampled_from(sorted(versions)), unique=True))
    taken, rest = cluster_state.take_groups(full, asked)
    assert taken == [cluster_state.BufferedGroup(f"group {number}", versions[number]) for number in asked]
    assert rest == {number: kept for number, kept in full.items() if number not in asked}
    assert cluster_state.drop(full, asked) == rest == cluster_state.drop(rest, asked)
    assert set(full) == set(versions)
    if asked:
        with pytest.raises(BadInput, match=f"does not hold group {asked[0]}"):
            cluster_state.take_groups(rest, asked)
