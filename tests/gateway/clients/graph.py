"""A graph of langgraph with one node, gone through three times."""

import json
import os
import sys

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

model = ChatOpenAI(model="tiny", base_url=os.environ["OPENAI_BASE_URL"], api_key="none")


def node(state: MessagesState):
    said = model.invoke(state["messages"])
    number = sum(message.type == "ai" for message in state["messages"])
    return {"messages": [said, {"role": "user", "content": f"again {number}"}]}


def ends(state: MessagesState) -> str:
    return END if sum(message.type == "ai" for message in state["messages"]) == 3 else "node"


graph = StateGraph(MessagesState)
graph.add_node("node", node)
graph.add_edge(START, "node")
graph.add_conditional_edges("node", ends)
query = json.loads(sys.stdin.readline())["query"]
print(graph.compile().invoke({"messages": [{"role": "user", "content": query}]})["messages"][-2].content)
