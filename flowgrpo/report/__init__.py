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

Names are listed in `__init__.pyi`, and are loaded when they are first used: settings and progress need no JAX.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
