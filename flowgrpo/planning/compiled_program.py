"""Read what a compiler made of a program: loops, bytes that are moved, copies, collectives and its estimate of time.

    steps = program_steps(compiled.as_text(), trips=(128, 16))
    moved_bytes(steps), sent_bytes(steps), largest(steps)

XLA's own cost analysis meets the body of a loop once, and says nothing on GPUs; here every instruction of the optimised
program stands with the number of times that it runs: loops that count say how often they run, and of a loop that ends
on a condition the caller says it, by depth, as for `cost_model.count_products`. Of the branches of a condition the one
that moves most counts.

Bytes are those of device memory: an operand of which only a slice is read counts as that slice, a result that is
written into its operand as what is written, and what lies in a memory on the chip (S(1) and higher) not at all. Shapes
are padded to the tiles in which they lie. A collective that is spread over several fusions counts where it begins. Of
the cache that `decode_attention` is given as a whole, half of one layer counts: it is read as far as it is filled.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

SIZES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^{}]*)\})?")
_LINE = re.compile(r"\s*(ROOT )?%?([\w.-]+) = (.*)")
_HEAD = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{\s*$")
_NAME = re.compile(r"%([\w.-]+)")
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota", "partition-id"}
_FREE |= {"opt-barrier", "replica-id", "copy-done", "async-done", "async-update", "slice-done", "custom-call-done"}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
_NAMES = {"AllocateBuffer", "ConcatBitcast", "AsyncCollectiveDone"}  # custom calls that move nothing
_OF_CACHE = "/decode_parts/"  # in the origin of a kernel that reads a layer of a cache [n r k c e]
_SLICES = {"dynamic-slice", "slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # which operand is written into the first
_SAME = {"bitcast", "reshape"}  # of the same bytes
_THROUGH = _SAME | {"copy"}  # within a fusion, where a copy is made of what is read of it
_UNKNOWN = 2**53  # cycles; a compiler that can't estimate them says a number near the largest


class Instruction(NamedTuple):
    """One instruction of a computation."""

    name: str
    shape: str  # as it is written, with its layout
    opcode: str
    operands: tuple[str, ...]
    rest: str  # attributes
    root: bool


class Computation(dict[str, Instruction]):
    """The instructions of a computation by name, in order."""

    @cached_property
    def root(self) -> Instruction:
        """The instruction that gives the result."""
        return next(x for x in reversed(self.values()) if x.root)

    @cached_property
    def parameters(self) -> list[Instruction]:
        """The parameters by number."""
        found = {int(x.operands[0]): x for x in self.values() if x.opcode == "parameter"}
        return [found[number] for number in sorted(found)]

    def users(self, name: str) -> list[Instruction]:
        """The instructions that read a result."""
        return [x for x in self.values() if name in x.operands]


class ExecutedStep(NamedTuple):
    """An instruction of a program, and what it costs each of the `times` that it runs on a device."""

    opcode: str
    shape: str
    times: float
    read: float  # bytes of device memory
    written: float
    sent: float  # bytes that reach the device from others
    cycles: float  # as the compiler estimates them; 0 where it says nothing
    origin: str  # the operation that it was made of


def program_steps(text: str, trips: Sequence[int] = ()) -> list[ExecutedStep]:
    """List the instructions of an optimised program; `trips` says how often loops on a condition run, by depth."""
    computations, entry = parse(text)
    return list(_steps(computations, computations[entry], 1.0, tuple(trips)))


def moved_bytes(steps: Iterable[ExecutedStep]) -> float:
    """Bytes of device memory that are read and written in a run of the program."""
    return sum(x.times * (x.read + x.written) for x in steps)


def sent_bytes(steps: Iterable[ExecutedStep]) -> float:
    """Bytes that reach a device from others in a run of the program."""
    return sum(x.times * x.sent for x in steps)


def total_cycles(steps: Iterable[ExecutedStep]) -> float:
    """Cycles of a run by the compiler's estimate; collectives have none."""
    return sum(x.times * x.cycles for x in steps)


def silent_bytes(steps: Iterable[ExecutedStep]) -> float:
    """Bytes that are moved by kernels of which the compiler estimates no cycles."""
    return sum(x.times * (x.read + x.written) for x in steps if x.opcode == "custom-call" and not x.cycles)


