"""Compile programs before they are called, for example in a thread, or compile them faster.

    trajectories = compile_ahead(roll_out, params, tasks)   shapes and shardings of its results
    compile_ahead(score, params, trajectories)              so that the next program can be compiled too
    draw = jit_quickly(draw_tasks)                          for programs that compute little

A call uses the compiled program if its arguments have the same shapes and are on the same devices.
"""

from collections.abc import Callable
from typing import Any

import jax


def compile_ahead(program: Any, *arguments: Any) -> Any:
    """Compile a jitted function for these arguments, or for their shapes -> shapes and shardings of its results."""

    def result(shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        committed = sharding if len(sharding.device_set) > 1 else None  # results on a single device are uncommitted
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=committed, weak_type=shape.weak_type)

    shapes = program.eval_shape(*arguments)  # the only source of weak types
    compiled = program.lower(*arguments).compile()
    return jax.tree.map(result, shapes, compiled.output_shardings)


def host_shapes(shapes: Any) -> Any:
    """The shapes of these results after `jax.device_get`, without shardings."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)


# Results of integer programs stay the same; in others the last bit may differ.
QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


def jit_quickly(function: Callable, *, out_shardings: Any = None) -> Any:
    """`jax.jit` for programs that compute little: on a CPU they compile in a quarter of the time, and run slower."""
    options = QUICK if jax.default_backend() == "cpu" else None
    return jax.jit(function, compiler_options=options, out_shardings=out_shardings)
