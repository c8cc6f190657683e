"""The error of everybody who is given something that can't be used."""


class BadInput(ValueError):
    """Error for input that can't be used; the message is one sentence that names the place and the fix."""
