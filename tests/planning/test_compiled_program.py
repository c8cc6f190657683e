"""Reading compiled programs: loops, bytes, copies, collectives and cycles, of texts by hand and of a CPU's program."""

import jax
import jax.numpy as jnp
import pytest

from flowgrpo.planning.compiled_program import (
    arrays_with,
    count_collectives,
    count_copies,
    largest_transfers,
    moved_bytes,
    parse,
    program_steps,
    sent_bytes,
    shape_bytes,
    total_cycles,
    unestimated_bytes,
)

LOOPS = """HloModule loops, entry_computation_layout={(f32[8,4]{1,0})->f32[8,4]{1,0}}

%more (a: (s32[], f32[8,4])) -> pred[] {
  %a = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%a), index=0
  %six = s32[] constant(6)
  ROOT %less = pred[] compare(%i, %six), direction=LT
}

%unknown (b: (s32[], f32[8,4])) -> pred[] {
  %b = (s32[], f32[8,4]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%b), index=0
  %limit = s32[] get-tuple-element(%b), index=0
  ROOT %less.1 = pred[] compare(%j, %limit), direction=LT
}

%inner (c: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %c = (s32[], f32[8,4]{1,0}) parameter(0)
  %k = s32[] get-tuple-element(%c), index=0
  %x = f32[8,4]{1,0} get-tuple-element(%c), index=1
  %y = f32[8,4]{1,0} negate(%x), metadata={op_name="jit(f)/neg"}, backend_config={"estimated_cycles":"100"}
  ROOT %t = (s32[], f32[8,4]{1,0}) tuple(%k, %y)
}

%outer (d: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %d = (s32[], f32[8,4]{1,0}) parameter(0)
  ROOT %w = (s32[], f32[8,4]{1,0}) while(%d), condition=%unknown, body=%inner
}

%small (e: f32[8,4]) -> f32[8,4] {
  ROOT %e = f32[8,4]{1,0} parameter(0)
}

%large (g: f32[8,4]) -> f32[8,4] {
  %g = f32[8,4]{1,0} parameter(0)
  ROOT %h = f32[8,4]{1,0} copy(%g)
}

ENTRY %main (x.1: f32[8,4]) -> f32[8,4] {
  %x.1 = f32[8,4]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8,4]{1,0}) tuple(%zero, %x.1)
  %told = (s32[], f32[8,4]) while(%start), condition=%more, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
  %counted = (s32[], f32[8,4]{1,0}) while(%told), condition=%more, body=%inner
  %deep = (s32[], f32[8,4]{1,0}) while(%counted), condition=%unknown, body=%outer
  %z = f32[8,4]{1,0} get-tuple-element(%deep), index=1
  %which = pred[] constant(true)
  ROOT %r = f32[8,4]{1,0} conditional(%which, %z, %z), true_computation=%small, false_computation=%large
}
"""


def one(line: str, *parameters: str, before: str = "", trips=()):
    """The steps of a program with these parameters (p0, p1, ...) and one instruction."""
    arguments = "\n".join(f"  %p{number} = {shape} parameter({number})" for number, shape in enumerate(parameters))
    return program_steps(
        f"HloModule one\n\n{before}\nENTRY %main () -> f32[] {{\n{arguments}\n  ROOT {line}\n}}\n", trips
    )


def test_loops_multiply_their_instructions():
    steps = program_steps(LOOPS, trips=(2, 7))
    negated = [step.times for step in steps if step.opcode == "negate"]
    assert negated == [5, 6, 2 * 7]
    assert [step.times for step in program_steps(LOOPS) if step.opcode == "negate"] == [5, 6, 1]
    assert total_cycles(steps) == 100 * sum(negated)


def test_branch_that_moves_most_counts():
    steps = program_steps(LOOPS)
    assert [step.times for step in steps if step.opcode == "copy"] == [1]
    assert moved_bytes(steps) == (5 + 6 + 1 + 1) * 2 * 8 * 4 * 4
    named = LOOPS.replace("true_computation=%small, false_computation=%large", "branch_computations={%small, %large}")
    assert moved_bytes(program_steps(named)) == moved_bytes(steps)


def test_computation_has_root_and_parameters():
    computations, entry = parse(LOOPS)
    assert entry == "main"
    assert computations["inner"].root.name == "t"
    assert [x.name for x in computations["inner"].parameters] == ["c"]
    assert [x.name for x in computations["inner"].users("x")] == ["y"]


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[3,5]{1,0}", 60),
        ("bf16[3,5]{1,0:T(8,128)(2,1)}", 8 * 128 * 2),  # padded to the tile in which it lies
        ("bf16[3,200]{0,1:T(8,128)}", 128 * 200 * 2),  # the last axis in memory is the first of the shape
        ("f32[3,5]{1,0:S(1)}", 0),  # on the chip
        ("f32[3,5]{1,0:T(8,128)S(3)}", 0),
        ("(f32[2], (pred[3], s4[4]))", 8 + 3 + 2),
        ("f8e4m3fn[4]", 4),
        ("u32[]", 4),
        ("token[]", 0),
    ],
)
def test_bytes_of_shapes(shape, size):
    assert shape_bytes(shape) == size


