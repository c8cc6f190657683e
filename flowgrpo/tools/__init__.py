"""Tools for agents to call: functions that return a `Tool`, and the set that runs them.

Modules:

    calculator     Arithmetic as a tool: `calculator`, exact if possible
    llm            Questions to a frozen model as a tool: `llm`
    mcp            MCP servers as toolsets
    notebook_cell  Runs a program in the sandbox like a cell of a notebook
    python         Python in the sandbox as a tool
    schema         Tools from typed functions, and validation of arguments against a tool's JSON Schema
    search         Keyword search over a local corpus: `read_corpus` reads text files, `search` makes a tool
    toolset        A set of tools behind one function, `Toolset.call_tool`
"""

from flowgrpo.tools.calculator import calculator
from flowgrpo.tools.llm import llm
from flowgrpo.tools.mcp import Http, Stdio, mcp_tools
from flowgrpo.tools.python import python
from flowgrpo.tools.schema import tool
from flowgrpo.tools.search import read_corpus, search
from flowgrpo.tools.toolset import ToolError, ToolFailure, Toolset, toolset
