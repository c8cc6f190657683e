"""Tasks and tokens: which tasks a run sees, in which order, and how text becomes ids.

Modules:

    chat             Conversations of a host environment with its model: prompts, new messages, room for an action
    chat_templates   Chat templates for models that come without one
    foreign_files    Checks of a downloaded model folder: which files are opened, and how much work they may cause
    gguf_file        The header of a GGUF file: metadata by name, and the place of each tensor
    gguf_tokenizer   The tokenizer that a GGUF file's metadata describes
    gguf_vocabulary  A tokenizer as the metadata of a GGUF file
    modelfile        A Modelfile, with which Ollama imports a GGUF file
    named_models     Models that come as Python packages, by short names
    task_files       Read tasks from files and generators: a path or `reasoning_gym:NAME` -> `Tasks`
    task_sampling    Sample tasks by their success rates, or by a curriculum
    tasks            A stateless order of tasks, and splits
    template_child   The process in which chat templates are rendered
    templates        Chat templates, rendered by a process of their own
    tokenizer        Tokenizer and chat rendering
    tool_calls       Tools in prompts, and the tool calls in a model's text
"""

from flowgrpo.data.task_files import batches, read_tasks, to_tasks
from flowgrpo.data.tasks import Tasks, batch_at, split_of, split_tasks, task_at
from flowgrpo.data.tokenizer import (
    ChatTokenizer,
    Conversation,
    add_action,
    add_messages,
    load_tokenizer,
    start_conversation,
)
