"""Compiled programs in figures, also those that a compiler refuses, and how fast they can be at most."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from flowgrpo.planning import program_cost
from flowgrpo.planning.compiled_program import ExecutedStep
from flowgrpo.planning.cost_model import count_products
from flowgrpo.planning.program_cost import ProgramCost, ProgramEstimate, measure_program, parse_exhausted
from flowgrpo.planning.roofline import ideal_seconds, roofline_bound
from flowgrpo.planning.targets import CHIPS, parse_target
from flowgrpo.recipes.dry_runs import memory_rows, program_breakdown, show_programs, time_row
from flowgrpo.types import BadInput

GIB = 2**30
STEP = ExecutedStep("fusion", "f32[8]", 2.0, read=819e6, written=0.0, sent=0.0, cycles=3e6, origin="jit(f)/mul")
SENT = STEP._replace(opcode="all-gather", read=0.0, sent=200e6, cycles=0.0)
KERNEL = STEP._replace(opcode="custom-call", times=1.0, read=81.9e6, cycles=0.0)
COST = ProgramCost(
    name="decode",
    arguments=6 * GIB,
    outputs=2 * GIB,
    reused=GIB,
    temporary=3 * GIB,
    peak=10 * GIB,
    resident_bytes=2 * GIB,
    flops=197e9,
    bytes=1.0,
    flops_once=1.0,
    bytes_once=1.0,
    useful_flops=98.5e9,
    floor={"parameters": 81.9e6, "cache": 163.8e6},
    seconds=1.0,
    steps=2,
    instructions=(STEP, SENT),
)


@pytest.mark.parametrize(
    ("message", "used", "limit"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory in hbm. Used 20.5G of 15.75G hbm. Exceeded by 4.75G.", 20.5, 15.75),
        ("RESOURCE_EXHAUSTED: temporaries: the total memory required for HLO temporaries (512.00G) exceeds available "
         "HBM (95.74G).", 512, 95.74),
        ("RESOURCE_EXHAUSTED: Used 1.5T of 512.0M hbm", 1536, 0.5),
    ],
)  # fmt: skip
def test_out_of_memory_errors_are_parsed(message, used, limit):
    assert parse_exhausted(message) == (used * GIB, limit * GIB)


def test_other_compiler_errors_are_raised():
    with pytest.raises(BadInput, match="the compiler refuses the program: INTERNAL: no such instruction"):
        parse_exhausted("INTERNAL: no such instruction")


class Traced(SimpleNamespace):
    """A program whose compiler is asked for a target, and refuses it or says what it takes."""

    def lower(self, lowering_platforms):
        assert lowering_platforms == (self.platform,)
        return self

    def compile(self, _options):
        if self.refusal:
            raise jax.errors.JaxRuntimeError(self.refusal)
        return self

    def memory_analysis(self):
        names = ("argument", "output", "alias", "temp")
        sizes = {f"{name}_size_in_bytes": size * GIB for name, size in zip(names, (40, 40, 39, 50), strict=True)}
        return SimpleNamespace(**sizes, peak_memory_in_bytes=12 * GIB)

    def cost_analysis(self):
        return None

    def as_text(self):
        return "ENTRY %main (x: f32[2]) -> f32[2] {\n  %x = f32[2] parameter(0)\n  ROOT %y = f32[2] negate(%x)\n}\n"


def test_program_that_does_not_fit_reports_missing_bytes():
    refusal = "RESOURCE_EXHAUSTED: Used 20.00G of 15.75G hbm"
    compiled = program_cost._compile(Traced(platform="tpu", refusal=refusal), parse_target("v5e"), ())
    assert (compiled["peak"], compiled["lacks"]) == (20 * GIB, 4.25 * GIB)
    compiled = program_cost._compile(Traced(platform="tpu", refusal=None), parse_target("v5e"), ())
    assert (compiled["peak"], compiled["lacks"]) == (12 * GIB, 0)
    assert [step.opcode for step in compiled["instructions"]] == ["negate"]
    # Compilers of GPUs refuse nothing: what is there from the first to the last is compared with the chip.
    compiled = program_cost._compile(Traced(platform="cuda", refusal=None), parse_target("h100"), ())
    assert compiled["peak"] == 91 * GIB
    assert compiled["lacks"] == pytest.approx(91 * GIB - 0.95 * 84_942_979_072)


def test_programs_of_one_device_are_compiled_for_the_target():
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    work = jax.jit(lambda x: x @ x)
    estimate = ProgramEstimate(trips=(), useful_flops=8.0, floor={})
    alone = measure_program("one", work, (x,), None, estimate, target=None)
    there = measure_program("one", work, (x,), None, estimate, target=parse_target("cpu-2"))
    assert alone.peak == there.peak == alone.arguments + alone.outputs - alone.reused + alone.temporary
    assert alone.flops == 2 * 8**3
    (laid,) = program_cost._on_target((x,), parse_target("cpu-2"))
    assert laid.sharding.device_set == {jax.devices()[0]}


def test_roofline_bound_is_worked_by_hand():
    limit = roofline_bound(COST, CHIPS["v5e"])
    assert limit.computing == pytest.approx(1e-3)
    assert limit.memory == pytest.approx(2e-3)
    assert limit.links == pytest.approx(2e-3)
    assert limit.seconds == pytest.approx(4e-3)
    assert limit.estimated == pytest.approx(2 * 3e6 / 1.5e9 + 2e-3)
    assert limit.utilisation == pytest.approx(0.5e-3 / 6e-3)
    more = COST._replace(instructions=(STEP, SENT, KERNEL), kernels=39.4e9)
    assert roofline_bound(more, CHIPS["v5e"]).estimated == pytest.approx(limit.estimated + 0.2e-3)
    assert roofline_bound(COST, CHIPS["h100"]).estimated == 0
    assert roofline_bound(COST, CHIPS["cpu"]) is None
    assert roofline_bound(COST._replace(instructions=()), CHIPS["v5e"]) is None
    assert ideal_seconds(COST, CHIPS["v5e"]) == pytest.approx(0.2e-3)


def test_rows_show_memory_and_time_of_a_program(capsys):
    target = parse_target("v5e-8")
    (row,) = show_programs([COST], 11 * GIB, offload=False, target=target)
    assert (row["fits"], row["lacks"]) == (False, 1.0)  # with what the run keeps beside it
    assert memory_rows([COST], 11 * GIB, offload=True)[0]["fits"]
    assert (row["step_ms"], row["ideal_ms"], row["over_ideal"]) == (3.0, 0.2, 5.0)
    assert row["collectives_by_kind"] == {"all-gather": 2}
    assert row["largest"][0] == ["fusion f32[8] of jit(f)/mul", 1.64]
    assert row["parts"] == {"parameters": 0.0763, "cache": 0.153}
    assert "decode moves most by: 1.64 GB fusion f32[8] of jit(f)/mul" in capsys.readouterr().out
    refused = COST._replace(instructions=(), lacks=float(GIB))
    assert time_row(refused, target.chip).keys() == time_row(COST, target.chip).keys()
    assert memory_rows([refused], 100 * GIB, offload=True)[0]["lacks"] == 1.0
    assert program_breakdown(refused)["largest"] == []
    assert "mfu" not in show_programs([COST], None, offload=True, target=parse_target("cpu-8"))[0]


def test_kernel_products_count_once_per_grid_point():
    def multiply(x, y, out):
        out[...] = jnp.dot(x[...], y[...])

    tile = pl.BlockSpec((8, 16), lambda i: (i, 0))
    kernel = partial(
        pl.pallas_call, grid=(4,), in_specs=[tile, pl.BlockSpec((16, 16), lambda _: (0, 0))], out_specs=tile
    )
    shape = jax.ShapeDtypeStruct((32, 16), jnp.float32)
    work = jax.make_jaxpr(lambda x, y: kernel(multiply, out_shape=shape)(x, y @ y))
    counted = count_products(work(shape, jax.ShapeDtypeStruct((16, 16), jnp.float32)).jaxpr)
    assert counted.kernels == 2 * 32 * 16 * 16
    assert counted.flops == counted.kernels + 2 * 16**3
