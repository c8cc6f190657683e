"""Function that the tests call in the sandbox; imported there, without JAX."""


def run(program, *arguments):
    """Carry out statements that know `arguments`; return what they leave as `value`."""
    scope = {"arguments": arguments}
    exec(program, scope)
    return scope["value"]
