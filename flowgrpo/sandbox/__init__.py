"""Runs what nobody trusts: programs that a model wrote, and trusted functions over hostile input.

with Sandbox(workers=2) as sandbox:
    ran = sandbox.run("print(input())", stdin="hello")          # Ran("exited", 0, "hello\\n", "", 0.01)
"""

from flowgrpo.sandbox.limits import CallFailed, Isolation, Limits, Ran, SandboxFailure
from flowgrpo.sandbox.pool import Sandbox

__all__ = ["CallFailed", "Isolation", "Limits", "Ran", "Sandbox", "SandboxFailure"]
