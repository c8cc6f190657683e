"""The error of unusable input, for all modules."""


class BadInput(ValueError):
    """Unusable input; the message is one sentence that names the value and the fix."""
