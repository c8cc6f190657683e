"""Several devices: meshes, rows dealt over them, models moved off them.

Modules:

    compile_ahead  Wait less for programs: compile them before they are called, in a thread, say, or with less effort
    offload        Keep each model where a table has it in each stage (device, host or disk)
    row_sharding   Deal rows, or whole runs, over several devices, each of which does the same with its share
    sharding       Lay parameters and rows out on a mesh of devices, by the letters of their axes and one table of rules
"""

from flowgrpo.parallel.row_sharding import data_mesh, many_updates, over_runs, stack_trees
from flowgrpo.parallel.sharding import make_mesh, mesh_of
