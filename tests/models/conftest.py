"""What the comparisons with transformers share."""

from types import SimpleNamespace

import pytest


@pytest.fixture(scope="module")
def peer():
    """PyTorch and transformers, imported here: collecting tests needs no PyTorch."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    return SimpleNamespace(torch=torch, hf=transformers)