def copies(steps: Iterable[ExecutedStep], *shapes: Sequence[int]) -> float:
    """Count how often an array with as many numbers as one of these shapes, as a cache, is written whole."""
    wanted = {math.prod(shape) for shape in shapes}
    return sum(x.times for x in steps if any(numbers in wanted for numbers in _written_whole(x)))


def arrays_with(steps: Iterable[ExecutedStep], *sizes: int) -> list[ExecutedStep]:
    """Instructions whose result has all of these sizes among its axes, as the s x s of attention, wherever it lies."""
    return [x for x in steps if any(_has(found[2], sizes) for found in _ARRAY.finditer(x.shape))]


def _written_whole(step: ExecutedStep) -> Iterator[int]:
    """Numbers of the arrays of a result that its instruction writes, and not only a part of them."""
    for found in _ARRAY.finditer(step.shape):
        size = _array_bytes(*found.groups())
        if 0 < size <= step.written:
            yield math.prod(int(x) for x in found[2].split(",") if x)


def _has(lengths: str, sizes: Sequence[int]) -> bool:
    left = lengths.split(",")
    return all(left.count(str(size)) >= sizes.count(size) for size in sizes)


def collectives(steps: Iterable[ExecutedStep]) -> dict[str, float]:
    """Count how often each kind of collective runs."""
    counts: dict[str, float] = {}
    for step in steps:
        if step.sent:
            counts[step.opcode] = counts.get(step.opcode, 0) + step.times
    return counts


def largest(steps: Iterable[ExecutedStep], count: int = 5) -> list[tuple[str, float]]:
    """Find what moves the most bytes, instructions of the same kind, shape and origin together."""
    total: dict[str, float] = {}
    for step in steps:
        shape = re.sub(r"\{[^{}]*\}", "", step.shape)
        name = f"{step.opcode} {shape[:80]} of {step.origin}"
        total[name] = total.get(name, 0.0) + step.times * (step.read + step.written + step.sent)
    return sorted(total.items(), key=lambda x: -x[1])[:count]


# Reading ----------------------------------------------------------------------------------------------


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """The computations of an optimised program by name, and the name of the first to run."""
    computations: dict[str, Computation] = {}
    current, entry = Computation(), ""
    for line in text.splitlines():
        if not line.startswith(" "):
            head = _HEAD.match(line)
            if head:
                current = computations[head[2]] = Computation()
                entry = head[2] if head[1] else entry
        elif found := _LINE.match(line):
            instruction = _instruction(found[2], found[3], bool(found[1]))
            current[instruction.name] = instruction
    return computations, entry


def _instruction(name: str, told: str, root: bool) -> Instruction:
    """Take `shape opcode(operands), rest` apart."""
    shape = told[: _closing(told, 0) + 1] if told.startswith("(") else told.split(" ", 1)[0]
    opcode, _, after = told[len(shape) :].lstrip().partition("(")
    end = _closing("(" + after, 0) - 1
    inner, rest = after[:end], after[end + 1 :]
    operands = (inner,) if opcode in ("parameter", "constant") else tuple(_NAME.findall(inner))
    return Instruction(name, shape, opcode.strip(), operands, rest, root)


