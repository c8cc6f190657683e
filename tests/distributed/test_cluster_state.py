"""The replay buffer: a group is taken once, with its oldest version; nothing is changed in place. Old checkpoints."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgrpo.distributed import cluster_state
from flowgrpo.types import BadInput


def test_a_resumed_group_keeps_its_oldest_version():
    buffer = cluster_state.add_to_buffer(cluster_state.EMPTY_BUFFER, 7, "half", version=3)
    buffer = cluster_state.add_to_buffer(buffer, 7, "whole", version=5)
    assert buffer[7] == cluster_state.BufferedGroup("whole", 3)
    assert cluster_state.EMPTY_BUFFER == {}


@given(st.dictionaries(st.integers(0, 50), st.integers(0, 9), min_size=1), st.data())
def test_taken_groups_are_gone_and_the_others_remain(versions, data):
    full = cluster_state.EMPTY_BUFFER
    for number, version in versions.items():
        full = cluster_state.add_to_buffer(full, number, f"group {number}", version=version)
    numbers = data.draw(st.lists(st.sampled_from(sorted(versions)), unique=True))
    taken, remaining = cluster_state.take_groups(full, numbers)
    assert taken == [cluster_state.BufferedGroup(f"group {number}", versions[number]) for number in numbers]
    assert remaining == {number: group for number, group in full.items() if number not in numbers}
    assert cluster_state.drop_groups(full, numbers) == remaining == cluster_state.drop_groups(remaining, numbers)
    assert set(full) == set(versions)
    if numbers:
        with pytest.raises(BadInput, match=f"does not hold group {numbers[0]}"):
            cluster_state.take_groups(remaining, numbers)


def test_S1_a_state_is_restored_from_json_of_this_version_and_of_earlier_ones():
    group = cluster_state.Group(2, "held")
    state = cluster_state.ClusterState(version=3, num_started=8, next_ticket=5, groups={7: group}, counts={"held": 1})
    value = cluster_state.to_json(state)
    assert cluster_state.from_json(value) == state
    value["begun"], value["tickets"] = value.pop("num_started"), value.pop("next_ticket")
    value["groups"]["7"]["began"] = value["groups"]["7"].pop("start_version")
    assert cluster_state.from_json(value) == state
