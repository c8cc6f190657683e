"""Function that the tests call in the sandbox; imported there, without JAX."""


def run(program, *arguments):
    """Execute statements that may use `arguments` -> the `value` that they assign."""
    scope = {"arguments": arguments}
    exec(program, scope)
    return scope["value"]
