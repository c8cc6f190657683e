"""Wait less for programs: compile them before they are called, in a thread, say, or with less effort.

    played = compile_ahead(play, params, tasks)        the shapes of its results, which lie where they will
    compile_ahead(score, params, played)               so the next program can follow
    draw = jit_quickly(draw_tasks)                     for what computes little

A call finds what was compiled where its arguments have the same shapes and lie on the same devices.
"""

from collections.abc import Callable
from typing import Any

import jax


def compile_ahead(program: Any, *arguments: Any) -> Any:
    """Compile a jitted function for these arguments, or for their shapes -> the shapes of what it gives."""
    shapes = program.eval_shape(*arguments)  # which alone says whose types are weak
    compiled = program.lower(*arguments).compile()
    return jax.tree.map(_result, shapes, compiled.output_shardings)


def _result(shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    """The shape of a result and where it lies; one on the only device is not bound to it."""
    bound = sharding if len(sharding.device_set) > 1 else None
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=bound, weak_type=shape.weak_type)


def on_host(shapes: Any) -> Any:
    """The shapes of these results after `jax.device_get`."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)


# Of what computes with whole numbers the results are the same; the last bit of others may not be.
QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


def jit_quickly(function: Callable, **settings: Any) -> Any:
    """`jax.jit` of what computes little: on a CPU it is compiled in a quarter of the time, and runs slower."""
    options = QUICK if jax.default_backend() == "cpu" else None
    return jax.jit(function, compiler_options=options, **settings)
