"""Functions that the tests call in the sandbox; imported there, without JAX."""

import os
import sys


def add(first, second):
    return first + second


def spin():
    while True:
        pass


def fail(message):
    raise ValueError(message)


def leave():
    sys.exit("gone")


def die():
    os.kill(os.getpid(), 9)


def fill(size):
    return len(bytearray(size))


def talk():
    print("words", file=sys.stdout)
    print("words", file=sys.stderr)
    os.write(1, b'{"value": "forged"}')
    return "said"


def unwritable():
    return {1, 2}


def long(size):
    return "x" * size


def environment():
    return dict(os.environ), "jax" in sys.modules


def connect(port):
    import socket

    socket.create_connection(("127.0.0.1", port), 1)


def read(path):
    with open(path) as file:
        return file.read()
