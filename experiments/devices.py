"""Devices of a run: the mesh that the text of `--mesh` describes, and a function that places trees on it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from flowgrpo.learner.sharding import make_mesh, parse_mesh, state_shardings
from flowgrpo.spread import data_mesh, divides, place, share


def mesh_of(text: str | None) -> Mesh | None:
    """All devices side by side, or as `data=2,fsdp=4` says; `none` leaves everything where it is."""
    if text == "none":
        return None
    return data_mesh() if text is None else make_mesh(parse_mesh(text, jax.device_count()))


def placing(mesh: Mesh | None, axes: Any) -> Callable[[Any], Any]:
    """`place(tree)` for whatever holds parameters with these axis letters: each array where the mesh has it."""
    return partial(_place, mesh=mesh, axes=axes)


def _place(tree: Any, *, mesh: Mesh | None, axes: Any) -> Any:
    return place(tree, state_shardings(tree, mesh, axes)) if mesh is not None and divides(mesh) else share(tree, mesh)
