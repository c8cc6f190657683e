"""Planning for other machines: memory and time of a run, by their compilers and by formula.

Modules:

    compiled_program  Parse an optimised HLO program: loops, bytes moved, collectives, the compiler's estimate of time
    cost_model        Lower bounds on memory and work of a model, by formula; matrix products of a traced program
    dry_run           Compile the programs of a run without its weights, and report the cost of each
    mesh_search       Rank meshes, remat and micro-batches for a job, with memory and time by formula
    program_cost      Compile one program for a machine, and measure memory, FLOPs and instructions
    roofline          Roofline bound of a compiled program on a chip
    targets           Chips with their specifications, and devices to compile for
"""

from flowgrpo.planning.cost_model import Workload, decode_floor, update_floor
from flowgrpo.planning.dry_run import dry_run, make_case
from flowgrpo.planning.mesh_search import Machine, estimate, rank_candidates, shape_of_model
from flowgrpo.planning.roofline import ideal_seconds, roofline_bound
from flowgrpo.planning.targets import parse_target, target_devices
