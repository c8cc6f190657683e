"""Plans for machines that are not here: memory and time, by compilers and by formula.

Modules:

    compiled_program  Read what a compiler made of a program: loops, bytes moved, collectives, its estimate of time
    cost_model   Lower bounds on what a model needs, by formula, and the operations that a traced program counts
    dry_run      Compile a run's programs without its weights, and report what each takes of a device
    mesh_search  Rank the ways to run a job on some devices, with memory and time by formula
    program_cost  Compile one program for a machine, and account for memory, operations and instructions
    roofline     Bounds of speed of a compiled program on a chip
    targets      Chips and their figures, and devices of theirs to compile for
"""

from flowgrpo.planning.cost_model import Workload, decode_floor, update_floor
from flowgrpo.planning.dry_run import dry_run, make_case
from flowgrpo.planning.mesh_search import Machine, candidates, expect, shape_of_model
from flowgrpo.planning.roofline import bound, ideal_seconds
from flowgrpo.planning.targets import parse_target, target_devices
