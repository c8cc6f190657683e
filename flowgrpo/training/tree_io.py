"""Trees as flat leaves that files can store, and back again, bit for bit.

    to_leaves(tree) -> [Leaf];  from_leaves(leaves, template) -> tree

Leaves are arrays of JAX and NumPy, typed keys, Python's bool, int, float, str and bytes, None, and empty containers.
A `...` in the template accepts any structure, and gives it as dicts, lists and leaves: for ragged parts of a run, such
as partial trajectories.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey, keystr

from flowgrpo.types import BadInput, PyTree

Path = tuple[tuple[str, str | int], ...]
PLAIN = (bool, int, float, str)  # stored in JSON as they are
EMPTY = {"list": list, "dict": dict, "tuple": tuple}
ZEROS = {"f": 0.0, "i": 0, "c": 0j}  # Python scalars, which are weakly typed


class Leaf(NamedTuple):
    """One leaf: an array on the host, or a value for JSON."""

    path: Path
    kind: str  # jax, weak, key:IMPLEMENTATION, numpy, scalar, bool, int, float, str, bytes, none, list, dict, tuple
    value: Any

    @property
    def name(self) -> str:
        """Its readable path: `params/embed`."""
        return "/".join(str(key) for _, key in self.path) or "the tree"


# Out of a tree ----------------------------------------------------------------------------------------


def to_leaves(tree: PyTree, *, copy: bool = False) -> list[Leaf]:
    """The leaves of a tree, on the host; with `copy`, copies of those that may change later.

    Arrays of JAX never change: one that is donated while its leaf is read keeps its memory, and the program takes
    other memory.
    """
    return [_to_host(Leaf(_encode(path), "", leaf), copy) for path, leaf in _flatten(tree)]


def _flatten(tree: PyTree) -> list[tuple]:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_leaf)[0]


def _is_leaf(node: Any) -> bool:
    """Whether a node is None or an empty container: these are leaves here, so that they aren't lost."""
    return node is None or (type(node) in EMPTY.values() and not node)


def _encode(path: tuple) -> Path:
    """A path of JAX as pairs of a kind and a key, for JSON."""
    pairs = []
    for entry in path:
        match entry:
            case DictKey(key=str() | int() as key):
                pairs.append(("dict", key))
            case SequenceKey(idx=key):
                pairs.append(("sequence", key))
            case GetAttrKey(name=key):
                pairs.append(("field", key))
            case FlattenedIndexKey(key=key):
                pairs.append(("child", key))
            case _:
                raise BadInput(f"{keystr(path)}: keys of what is saved must be strings or whole numbers")
    return tuple(pairs)


def _to_host(leaf: Leaf, copy: bool) -> Leaf:
    """The leaf with its kind, and its value on the host."""
    value = leaf.value
    if value is None:
        return leaf._replace(kind="none")
    if type(value) in PLAIN or _is_leaf(value):
        return leaf._replace(kind=type(value).__name__)
    if type(value) is bytes:
        return leaf._replace(kind="bytes", value=base64.b64encode(value).decode())
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        kind, value = f"key:{jax.random.key_impl(value)}", jax.random.key_data(value)
    elif isinstance(value, jax.Array):
        kind = "weak" if value.weak_type else "jax"
    elif isinstance(value, np.ndarray | np.generic):
        kind = "numpy" if isinstance(value, np.ndarray) else "scalar"
    else:
        raise BadInput(
            f"{leaf.name}: a {type(value).__name__} can't be saved; only arrays, numbers, text and bytes can"
        )
    may_change = isinstance(value, np.ndarray) and value.flags.writeable
    array = np.array(value) if copy and may_change else np.asarray(value)
    if array.dtype.kind in "OSUmM" or array.dtype.fields is not None:
        raise BadInput(f"{leaf.name}: an array of {array.dtype} can't be saved; arrays of numbers can")
    return leaf._replace(kind=kind, value=array)


# Into a tree ------------------------------------------------------------------------------------------


