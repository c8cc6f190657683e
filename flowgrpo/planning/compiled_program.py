"""Parse an optimised HLO program: its loops, bytes moved, copies, collectives, and the compiler's estimate of time.

    steps = program_steps(compiled.as_text(), trips=(128, 16))
    moved_bytes(steps), sent_bytes(steps), largest_transfers(steps)

XLA's own cost analysis counts the body of a loop once, and is absent on GPUs; here every instruction of the optimised
program has the number of times that it runs. Loops with a counter have a trip count; for a loop that ends on a
condition the caller gives it, by depth, as for `cost_model.count_products`. Of the branches of a conditional the one
that moves most bytes counts.

Bytes are those of device memory: an operand of which only a slice is read counts as that slice, an in-place update as
what it writes, and buffers in on-chip memory (S(1) and higher) not at all. Shapes are padded to their tiles. A
collective that is spread over several fusions counts where it starts. `decode_attention` is given the whole cache, of
which half of one layer counts: it is read as far as it is filled.
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
_NO_OPS = {"AllocateBuffer", "ConcatBitcast", "AsyncCollectiveDone"}  # custom calls that move nothing
_CACHE_KERNEL = "/decode_parts/"  # in op_name of a kernel that reads a layer of a cache [n r k c e]
_SLICES = {"dynamic-slice", "slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # index of the operand that is written into the first
_SAME = {"bitcast", "reshape"}  # results with the bytes of their operand
_THROUGH = _SAME | {"copy"}  # within a fusion, where a copy reads only what is used of it
_UNKNOWN = 2**53  # cycles; without an estimate compilers write a number near the largest


class Instruction(NamedTuple):
    """One instruction of a computation."""

    name: str
    shape: str  # as written, with its layout
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    root: bool


class Computation(dict[str, Instruction]):
    """The instructions of a computation by name, in order."""

    @cached_property
    def root(self) -> Instruction:
        """The instruction of the result."""
        return next(x for x in reversed(self.values()) if x.root)

    @cached_property
    def parameters(self) -> list[Instruction]:
        """The parameters, in order."""
        by_number = {int(x.operands[0]): x for x in self.values() if x.opcode == "parameter"}
        return [by_number[number] for number in sorted(by_number)]

    def users(self, name: str) -> list[Instruction]:
        """The instructions that have this one as an operand."""
        return [x for x in self.values() if name in x.operands]


class ExecutedStep(NamedTuple):
    """An instruction of a program with its cost on a device, for each of the `times` that it runs."""

    opcode: str
    shape: str
    times: float
    read: float  # bytes of device memory
    written: float
    sent: float  # bytes that reach the device from others
    cycles: float  # estimated by the compiler; 0 without an estimate
    origin: str  # op_name: the JAX operation


def program_steps(text: str, trips: Sequence[int] = ()) -> list[ExecutedStep]:
    """The instructions of an optimised program; `trips` are the iterations of loops on a condition, by depth."""
    computations, entry = parse(text)
    return list(_steps(computations, computations[entry], 1.0, tuple(trips)))


def moved_bytes(steps: Iterable[ExecutedStep]) -> float:
    """Bytes of device memory that the program reads and writes."""
    return sum(x.times * (x.read + x.written) for x in steps)


def sent_bytes(steps: Iterable[ExecutedStep]) -> float:
    """Bytes that reach a device from others."""
    return sum(x.times * x.sent for x in steps)


def total_cycles(steps: Iterable[ExecutedStep]) -> float:
    """Cycles by the compiler's estimate; collectives have none."""
    return sum(x.times * x.cycles for x in steps)


def unestimated_bytes(steps: Iterable[ExecutedStep]) -> float:
    """Bytes moved by kernels for which the compiler estimates no cycles."""
    return sum(x.times * (x.read + x.written) for x in steps if x.opcode == "custom-call" and not x.cycles)


