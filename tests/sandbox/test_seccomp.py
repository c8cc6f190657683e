"""The system call filter, by a small interpreter of its program: what it answers on both architectures."""

import ctypes
import errno
import os
import struct
from types import SimpleNamespace

import pytest

from flowgrpo.sandbox import seccomp, syscalls

ALLOWED, KILLED = "allowed", "killed"
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


@pytest.fixture(params=MACHINES)
def answer(request, monkeypatch):
    """`answer(call, first=0, machine=own)`: what the filter of this machine says."""
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=request.param))
    made = seccomp.make_filter()
    code = program_of(made)
    column = list(MACHINES).index(request.param)

    def ask(call, first=0, machine=MACHINES[request.param]):
        number = call if isinstance(call, int) else call[column]
        return interpret(code, struct.pack("=IIQQ", number, machine, 0, first))

    return ask


def program_of(made):
    """The instructions (code, jump if true, jump if false, value) behind the structure."""
    address = ctypes.cast(ctypes.addressof(made) + seccomp.Filter.program.offset, ctypes.POINTER(ctypes.c_void_p))[0]
    return list(struct.iter_unpack("=HBBI", ctypes.string_at(address, 8 * made.length)))


def interpret(code, data):
    """Run a BPF program as the kernel does."""
    place, word = 0, 0
    while True:
        kind, yes, no, value = code[place]
        if kind == 0x20:
            (word,) = struct.unpack_from("=I", data, value)
            place += 1
        elif kind == 0x06:
            return {0x7FFF0000: ALLOWED, 0x80000000: KILLED}.get(value, value & 0xFFFF)
        else:
            holds = {0x15: word == value, 0x35: word >= value, 0x45: bool(word & value)}[kind]
            place += 1 + (yes if holds else no)


def test_every_listed_call_is_denied(answer):
    for name, numbers in {**seccomp._DENIED, **{key: (own, own) for key, own in seccomp._SHARED.items()}}.items():
        if min(numbers) >= 0:
            assert answer(numbers) == errno.EPERM, name


def test_ordinary_calls_are_allowed(answer):
    ordinary = {"read": (0, 63), "mmap": (9, 222), "execve": (59, 221), "exit_group": (231, 94), "futex": (202, 98)}
    for name, numbers in ordinary.items():
        assert answer(numbers) == ALLOWED, name


def test_only_local_sockets_are_allowed(answer):
    for numbers in ((41, 198), (53, 199)):
        assert answer(numbers, 1) == ALLOWED
        assert {answer(numbers, family) for family in (0, 2, 10, 16, 17, 38, 40)} == {errno.EPERM}


def test_a_process_can_be_cloned_but_not_into_a_new_namespace(answer):
    assert answer((56, 220), 0x1200011) == ALLOWED  # fork
    assert answer((56, 220), 0x3D0F00) == ALLOWED  # a thread
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert answer((56, 220), flag | 17) == errno.EPERM
    assert answer(435) == errno.ENOSYS  # clone3


def test_limits_can_be_set_of_nobody_else(answer):
    assert answer((302, 261), 0) == ALLOWED
    assert answer((302, 261), 1) == errno.EPERM


def test_what_the_filter_does_not_know_does_not_exist(answer):
    assert answer(457) == answer(500) == answer(0x40000000 + 39) == errno.ENOSYS
    assert answer(0, machine=0x40000003) == KILLED  # calls of 32 bits have other numbers


def test_an_unknown_machine_has_no_filter(monkeypatch):
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="riscv64"))
    with pytest.raises(OSError, match="riscv64"):
        seccomp.make_filter()


def test_a_refused_system_call_is_an_error_that_names_it():
    with pytest.raises(OSError, match="setns"):
        syscalls.enter(-1)
