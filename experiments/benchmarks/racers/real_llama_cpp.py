"""llama.cpp on real weights, by its Python package: prefill and decode steps of all rows, and of one."""

# pyright: reportMissingImports=false, reportArgumentType=false

from itertools import count
from typing import Any

from . import protocol
from .real_torch import timed
from .real_workload import Sizes, random_ids


class Context:
    """A context of llama.cpp with a float32 cache, whose sequences all have room for `length` tokens."""

    def __init__(self, model: Any, rows: int, length: int, cores: int):
        import llama_cpp

        self.api, self.rows, self.length = llama_cpp, rows, 0
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = rows * length, rows
        settings.n_batch, settings.n_ubatch = 2048, 512
        settings.n_threads = settings.n_threads_batch = cores
        settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
        self.context = llama_cpp.llama_init_from_model(model, settings)

    def clear(self) -> None:
        """Forget all sequences."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        self.length = 0

    def feed(self, ids: list[list[int]]) -> None:
        """Append tokens to each sequence, and compute the logits after the last of each."""
        width = len(ids[0])
        for row, tokens in enumerate(ids) if width > 1 else [(0, [one for (one,) in ids])]:
            sequences = [row] * width if width > 1 else range(len(ids))
            places = range(self.length, self.length + width) if width > 1 else [self.length] * len(ids)
            wanted = [place == width - 1 for place in range(width)] if width > 1 else [True] * len(ids)
            self._run(tokens, places, sequences, wanted)
        self.length += width

    def _run(self, tokens: Any, places: Any, sequences: Any, wanted: Any) -> None:
        batch = self.api.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for at, (token, place, sequence, last) in enumerate(zip(tokens, places, sequences, wanted, strict=True)):
            batch.token[at], batch.pos[at], batch.logits[at] = token, place, last
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
        assert self.api.llama_decode(self.context, batch) == 0
        self.api.llama_synchronize(self.context)
        self.api.llama_batch_free(batch)


def main() -> None:
    """Decode until the race is over."""
    lane, job = protocol.open_lane()
    import llama_cpp

    sizes = Sizes(**job.sizes)
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(job.model.encode(), llama_cpp.llama_model_default_params())
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    room = sizes.prompt + sizes.steps + 8
    crowd, alone = (Context(model, rows, room, job.cores) for rows in (sizes.rows, 1))
    for seed in count():
        lane.wait()
        seconds = {}
        for name, context in (("rows", crowd), ("stream", alone)):
            context.clear()
            prompts = random_ids(vocabulary, context.rows, sizes.prompt, seed)
            prefill = timed(lambda context=context, prompts=prompts: context.feed(prompts))
            drawn = random_ids(vocabulary, sizes.steps, context.rows, seed)
            steps = sorted(timed(lambda c=context, ids=ids: c.feed([[one] for one in ids])) for ids in drawn)
            seconds |= {name: steps[len(steps) // 2]} | ({"prefill": prefill} if name == "rows" else {})
        lane.done(sizes.rows * sizes.prompt, **seconds)


if __name__ == "__main__":
    main()