def count_copies(steps: Iterable[ExecutedStep], *shapes: Sequence[int]) -> float:
    """Number of times that an array with the size of one of these shapes, such as a cache, is written completely."""
    sizes = {math.prod(shape) for shape in shapes}

    def writes_any(step: ExecutedStep) -> bool:
        arrays = (match for match in _ARRAY.finditer(step.shape) if 0 < _array_bytes(*match.groups()) <= step.written)
        return any(math.prod(int(x) for x in match[2].split(",") if x) in sizes for match in arrays)

    return sum(step.times for step in steps if writes_any(step))


def arrays_with(steps: Iterable[ExecutedStep], *sizes: int) -> list[ExecutedStep]:
    """Instructions whose result has all of these sizes among its axes, such as the s x s of attention."""

    def has_sizes(lengths: str) -> bool:
        axes = lengths.split(",")
        return all(axes.count(str(size)) >= sizes.count(size) for size in sizes)

    return [step for step in steps if any(has_sizes(match[2]) for match in _ARRAY.finditer(step.shape))]


def count_collectives(steps: Iterable[ExecutedStep]) -> dict[str, float]:
    """Number of times that each kind of collective runs."""
    counts: dict[str, float] = {}
    for step in steps:
        if step.sent:
            counts[step.opcode] = counts.get(step.opcode, 0) + step.times
    return counts


def largest_transfers(steps: Iterable[ExecutedStep], count: int = 5) -> list[tuple[str, float]]:
    """What moves most bytes: (name, bytes), with instructions of the same kind, shape and origin together."""
    total: dict[str, float] = {}
    for step in steps:
        shape = re.sub(r"\{[^{}]*\}", "", step.shape)
        name = f"{step.opcode} {shape[:80]} of {step.origin}"
        total[name] = total.get(name, 0.0) + step.times * (step.read + step.written + step.sent)
    return sorted(total.items(), key=lambda x: -x[1])[:count]


# Parsing ----------------------------------------------------------------------------------------------


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """The computations of an optimised program by name, and the name of the entry computation."""
    computations: dict[str, Computation] = {}
    current, entry = Computation(), ""
    for line in text.splitlines():
        if not line.startswith(" "):
            head = _HEAD.match(line)
            if head:
                current = computations[head[2]] = Computation()
                entry = head[2] if head[1] else entry
        elif match := _LINE.match(line):
            instruction = _parse_instruction(match[2], match[3], bool(match[1]))
            current[instruction.name] = instruction
    return computations, entry


def _parse_instruction(name: str, text: str, root: bool) -> Instruction:
    """Parse `shape opcode(operands), attributes`."""
    shape = text[: _closing(text, 0) + 1] if text.startswith("(") else text.split(" ", 1)[0]
    opcode, _, after = text[len(shape) :].lstrip().partition("(")
    end = _closing("(" + after, 0) - 1
    inner, attributes = after[:end], after[end + 1 :]
    operands = (inner,) if opcode in ("parameter", "constant") else tuple(_NAME.findall(inner))
    return Instruction(name, shape, opcode.strip(), operands, attributes, root)


def _closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index
    raise ValueError(f"a bracket is not closed in {text[start : start + 80]!r}")


def shape_bytes(shape: str) -> float:
    """Bytes of device memory of arrays of this shape, padded to their tiles."""
    return sum(_array_bytes(*match.groups()) for match in _ARRAY.finditer(shape))


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
    computations: Mapping[str, Computation], computation: Computation, times: float, trips: tuple[int, ...]
) -> Iterator[ExecutedStep]:
    for instruction in computation.values():
        opcode, attributes = instruction.opcode, instruction.attributes
        if opcode == "while":
            count, inner_trips = _trip_count(computations, instruction), trips
            if count is None:
                count, inner_trips = (trips[0] if trips else 1), trips[1:]
            yield from _steps(computations, computations[_called(attributes, "body") or ""], times * count, inner_trips)
        elif opcode == "conditional":
            branches = [computations[name] for name in _branches(attributes)]
            by_branch = [list(_steps(computations, branch, times, trips)) for branch in branches]
            yield from max(by_branch, key=lambda steps: moved_bytes(steps) + sent_bytes(steps))
        elif opcode in ("call", "async-start") and (name := _called(attributes, "to_apply|calls")):
            yield from _steps(computations, computations[name], times, trips)
        elif opcode not in _FREE and not opcode.endswith("-done") and _custom_target(attributes) not in _NO_OPS:
            yield _step(computations, computation, instruction, times)


