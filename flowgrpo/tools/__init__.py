"""Tools for agents to call: functions that return a `Tool`, and the set that runs them.

Modules:

    calculator     Arithmetic as a tool: `calculator`, exact wherever that is possible
    llm            Questions to a frozen model as a tool: `llm`
    mcp            MCP servers as toolsets
    notebook_cell  A program run in the sandbox as a notebook runs a cell
    python         Python in the sandbox as a tool
    schema         Tools from functions, and the arguments of calls held against a tool's JSON Schema
    search         Keyword search over a local corpus: `read_corpus` reads files of texts, `search` makes the tool of it
    toolset        A set of tools behind one function, `Toolset.do`
"""

from flowgrpo.tools.calculator import calculator
from flowgrpo.tools.llm import llm
from flowgrpo.tools.mcp import Http, Stdio, mcp_tools
from flowgrpo.tools.python import python
from flowgrpo.tools.schema import tool
from flowgrpo.tools.search import read_corpus, search
from flowgrpo.tools.toolset import ToolError, ToolFailure, Toolset, toolset
