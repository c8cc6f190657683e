"""Models and batches on which updates are measured: names and sizes flow in, shapes and full rows flow out."""

from typing import Any

import numpy as np

import flowgrpo as fg
from experiments import setups
from experiments.benchmarks import ceilings
from flowgrpo.envs.env import PAD
from flowgrpo.models import families
from flowgrpo.models.config import DecoderConfig
from flowgrpo.types import Batch

PROTOTYPE = "prototype"  # of the environments: 0.34 M parameters
LARGE: dict[str, Any] = ceilings.SHAPES["medium"] | {  # 75 M parameters
    "hidden_size": 768,
    "num_hidden_layers": 10,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 2560,
}
SHAPES = {PROTOTYPE: None, **ceilings.SHAPES, "large": LARGE}


def shape_called(name: str) -> DecoderConfig:
    """The shape of one of `SHAPES`."""
    source = SHAPES[name]
    if source is None:
        return setups.shape(fg.arithmetic(), setups.settings_of("arithmetic", d=108, layers=3, head=16))
    return families.decoder_config(families.text_source(source))


def full_batch(config: DecoderConfig, rows: int, length: int, *, segments: int = 1) -> Batch:
    """Rows without padding, with advantages of both signs; all but the first token of a segment was sampled.

    The segments of a row are as long as one another, but for the last, which has the rest.
    """
    shape, each = (rows, length), length // segments
    row_rs, slot_rs = np.indices(shape, np.int32)
    segment_rs = np.minimum(slot_rs // each, segments - 1)
    position_rs = slot_rs - segment_rs * each
    chosen_rs = position_rs > 0
    logp_rs = np.where(chosen_rs, -np.log(config.v), 0.0).astype(np.float32)
    return Batch(
        tokens=np.random.default_rng(0).integers(PAD + 1, config.v, shape, np.int32),
        positions=position_rs,
        segments=segment_rs + 1,
        trajectory=row_rs,
        turn=segment_rs,
        slot=position_rs,
        group=row_rs // 8,
        chosen=chosen_rs,
        logp_sampled=logp_rs,
        logp_old=logp_rs,
        advantage=np.where(row_rs % 2, 1.0, -1.0).astype(np.float32),
        weight=(chosen_rs / chosen_rs.sum()).astype(np.float32),
    )