def _step(
    computations: Mapping[str, Computation], computation: Computation, instruction: Instruction, times: float
) -> ExecutedStep:
    inside = _called(instruction.attributes, "calls") if instruction.opcode == "fusion" else None
    body = None if inside is None else computations[inside]
    sent, kind = _sent(computation, instruction, body)
    read = sum(
        _read_bytes(computations, computation, instruction, body, number) for number in range(len(instruction.operands))
    )
    cycles = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
    origin = re.search(r'op_name="([^"]*)"', instruction.attributes)
    return ExecutedStep(
        opcode=kind or instruction.opcode.removesuffix("-start"),
        shape=instruction.shape,
        times=times,
        read=read,
        written=_written_bytes(computation, instruction, body),
        sent=sent,
        cycles=float(cycles[1]) if cycles and int(cycles[1]) < _UNKNOWN else 0.0,
        origin=origin[1] if origin else "",
    )


def _called(attributes: str, attribute: str) -> str | None:
    match = re.search(rf"(?:{attribute})=%?([\w.-]+)", attributes)
    return match[1] if match else None


def _custom_target(attributes: str) -> str | None:
    """Target of a custom call; None for other instructions."""
    match = re.search(r'custom_call_target="([^"]*)"', attributes)
    return match[1] if match else None


def _branches(attributes: str) -> list[str]:
    """Names of the computations of a conditional."""
    branches = re.search(r"branch_computations=\{([^}]*)\}", attributes)
    if branches:
        return _NAME.findall(branches[1])
    return re.findall(r"(?:true|false)_computation=%?([\w.-]+)", attributes)


def _trip_count(computations: Mapping[str, Computation], loop: Instruction) -> int | None:
    """Number of iterations of a loop that counts from 0 to a constant; None for any other."""
    trip_count = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    if trip_count:
        return int(trip_count[1])
    condition = computations[_called(loop.attributes, "condition") or ""]
    root = condition.root
    if root.opcode == "fusion":
        return None
    sides = [condition.get(name) for name in root.operands]
    if root.opcode != "compare" or "direction=LT" not in root.attributes or len(sides) != 2:
        return None
    bound = sides[1]
    return int(bound.operands[0]) if bound is not None and bound.opcode == "constant" else None


def _read_bytes(
    computations: Mapping[str, Computation],
    computation: Computation,
    instruction: Instruction,
    body: Computation | None,
    number: int,
) -> float:
    """Bytes of an operand that an instruction reads."""
    operand = computation.get(instruction.operands[number])
    if operand is None or operand.opcode == "constant":
        return 0.0
    whole = shape_bytes(operand.shape)
    if body is not None:
        part = _used_bytes(computations, body, body.parameters[number].name)
        return whole if part is None else min(whole, part)
    if instruction.opcode == "custom-call" and _CACHE_KERNEL in instruction.attributes:
        lengths = [int(x) for x in _ARRAY.findall(operand.shape)[0][1].split(",") if x]
        return whole / lengths[0] / 2 if len(lengths) == 5 else whole
    part = _part_bytes(instruction, instruction.operands[number])
    return whole if part is None else part


def _used_bytes(computations: Mapping[str, Computation], body: Computation, name: str) -> float | None:
    """Bytes of a result within a fusion that its users read; None if one of them reads all of it."""
    if name == body.root.name:
        return None
    total = 0.0
    for user in body.users(name):
        inside = _called(user.attributes, "calls") if user.opcode == "fusion" else None
        inner = None if inside is None else computations[inside]
        parameter = None if inner is None else inner.parameters[user.operands.index(name)]
        if user.opcode in _THROUGH or (inner is not None and _source(inner, inner.root, _THROUGH) == parameter):
            part = _used_bytes(computations, body, user.name)
        elif inner is not None and parameter is not None:
            part = _used_bytes(computations, inner, parameter.name)
        else:
            part = _part_bytes(user, name)
        if part is None:
            return None
        total += part
    return total