def from_leaves(leaves: Sequence[Leaf], template: PyTree) -> PyTree:
    """A tree like `template`, of these leaves; `BadInput` names the first leaf that doesn't fit."""
    stored = {leaf.path: leaf for leaf in leaves}
    structure = jax.tree_util.tree_structure(template, is_leaf=_is_leaf)
    values = [_pop(stored, _encode(path), like) for path, like in _flatten(template)]
    if stored:
        raise BadInput(f"it holds {next(iter(stored.values())).name}, for which there is no place in this run")
    return jax.tree_util.tree_unflatten(structure, values)


def _pop(stored: dict[Path, Leaf], path: Path, like: Any) -> Any:
    """Pop the value for one leaf of the template."""
    if like is ...:
        below = [other for other in stored if other[: len(path)] == path]
        return _to_containers({other: stored.pop(other) for other in below}, len(path))
    if path not in stored:
        raise BadInput(f"it lacks {Leaf(path, '', None).name}, which this run has")
    leaf = stored.pop(path)
    saved, expected = _describe(leaf), _describe(_to_abstract(Leaf(path, "", like)))
    if saved != expected:
        raise BadInput(f"{leaf.name} is {saved} there, and {expected} in this run")
    value = _value(leaf)
    if isinstance(like, np.ndarray):
        return np.asarray(value)
    if isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        placed = getattr(like, "committed", True) and like.sharding is not None
        return jax.device_put(value, like.sharding if placed else None)
    return value


def _to_abstract(leaf: Leaf) -> Leaf:
    """A leaf of a template with its kind; an array is `jax`, with shape and dtype alone."""
    like = leaf.value
    if isinstance(like, jax.Array | jax.ShapeDtypeStruct | np.ndarray):
        return leaf._replace(kind="jax", value=jax.ShapeDtypeStruct(like.shape, like.dtype))
    return _to_host(leaf, copy=False)


def _describe(leaf: Leaf) -> str:
    """What a leaf must have in common with the template: dtype and shape, or the type."""
    if leaf.kind.startswith("key:"):
        key = jax.eval_shape(lambda: jax.random.key(0, impl=leaf.kind[4:]))
        axes = jax.eval_shape(jax.random.key_data, key).ndim  # of one key's data
        return f"{key.dtype}[{','.join(map(str, leaf.value.shape[:-axes]))}]"
    if leaf.kind in ("jax", "weak", "numpy"):
        return f"{leaf.value.dtype}[{','.join(map(str, leaf.value.shape))}]"
    return str(leaf.value.dtype) if leaf.kind == "scalar" else {"none": "None"}.get(leaf.kind, leaf.kind)


def _value(leaf: Leaf) -> Any:
    """The original value of a leaf; an array of JAX on the default device."""
    value = leaf.value
    if leaf.kind == "weak" and (zero := jnp.asarray(ZEROS[value.dtype.kind])).dtype == value.dtype:
        return jnp.broadcast_to(zero, value.shape).at[...].set(value)
    if leaf.kind in ("jax", "weak"):
        return jax.device_put(value)
    if leaf.kind.startswith("key:"):
        return jax.random.wrap_key_data(jax.device_put(value), impl=leaf.kind[4:])
    if leaf.kind == "scalar":
        return value[()]
    if leaf.kind in EMPTY:
        return EMPTY[leaf.kind]()
    return base64.b64decode(value) if leaf.kind == "bytes" else value


def _to_containers(stored: Mapping[Path, Leaf], depth: int) -> PyTree:
    """Dicts and lists of the leaves below a place."""
    if not stored:
        return {}
    first = next(iter(stored))
    if len(first) == depth:
        return _value(stored[first])
    kind = first[depth][0]
    children: dict[str | int, dict[Path, Leaf]] = {}
    for path, leaf in stored.items():
        children.setdefault(path[depth][1], {})[path] = leaf
    built = {key: _to_containers(inner, depth + 1) for key, inner in children.items()}
    return list(built.values()) if kind == "sequence" else built
