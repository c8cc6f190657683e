"""The system call filter, by a small interpreter of its program: what it answers on both architectures."""

import ctypes
import os
import struct
from errno import ENOSYS, EPERM
from types import SimpleNamespace

import pytest

from flowgrpo.sandbox import seccomp, syscalls

ALLOWED, KILLED = "allowed", "killed"
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE, SOCKET, PAIR, PRLIMIT = (56, 220), (41, 198), (53, 199), (302, 261)


def interpret(code, data):
    """Run a BPF program (code, jump if true, jump if false, value) as the kernel does."""
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


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_denies_what_leads_out_and_allows_the_ordinary(machine, monkeypatch):
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=machine))
    made = seccomp.make_filter()
    place = ctypes.cast(ctypes.addressof(made) + seccomp.Filter.program.offset, ctypes.POINTER(ctypes.c_void_p))[0]
    code = list(struct.iter_unpack("=HBBI", ctypes.string_at(place, 8 * made.length)))

    def answer(call, first=0, told=MACHINES[machine]):
        number = call if isinstance(call, int) else call[list(MACHINES).index(machine)]
        return interpret(code, struct.pack("=IIQQ", number, told, 0, first))

    for name, numbers in {**seccomp._DENIED, **{key: (own, own) for key, own in seccomp._SHARED.items()}}.items():
        assert min(numbers) < 0 or answer(numbers) == EPERM, name
    for numbers in ((0, 63), (9, 222), (59, 221), (231, 94), (202, 98)):  # read, mmap, execve, exit_group, futex
        assert answer(numbers) == ALLOWED
    for call in (SOCKET, PAIR):
        assert answer(call, 1) == ALLOWED
        assert {answer(call, family) for family in (0, 2, 10, 16, 17, 38, 40)} == {EPERM}
    assert answer(CLONE, 0x1200011) == answer(CLONE, 0x3D0F00) == ALLOWED  # a fork and a thread
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert answer(CLONE, flag | 17) == EPERM  # into new namespaces
    assert (answer(PRLIMIT, 0), answer(PRLIMIT, 1)) == (ALLOWED, EPERM)  # of itself, of others
    assert answer(435) == answer(457) == answer(500) == answer(0x40000000 + 39) == ENOSYS  # clone3, and unknown ones
    assert answer(0, told=0x40000003) == KILLED  # calls of 32 bits have other numbers


def test_an_unknown_machine_has_no_filter_and_a_refused_call_is_named(monkeypatch):
    with pytest.raises(OSError, match="setns"):
        syscalls.enter(-1)
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="riscv64"))
    with pytest.raises(OSError, match="riscv64"):
        seccomp.make_filter()