def _closing(text: str, start: int) -> int:
    """Find where the bracket that opens at `start` is closed."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index
    raise ValueError(f"a bracket is not closed in {text[start : start + 80]!r}")


def shape_bytes(shape: str) -> float:
    """Bytes of device memory that arrays of this shape take, padded to their tiles."""
    return sum(_array_bytes(*found.groups()) for found in _ARRAY.finditer(shape))


def _array_bytes(dtype: str, sizes: str, layout: str | None) -> float:
    layout = layout or ""
    if re.search(r"S\([1-9]", layout):
        return 0.0
    lengths = [int(x) for x in sizes.split(",") if x]
    tile = re.search(r"T\(([\d,]+)\)", layout)
    order = [int(x) for x in layout.partition(":")[0].split(",") if x]
    if tile and order:
        for axis, length in zip(order, reversed([int(x) for x in tile[1].split(",")]), strict=False):
            lengths[axis] = -(-lengths[axis] // length) * length
    return math.prod(lengths) * _dtype_bytes(dtype)


def _dtype_bytes(dtype: str) -> float:
    if dtype in SIZES:
        return SIZES[dtype]
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) / 8 if bits else 0.0


# Counting ---------------------------------------------------------------------------------------------


def _steps(
    computations: Mapping[str, Computation], own: Computation, times: float, trips: tuple[int, ...]
) -> Iterator[ExecutedStep]:
    for instruction in own.values():
        opcode, rest = instruction.opcode, instruction.rest
        if opcode == "while":
            counted = _trip_count(computations, instruction)
            again, left = (counted, trips) if counted is not None else (trips[0] if trips else 1, trips[1:])
            yield from _steps(computations, computations[_called(rest, "body") or ""], times * again, left)
        elif opcode == "conditional":
            branches = [computations[name] for name in _branches(rest)]
            tried = [list(_steps(computations, branch, times, trips)) for branch in branches]
            chosen = max(range(len(tried)), key=lambda index: moved_bytes(tried[index]) + sent_bytes(tried[index]))
            yield from _steps(computations, branches[chosen], times, trips)
        elif opcode in ("call", "async-start") and (name := _called(rest, "to_apply|calls")):
            yield from _steps(computations, computations[name], times, trips)
        elif opcode not in _FREE and not opcode.endswith("-done") and _custom_target(rest) not in _NAMES:
            yield _step(computations, own, instruction, times)


def _step(
    computations: Mapping[str, Computation], own: Computation, instruction: Instruction, times: float
) -> ExecutedStep:
    inside = _called(instruction.rest, "calls") if instruction.opcode == "fusion" else None
    body = None if inside is None else computations[inside]
    sent, kind = _sent(own, instruction, body)
    read = sum(_read_bytes(computations, own, instruction, body, number) for number in range(len(instruction.operands)))
    cycles = re.search(r'"estimated_cycles":"(\d+)"', instruction.rest)
    origin = re.search(r'op_name="([^"]*)"', instruction.rest)
    return ExecutedStep(
        opcode=kind or instruction.opcode.removesuffix("-start"),
        shape=instruction.shape,
        times=times,
        read=read,
        written=_written_bytes(own, instruction, body),
        sent=sent,
        cycles=float(cycles[1]) if cycles and int(cycles[1]) < _UNKNOWN else 0.0,
        origin=origin[1] if origin else "",
    )


def _called(rest: str, attribute: str) -> str | None:
    found = re.search(rf"(?:{attribute})=%?([\w.-]+)", rest)
    return found[1] if found else None


def _custom_target(rest: str) -> str | None:
    """Name the custom call that an instruction is."""
    found = re.search(r'custom_call_target="([^"]*)"', rest)
    return found[1] if found else None


def _branches(rest: str) -> list[str]:
    """The computations of which one runs."""
    many = re.search(r"branch_computations=\{([^}]*)\}", rest)
    if many:
        return _NAME.findall(many[1])
    return re.findall(r"(?:true|false)_computation=%?([\w.-]+)", rest)


def _trip_count(computations: Mapping[str, Computation], loop: Instruction) -> int | None:
    """Count how often a loop runs that counts from 0 to a constant; None for any other."""
    told = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest)
    if told:
        return int(told[1])
    condition = computations[_called(loop.rest, "condition") or ""]
    root = condition.root
    if root.opcode == "fusion":
        return None
    sides = [condition.get(name) for name in root.operands]
    if root.opcode != "compare" or "direction=LT" not in root.rest or len(sides) != 2:
        return None
    bound = sides[1]
    return int(bound.operands[0]) if bound is not None and bound.opcode == "constant" else None


def _read_bytes(
    computations: Mapping[str, Computation],
    own: Computation,
    instruction: Instruction,
    body: Computation | None,
    number: int,
) -> float:
    """Bytes of an operand that an instruction reads."""
    operand = own.get(instruction.operands[number])
    if operand is None or operand.opcode == "constant":
        return 0.0
    whole = shape_bytes(operand.shape)
    if body is not None:
        part = _used_bytes(computations, body, body.parameters[number].name)
        return whole if part is None else min(whole, part)
    if instruction.opcode == "custom-call" and _OF_CACHE in instruction.rest:
        lengths = [int(x) for x in _ARRAY.findall(operand.shape)[0][1].split(",") if x]
        return whole / lengths[0] / 2 if len(lengths) == 5 else whole
    part = _part_bytes(instruction, instruction.operands[number])
    return whole if part is None else part


def _used_bytes(computations: Mapping[str, Computation], body: Computation, name: str) -> float | None:
    """Bytes of a result within a fusion that its users read; None where one of them reads it whole."""
    if name == body.root.name:
        return None
    total = 0.0
    for user in body.users(name):
        inside = _called(user.rest, "calls") if user.opcode == "fusion" else None
        inner = None if inside is None else computations[inside]
        own = None if inner is None else inner.parameters[user.operands.index(name)]
        if user.opcode in _THROUGH or (inner is not None and _source(inner, inner.root, _THROUGH) == own):
            part = _used_bytes(computations, body, user.name)
        elif inner is not None and own is not None:
            part = _used_bytes(computations, inner, own.name)
        else:
            part = _part_bytes(user, name)
        if part is None:
            return None
        total += part
    return total


def _part_bytes(user: Instruction, name: str) -> float | None:
    """Bytes that an instruction reads of an operand of which it takes, or into which it writes, a part."""
    if user.opcode.removesuffix("-start") in COLLECTIVES:
        return 0.0
    if user.operands[:1] != (name,):
        return None
    if user.opcode in _SLICES:
        return shape_bytes(_on_device(user.shape))
    return 0.0 if user.opcode in _UPDATES else None


def _on_device(shape: str) -> str:
    """A shape within a fusion as if it lay in the device's memory, from which it is taken."""
    return re.sub(r"S\(\d+\)", "", shape)


