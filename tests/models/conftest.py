"""Fixture shared by the tests that compare models with those of transformers."""

import json
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="module")
def peer():
    """PyTorch and transformers, imported here: collecting tests needs no PyTorch."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()

    def randomise(named):
        """Make every weight random, so that no bias is 0 and no norm 1, and logits are spread widely."""
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, value in named:
                noise = torch.randn(value.shape, generator=generator)
                value.copy_(noise * (0.3 if value.ndim <= 1 else 0.15) + ("norm" in name))

    def make(head, source, **more):
        """A random model of the shape that a config.json says, under an Auto class's `head`."""
        config = transformers.AutoConfig.for_model(**json.loads(json.dumps(source)), **more)
        model = getattr(transformers, f"AutoModel{head}").from_config(config, attn_implementation="eager")
        randomise(model.named_parameters())
        return model.eval()

    return SimpleNamespace(torch=torch, hf=transformers, make=make, randomise=randomise)
