"""GGUF files of random models: what is read is what they hold (M5), and what is wrong with one is said."""

import jax.numpy as jnp
import numpy as np
import pytest
from gguf_cases import CASES, TYPES, gguf_model, write_gguf

from flowgrpo.models import hf
from flowgrpo.models.families import from_file, tensors_of
from flowgrpo.models.decoder import parameters


def assert_holds(found: hf.Model, expected: dict[str, np.ndarray], dtype="float32"):
    """The parameters are those of the tensors."""
    for parameter, tensor in tensors_of(found.config).items():
        axes = parameters(found.config)[parameter].axes
        for layer in range(found.config.num_layers) if axes.startswith("n") else [None]:
            value = found.params[parameter] if layer is None else found.params[parameter][layer]
            wanted = from_file(expected[tensor.name.format(n=layer)], tensor, axes.removeprefix("n"), found.config)
            np.testing.assert_array_equal(value, wanted.astype(value.dtype), err_msg=parameter)
            assert value.dtype == dtype


@pytest.mark.parametrize("name", CASES)
def test_M5_a_file_of_each_architecture_has_the_shape_and_the_weights_of_its_folder(tmp_path, name):
    model = gguf_model(name)
    expected = write_gguf(tmp_path / "model.gguf", model)
    again = hf.load_model(tmp_path / "model.gguf", text=False)
    assert again.config == model.config
    assert_holds(again, expected)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
def test_M5_weights_are_those_that_each_type_stands_for(tmp_path, name, kind):
    expected = write_gguf(tmp_path / "model.gguf", gguf_model(name), kind)
    again = hf.load_model(tmp_path / "model.gguf", text=False, dtype="bfloat16")
    assert_holds(again, expected, "bfloat16")
