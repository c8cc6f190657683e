"""Reports of a run: metrics and timings in files, a progress line, plots, the viewer, warnings.

Modules:

    figures          Plots of a run from its metrics and timings: `draw_plots` writes a picture of each kind
    health           Detect a run that collapses from its metrics
    metrics          Metrics of a run: `metrics.jsonl` and `timings.jsonl`
    notebook         What a run shows in a notebook: one live bar while it lasts, and pictures
    plots            The learning curves of a run, from its `metrics.jsonl`
    progress         Progress of a run in one line: rewritten in a terminal, a bar in a notebook, printed elsewhere
    sinks            Send the metrics of a run to loggers: TensorBoard, Weights & Biases, trackio
    tables           Measurements and tables: `timed` calls, `medians` of them
    tensorboard      TensorBoard event files
    trajectory_page  Trajectories on one self-contained HTML page
    watchdog         Seconds of the stages of an iteration, and a report if it takes too long

Names are listed in `__init__.pyi` and loaded on first use: settings and progress need no JAX.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
