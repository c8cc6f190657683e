"""The flag that says where figures go beside the run's own files; it changes no bit of the run."""

from absl import flags

from experiments.headings import heading
from flowgrpo.report.sinks import TENSORBOARD, check_sinks

heading("Files and resuming")
_LOGGERS = flags.DEFINE_list(
    "loggers", [TENSORBOARD], "Where figures go, too, by commas: tensorboard, wandb, trackio; or none."
)


def chosen_loggers() -> tuple[str, ...]:
    """Read the names that the flag gives, checked before anything is trained; () for `none`."""
    names = [name.strip() for name in _LOGGERS.value if name.strip()]
    return () if names == ["none"] else check_sinks(names)
