"""Tasks and tokens: what a run is asked, in which order, and how text becomes ids.

Modules:

    chat_templates   Chat templates for models that come without one
    foreign_files    Files of a model folder that a stranger made: which are opened, and how much work they may ask for
    gguf_file        The header of a GGUF file: metadata by name, and where each tensor lies
    gguf_tokenizer   The tokenizer that a GGUF file's metadata describes
    gguf_vocabulary  A tokenizer as the metadata of a GGUF file
    modelfile        A Modelfile, by which Ollama takes a GGUF file in
    named_models     Models that come as Python packages, by short names
    task_files       Read tasks from files and generators: a path or `reasoning_gym:NAME` -> `Tasks`
    task_sampling    Choose tasks by what was seen of them, or by a curriculum
    tasks            Deal tasks without state
    template_child   The process in which chat templates are rendered
    templates        Chat templates, rendered by a process of their own
    tokenizer        Tokenizer and chat rendering
"""

from flowgrpo.data.task_files import read_tasks
from flowgrpo.data.tasks import Tasks, batch_at, split_of, split_tasks, task_at
from flowgrpo.data.tokenizer import Conversation, Text, add_action, add_messages, load_text, start