def test_slices_and_updates_count_their_part():
    (step,) = one("%s = f32[1,4] dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={1,4}", "f32[8,4]", "s32[]")
    assert (step.read, step.written) == (16 + 2 * 4, 16)
    (step,) = one("%u = f32[8,4] dynamic-update-slice(%p0, %p1, %p2, %p2)", "f32[8,4]", "f32[1,4]", "s32[]")
    assert (step.read, step.written) == (16 + 2 * 4, 16)
    body = """%fused (a: f32[8,4], b: f32[4]) -> f32[8,4] {
  %a = f32[8,4] parameter(0)
  %b = f32[4] parameter(1)
  %row = f32[1,4] bitcast(%b)
  %zero = s32[] constant(0)
  ROOT %put = f32[8,4] dynamic-update-slice(%a, %row, %zero, %zero)
}
"""
    (step,) = one("%f = f32[8,4] fusion(%p0, %p1), kind=kLoop, calls=%fused", "f32[8,4]", "f32[4]", before=body)
    assert (step.read, step.written) == (16, 16)
    assert count_copies([step], (8, 4)) == 0
    (step,) = one("%c = f32[8,4] copy(%p0)", "f32[8,4]")
    assert (step.read, step.written) == (128, 128)
    assert count_copies([step], (4, 8), (9, 9)) == 1
    assert count_copies([step], (8, 5)) == 0


def test_fusion_reads_what_inner_fusions_read():
    body = """%deeper (a: f32[8,4]) -> f32[1,4] {
  %a = f32[8,4] parameter(0)
  %zero = s32[] constant(0)
  ROOT %got = f32[1,4] dynamic-slice(%a, %zero, %zero), dynamic_slice_sizes={1,4}
}

%fused (b: f32[8,4], c: f32[4]) -> (f32[1,4], f32[4]) {
  %b = f32[8,4] parameter(0)
  %c = f32[4] parameter(1)
  %row = f32[1,4] fusion(%b), kind=kLoop, calls=%deeper
  %double = f32[4] add(%c, %c)
  ROOT %both = (f32[1,4], f32[4]) tuple(%row, %double)
}
"""
    call = "%f = (f32[1,4], f32[4]) fusion(%p0, %p1), kind=kLoop, calls=%fused"
    (step,) = one(call, "f32[8,4]", "f32[4]", before=body)
    assert (step.read, step.written) == (16 + 16, 16 + 16)


@pytest.mark.parametrize("operation", ["bitcast", "copy"])
@pytest.mark.parametrize(
    ("use", "read"), [("f32[32] add(%flat, %flat)", 128), ("f32[4] dynamic-slice(%flat, %zero)", 16)]
)
def test_passed_through_operands_are_read_by_their_users(operation, use, read):
    body = f"""%same (a: f32[8,4]) -> f32[32] {{
  %a = f32[8,4] parameter(0)
  ROOT %flat = f32[32] {operation}(%a)
}}

%fused (b: f32[8,4]) -> f32[32] {{
  %b = f32[8,4] parameter(0)
  %flat = f32[32] fusion(%b), kind=kLoop, calls=%same
  %zero = s32[] constant(0)
  ROOT %end = {use}
}}
"""
    (step,) = one(f"%f = {use[:7].strip()} fusion(%p0), kind=kLoop, calls=%fused", "f32[8,4]", before=body)
    assert (step.read, step.written) == (read, read)


@pytest.mark.parametrize(
    ("line", "kind", "sent"),
    [
        ("%g = f32[32,4] all-gather(%p0), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}", "all-gather", 3.0),
        ("%r = f32[8,4] all-reduce(%p0), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}", "all-reduce", 1.5),
        ("%s = f32[2,4] reduce-scatter(%p0), replica_groups=[1,4]<=[4], dimensions={0}", "reduce-scatter", 0.75),
        ("%a = f32[8,4] all-to-all(%p0), replica_groups={{0,1}}, dimensions={0}", "all-to-all", 0.5),
        ("%c = f32[8,4] collective-permute(%p0), source_target_pairs={{0,1},{1,0}}", "collective-permute", 1.0),
        ("%m = f32[8,4] all-reduce(%p0), replica_groups=mesh['a'=2,'b'=4] {'b'}", "all-reduce", 1.5),
        ("%i = f32[8,4] all-reduce(%p0)", "all-reduce", 0.0),
    ],
)
def test_collectives_count_received_bytes(line, kind, sent):
    steps = one(line, "f32[8,4]")
    assert sent_bytes(steps) == sent * 128
    assert count_collectives(steps) == ({kind: 1} if sent else {})


