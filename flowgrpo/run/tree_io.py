"""Trees as flat leaves that files can hold, and back again, bit for bit.

    take_leaves(tree) -> [Leaf];  give_leaves(leaves, template) -> tree

Leaves are arrays of JAX and NumPy, typed keys, Python's bool, int, float, str and bytes, None, and empty containers.
If the template has `...`, what is stored there comes back whatever its structure, as dicts, lists and leaves: for
ragged parts of a run, such as unfinished trajectories.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey, keystr

from flowgrpo.types import BadInput

Path = tuple[tuple[str, str | int], ...]
PLAIN = (bool, int, float, str)  # what JSON holds as it is
EMPTY = {"list": list, "dict": dict, "tuple": tuple}
ZEROS = {"f": 0.0, "i": 0, "c": 0j}  # Python's, which are weakly typed


class Leaf(NamedTuple):
    """One leaf: an array on the host, or a value that JSON can hold."""

    path: Path
    kind: str  # jax, weak, key:IMPLEMENTATION, numpy, scalar, bool, int, float, str, bytes, none, list, dict, tuple
    value: Any

    @property
    def name(self) -> str:
        """Its place in the tree, for people: `params/embed`."""
        return "/".join(str(key) for _, key in self.path) or "the tree"


# Out of a tree ----------------------------------------------------------------------------------------


def take_leaves(tree: Any, *, copy: bool = False) -> list[Leaf]:
    """The leaves of a tree, on the host; with `copy` none that changes later, which arrays of JAX never do.

    One that is donated while such a leaf is read keeps its memory, and the program takes other.
    """
    return [_take(Leaf(_encode(path), "", leaf), copy) for path, leaf in _flatten(tree)]


def _flatten(tree: Any) -> list[tuple]:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=_ends)[0]


def _ends(node: Any) -> bool:
    """None and empty containers are leaves here, so that they aren't lost."""
    return node is None or (type(node) in EMPTY.values() and not node)


def _encode(path: tuple) -> Path:
    """A path of JAX's as pairs of a letter and a key, which JSON can hold."""
    found = []
    for entry in path:
        match entry:
            case DictKey(key=str() | int() as key):
                found.append(("dict", key))
            case SequenceKey(idx=key):
                found.append(("sequence", key))
            case GetAttrKey(name=key):
                found.append(("field", key))
            case FlattenedIndexKey(key=key):
                found.append(("child", key))
            case _:
                raise BadInput(f"{keystr(path)}: keys of what is saved must be strings or whole numbers")
    return tuple(found)


def _take(leaf: Leaf, copy: bool) -> Leaf:
    """The leaf with its kind, and its value on the host."""
    value = leaf.value
    if value is None:
        return leaf._replace(kind="none")
    if type(value) in PLAIN or _ends(value):
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
    changes = isinstance(value, np.ndarray) and value.flags.writeable
    array = np.array(value) if copy and changes else np.asarray(value)
    if array.dtype.kind in "OSUmM" or array.dtype.fields is not None:
        raise BadInput(f"{leaf.name}: an array of {array.dtype} can't be saved; arrays of numbers can")
    return leaf._replace(kind=kind, value=array)


# Into a tree ------------------------------------------------------------------------------------------


def give_leaves(leaves: Sequence[Leaf], template: Any) -> Any:
    """A tree like `template`, of these leaves; `BadInput` names the first one that doesn't fit."""
    stored = {leaf.path: leaf for leaf in leaves}
    structure = jax.tree_util.tree_structure(template, is_leaf=_ends)
    values = [_claim(stored, _encode(path), like) for path, like in _flatten(template)]
    if stored:
        raise BadInput(f"it holds {next(iter(stored.values())).name}, for which there is no place in this run")
    return jax.tree_util.tree_unflatten(structure, values)


def _claim(stored: dict[Path, Leaf], path: Path, like: Any) -> Any:
    """The value for one leaf of the template, taken out of what is stored."""
    if like is ...:
        return _anything({found: stored.pop(found) for found in list(stored) if found[: len(path)] == path}, len(path))
    if path not in stored:
        raise BadInput(f"it lacks {Leaf(path, '', None).name}, which this run has")
    leaf = stored.pop(path)
    there, here = _describe(leaf), _describe(_take_abstract(Leaf(path, "", like)))
    if there != here:
        raise BadInput(f"{leaf.name} is {there} there, and {here} in this run")
    value = _value(leaf)
    if isinstance(like, np.ndarray):
        return np.asarray(value)
    if isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        placed = getattr(like, "committed", True) and like.sharding is not None
        return jax.device_put(value, like.sharding if placed else None)
    return value


def _take_abstract(leaf: Leaf) -> Leaf:
    """Add the kind to a template's leaf like `_take`; an array is `jax`, by shape and dtype: values don't matter."""
    like = leaf.value
    if isinstance(like, jax.Array | jax.ShapeDtypeStruct | np.ndarray):
        return leaf._replace(kind="jax", value=jax.ShapeDtypeStruct(like.shape, like.dtype))
    return _take(leaf, copy=False)


def _describe(leaf: Leaf) -> str:
    """Describe in a text what a leaf must share with the template's: dtype and shape, or the type."""
    if leaf.kind.startswith("key:"):
        key = jax.eval_shape(lambda: jax.random.key(0, impl=leaf.kind[4:]))
        axes = jax.eval_shape(jax.random.key_data, key).ndim  # of one key's data
        return f"{key.dtype}[{','.join(map(str, leaf.value.shape[:-axes]))}]"
    if leaf.kind in ("jax", "weak", "numpy"):
        return f"{leaf.value.dtype}[{','.join(map(str, leaf.value.shape))}]"
    return str(leaf.value.dtype) if leaf.kind == "scalar" else {"none": "None"}.get(leaf.kind, leaf.kind)


def _value(leaf: Leaf) -> Any:
    """Rebuild the leaf's original value, on the default device where it was JAX's."""
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


def _anything(stored: Mapping[Path, Leaf], depth: int) -> Any:
    """Dicts and lists of what is stored below a place."""
    if not stored:
        return {}
    first = next(iter(stored))
    if len(first) == depth:
        return _value(stored[first])
    kind = first[depth][0]
    children: dict[str | int, dict[Path, Leaf]] = {}
    for path, leaf in stored.items():
        children.setdefault(path[depth][1], {})[path] = leaf
    built = {key: _anything(inner, depth + 1) for key, inner in children.items()}
    return list(built.values()) if kind == "sequence" else built
