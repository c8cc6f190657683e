"""Count what JAX compiles, program by program."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def counted_compilations() -> Iterator[Counter[str]]:
    """Count how often each program is compiled in the block, by its name, such as `jit(play)`."""
    found: Counter[str] = Counter()

    def note(event: str, _seconds: float, fun_name: str = "", **_) -> None:
        found.update([fun_name] if event == "/jax/core/compile/backend_compile_duration" else [])

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