def _written_bytes(own: Computation, instruction: Instruction, body: Computation | None) -> float:
    """Bytes that an instruction writes."""
    whole = shape_bytes(instruction.shape)
    if instruction.opcode.endswith("-start"):  # the result stands beside the operand
        operands = sum(shape_bytes(own[name].shape) for name in instruction.operands if name in own)
        return max(0.0, whole - operands)
    if body is None:
        return _update_bytes(own, instruction, whole)
    if body.root.opcode != "tuple":
        return _update_bytes(body, _source(body, body.root), whole)
    parts = [(_source(body, body[name]), shape_bytes(body[name].shape)) for name in body.root.operands if name in body]
    kept = ("parameter", *COLLECTIVES) if _goes_on(instruction) else ("parameter",)
    return sum(_update_bytes(body, part, size) for part, size in parts if part.opcode not in kept)


def _source(body: Computation, instruction: Instruction, same: Collection[str] = _SAME) -> Instruction:
    """The instruction whose bytes a result has."""
    while instruction.opcode in same:
        instruction = body[instruction.operands[0]]
    return instruction


def _update_bytes(own: Computation, instruction: Instruction, whole: float) -> float:
    number = _UPDATES.get(instruction.opcode)
    if number is None or whole == 0:
        return whole
    return min(whole, shape_bytes(_on_device(own[instruction.operands[number]].shape)))


# Collectives ------------------------------------------------------------------------------------------


def _sent(own: Computation, instruction: Instruction, body: Computation | None) -> tuple[float, str | None]:
    """Bytes that reach this device by a collective, also by one that begins within a fusion, and its kind."""
    if body is not None:
        if _goes_on(instruction):
            return 0.0, None
        found = [_sent(body, inner, None) for inner in body.values()]
        return sum(size for size, _ in found), next((kind for _, kind in found if kind), None)
    kind = instruction.opcode.removesuffix("-start")
    if kind not in COLLECTIVES:
        return 0.0, None
    count = _group_size(instruction.rest)
    operand = sum(shape_bytes(_on_device(own[name].shape)) for name in instruction.operands if name in own)
    sizes = {"all-gather": count - 1.0, "all-reduce": 2.0 * (count - 1) / count, "collective-permute": 1.0}
    return operand * sizes.get(kind, (count - 1) / count), kind


def _goes_on(fusion: Instruction) -> bool:
    """Say whether the collective in a fusion began in another one."""
    return "async_collective_fusion" in fusion.rest or fusion.name.startswith("async-collective-done")


def _group_size(rest: str) -> int:
    """Count the devices that meet in a collective."""
    if "collective_permute" in rest or "source_target_pairs" in rest:
        return 2
    axes = re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", rest)
    if axes:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", axes[1]))
        return math.prod(int(sizes[name]) for name in re.findall(r"'([^']+)'", axes[2]))
    spread = re.search(r"replica_groups=\[\d+,(\d+)\]<=", rest)
    if spread:
        return int(spread[1])
    listed = re.search(r"replica_groups=\{\{([^}]*)\}", rest)
    return len(listed[1].split(",")) if listed else 1