def _part_bytes(user: Instruction, name: str) -> float | None:
    """Bytes that an instruction reads of an operand which it slices or updates; None if it reads all of it."""
    if user.opcode.removesuffix("-start") in COLLECTIVES:
        return 0.0
    if user.operands[:1] != (name,):
        return None
    if user.opcode in _SLICES:
        return shape_bytes(_on_device(user.shape))
    return 0.0 if user.opcode in _UPDATES else None


def _on_device(shape: str) -> str:
    """A shape within a fusion, as if it were in device memory."""
    return re.sub(r"S\(\d+\)", "", shape)


def _written_bytes(computation: Computation, instruction: Instruction, body: Computation | None) -> float:
    """Bytes that an instruction writes."""
    whole = shape_bytes(instruction.shape)
    if instruction.opcode.endswith("-start"):  # the result includes the operand
        operands = sum(shape_bytes(computation[name].shape) for name in instruction.operands if name in computation)
        return max(0.0, whole - operands)
    if body is None:
        return _update_bytes(computation, instruction, whole)
    if body.root.opcode != "tuple":
        return _update_bytes(body, _source(body, body.root), whole)
    parts = [(_source(body, body[name]), shape_bytes(body[name].shape)) for name in body.root.operands if name in body]
    unwritten = ("parameter", *COLLECTIVES) if _continues_collective(instruction) else ("parameter",)
    return sum(_update_bytes(body, part, size) for part, size in parts if part.opcode not in unwritten)


def _source(body: Computation, instruction: Instruction, same: Collection[str] = _SAME) -> Instruction:
    """The instruction whose bytes a result has, through instructions in `same`."""
    while instruction.opcode in same:
        instruction = body[instruction.operands[0]]
    return instruction


def _update_bytes(computation: Computation, instruction: Instruction, whole: float) -> float:
    number = _UPDATES.get(instruction.opcode)
    if number is None or whole == 0:
        return whole
    return min(whole, shape_bytes(_on_device(computation[instruction.operands[number]].shape)))


# Collectives ------------------------------------------------------------------------------------------


def _sent(computation: Computation, instruction: Instruction, body: Computation | None) -> tuple[float, str | None]:
    """Bytes that reach this device by a collective, or by one that starts within a fusion, and its kind."""
    if body is not None:
        if _continues_collective(instruction):
            return 0.0, None
        inside = [_sent(body, inner, None) for inner in body.values()]
        return sum(size for size, _ in inside), next((kind for _, kind in inside if kind), None)
    kind = instruction.opcode.removesuffix("-start")
    if kind not in COLLECTIVES:
        return 0.0, None
    count = _group_size(instruction.attributes)
    operand = sum(
        shape_bytes(_on_device(computation[name].shape)) for name in instruction.operands if name in computation
    )
    sizes = {"all-gather": count - 1.0, "all-reduce": 2.0 * (count - 1) / count, "collective-permute": 1.0}
    return operand * sizes.get(kind, (count - 1) / count), kind


def _continues_collective(fusion: Instruction) -> bool:
    """Whether a fusion continues a collective that another fusion started."""
    return "async_collective_fusion" in fusion.attributes or fusion.name.startswith("async-collective-done")


def _group_size(attributes: str) -> int:
    """Number of devices in each group of a collective."""
    if "collective_permute" in attributes or "source_target_pairs" in attributes:
        return 2
    axes = re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes)
    if axes:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", axes[1]))
        return math.prod(int(sizes[name]) for name in re.findall(r"'([^']+)'", axes[2]))
    tiled = re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes)
    if tiled:
        return int(tiled[1])
    listed = re.search(r"replica_groups=\{\{([^}]*)\}", attributes)
    return len(listed[1].split(",")) if listed else 1
