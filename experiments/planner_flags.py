"""The flags of how a planner learns and where it lies, which all hosted runs have; none set is the preset's."""

from typing import Any

from absl import flags

from experiments.headings import heading
from experiments.members import OPTIMIZERS
from experiments.planner_setup import OFFLOAD

heading("Learning")
_OPTIMIZER = flags.DEFINE_enum("optimizer", None, list(OPTIMIZERS), "What remembers gradients; adamw by default.")
_RANK = flags.DEFINE_integer("lora_rank", None, "Rank of an adapter; 0 trains all parameters.", lower_bound=0)
heading("Devices and memory")
_DTYPE = flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], "What the weights compute in.")
_REMAT = flags.DEFINE_bool("remat", None, "Compute layers again for the gradient, which takes less memory.")
_MESH = flags.DEFINE_string("mesh", None, "How devices are arranged for learning, such as data=2,fsdp=4.")
_OFFLOAD = flags.DEFINE_enum("offload", None, list(OFFLOAD), "Where models are that a stage doesn't use.")
_WATCH = flags.DEFINE_float("watch_seconds", None, "Of an iteration, until it says what it waits for.", lower_bound=1.0)


def planner_choices() -> dict[str, Any]:
    """Collect the values of the flags, by the name of the setting; None is no choice."""
    return {
        "dtype": _DTYPE.value,
        "remat": _REMAT.value,
        "optimizer": _OPTIMIZER.value,
        "lora_rank": _RANK.value,
        "mesh": _MESH.value,
        "offload": _OFFLOAD.value,
        "watch_seconds": _WATCH.value,
    }
