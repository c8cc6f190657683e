"""Reports of a run: metrics and clocks in files, a line in the terminal, curves, pages, warnings.

Modules:

    figures          Draw the figures of a run from its metrics and timings: `draw_all` writes a picture of each kind
    health           Detect a run that collapses, from its lines of metrics
    metrics          Write the figures of a run as it goes
    plots            The curves of a run, from its `metrics.jsonl`
    progress         How far a run is, in one line: rewritten in a terminal, printed line by line elsewhere
    sinks            Send the lines of a run to loggers beside its files: TensorBoard, Weights & Biases, trackio
    tables           Measure and show: `timed` runs, `medians` of them
    tensorboard      TensorBoard's event files
    trajectory_page  Show trajectories on one HTML page that needs nothing else
    watchdog         Timing of an iteration's stages, in seconds
"""

from flowgrpo.report.figures import draw_all
from flowgrpo.report.health import findings
from flowgrpo.report.metrics import METRICS, Metrics, read_metrics
from flowgrpo.report.plots import COLOURS, DASHES, MARKERS, curve, make_figure, tool_mix_curves
from flowgrpo.report.progress import Progress
from flowgrpo.report.sinks import open_sinks
from flowgrpo.report.trajectory_page import Shown, ShownCall, ShownTurn, viewer