def test_collective_spread_over_fusions_counts_once():
    body = "".join(
        f"""%part{number} (a: f32[8,4]) -> f32[32,4] {{
  %a = f32[8,4] parameter(0)
  ROOT %g = f32[32,4] all-gather(%a), channel_id=7, replica_groups=[1,4]<=[4], dimensions={{0}}
}}

"""
        for number in (1, 2)
    )
    text = f"""HloModule two

{body}ENTRY %main (x: f32[8,4]) -> f32[32,4] {{
  %x = f32[8,4] parameter(0)
  %f = f32[32,4] fusion(%x), kind=kLoop, calls=%part1
  ROOT %async-collective-done = f32[32,4] fusion(%x), kind=kLoop, calls=%part2
}}
"""
    steps = program_steps(text)
    assert sent_bytes(steps) == 3 * 128
    assert count_collectives(steps) == {"all-gather": 1}


def test_async_start_writes_and_done_does_not():
    text = """HloModule started

%copied (a: f32[8,4]) -> f32[8,4] {
  %a = f32[8,4] parameter(0)
  ROOT %b = f32[8,4] negate(%a)
}

ENTRY %main (x: f32[8,4]) -> f32[8,4] {
  %x = f32[8,4] parameter(0)
  %s = (f32[8,4], f32[8,4], u32[]) copy-start(%x)
  %d = f32[8,4] copy-done(%s)
  %e = ((f32[8,4]), f32[8,4], u32[]) async-start(%d), calls=%copied
  ROOT %f = f32[8,4] async-done(%e)
}
"""
    copied, negated = program_steps(text)
    assert (copied.opcode, copied.read, copied.written) == ("copy", 128, 128 + 4)
    assert (negated.opcode, negated.written) == ("negate", 128)


def test_kernels_without_estimate_are_separate():
    kernel = '%k = f32[8,4] custom-call(%p0), custom_call_target="tpu_custom_call"'
    assert unestimated_bytes(one(kernel, "f32[8,4]")) == 256
    assert unestimated_bytes(one(kernel + ', backend_config={"estimated_cycles":"9"}', "f32[8,4]")) == 0
    assert (
        unestimated_bytes(one(kernel + ', backend_config={"estimated_cycles":"9223372036854775807"}', "f32[8,4]"))
        == 256
    )
    assert one('%k = f32[8,4] custom-call(), custom_call_target="AllocateBuffer"') == []


def test_cache_kernel_reads_half_of_a_layer():
    kernel = '%k = f32[2,4] custom-call(%p0, %p1), custom_call_target="triton", metadata={op_name="jit(f)/NAME/call"}'
    cache, queries = "bf16[3,2,1,16,4]", "bf16[2,1,1,4]"
    (step,) = one(kernel.replace("NAME", "decode_parts"), queries, cache)
    assert step.read == 16 + 2 * 16 * 4 * 2 / 2
    (other,) = one(kernel.replace("NAME", "flash_forward"), queries, cache)
    assert other.read == 16 + 3 * 2 * 16 * 4 * 2


def test_arrays_are_found_by_their_sizes():
    steps = one("%q = f32[2,64,64] exponential(%p0)", "f32[2,64,64]")
    assert arrays_with(steps, 64, 64) == steps
    assert arrays_with(steps, 2, 64) == steps
    assert not arrays_with(steps, 2, 2)
    assert arrays_with(one("%q = f32[2,64,64]{2,1,0:S(1)} exponential(%p0)", "f32[2,64,64]"), 64, 64)


def test_largest_transfers_are_grouped_and_sorted():
    (first, bytes_first), *rest = largest_transfers(program_steps(LOOPS, trips=(2, 7)))
    assert first == "negate f32[8,4] of jit(f)/neg"
    assert bytes_first == (5 + 6 + 14) * 256
    assert [size for _, size in rest] == [256]


def test_cpu_program_is_parsed():
    x = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    work = jax.jit(lambda x: jax.lax.scan(lambda x, _: (jnp.sin(x @ x), None), x, None, length=9)[0])
    steps = program_steps(work.lower(x).compile().as_text())
    products = [step for step in steps if step.opcode in ("dot", "custom-call") or "dot" in step.origin]
    assert sum(step.times for step in products) >= 9
    assert moved_bytes(steps) >= 9 * 2 * 16 * 16 * 4
    assert sent_bytes(steps) == 0
