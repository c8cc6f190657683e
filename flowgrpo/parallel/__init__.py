"""Several devices: meshes, sharding of rows and parameters, offloading of models.

Modules:

    compile_ahead  Compile programs before they are called, or faster
    offload        Offload models to the host or the disk in the stages that don't use them; measure memory
    row_sharding   Shard rows, or whole runs, over several devices, each of which runs the same program on its share
    sharding       Shard parameters and rows over a mesh, by the axis letters of the parameters and one table of rules
"""

from flowgrpo.parallel.row_sharding import data_mesh, map_runs, scan_updates, stack_trees
from flowgrpo.parallel.sharding import make_mesh, resolve_mesh
