"""llama.cpp opens a GGUF file: its tokens of some texts, and its greedy answers to prompts of ids.

    echo '{"prompts": [[1, 2]], "texts": ["x"], "count": 8}' | python llama_cpp_peer.py FILE.gguf

Run by a Python that has llama-cpp-python, apart from the package. Prints one line of JSON.
"""

import json
import sys

import numpy as np
from llama_cpp import Llama


def main() -> None:
    wanted = json.load(sys.stdin)
    model = Llama(
        sys.argv[1], n_ctx=512, n_threads=2, logits_all=True, verbose=False, type_k=0, type_v=0, flash_attn=False
    )
    answers, logits = [], []
    for prompt in wanted["prompts"]:
        model.reset()
        model.eval(prompt)
        logits.append(np.asarray(model.scores[len(prompt) - 1], np.float64).round(6).tolist())
        answer = []
        for _ in range(wanted["count"]):
            answer.append(int(np.argmax(model.scores[model.n_tokens - 1])))
            model.eval(answer[-1:])
        answers.append(answer)
    tokens = [model.tokenize(text.encode(), add_bos=False, special=True) for text in wanted["texts"]]
    template = model.metadata.get("tokenizer.chat_template")
    print(json.dumps({"answers": answers, "logits": logits, "tokens": tokens, "template": template}))


main()
