"""CLIP and SigLIP: each example by itself, every tensor in its place, pixels; folders that are none are refused."""

import json
from contextlib import nullcontext
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizer_cases import byte_level
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from flowgrpo.models import image_files
from flowgrpo.models.image_files import (
    ImagePreprocessing,
    centre_crop,
    load_image_text,
    make_score_pairs,
    parse_preprocessing,
    preprocess,
    probability,
    read_image_text_config,
    resize,
)
from flowgrpo.models.image_text import (
    as_scores,
    image_embeddings,
    image_text_parameters,
    init_params,
    layers_of,
    text_embeddings,
)
from flowgrpo.rewards.vision.boxes import picture_score
from flowgrpo.rewards.vision.drawing import gold_commands, make_drawings, picture_of
from flowgrpo.types import BadInput

VISION = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4}
VISION |= {"image_size": 28, "patch_size": 7}
WORDS = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 2}
WORDS |= {"vocab_size": 320, "max_position_embeddings": 12, "bos_token_id": 300, "eos_token_id": 301}
GELU = {"hidden_act": "gelu", "layer_norm_eps": 1e-3}


def make_source(kind, vision, text, **more):
    """A config.json."""
    return {"model_type": kind, "vision_config": VISION | vision, "text_config": WORDS | text, **more}


CASES = {
    "clip": make_source("clip", {}, {}, projection_dim=20),
    "clip gelu, uneven patches": make_source("clip", GELU | {"image_size": 30}, GELU, projection_dim=16),
    "clip with the old end token": make_source("clip", {}, {"eos_token_id": 2, "vocab_size": 302}, projection_dim=20),
    "siglip": make_source("siglip", {}, {"projection_size": 24}),
    "siglip, one patch a side more": make_source("siglip", {"image_size": 35}, GELU | {"projection_size": 24}),
}
PREPROCESSOR = {"resample": 3, "rescale_factor": 1 / 255, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.3, 0.2, 0.25]}


def preprocessor(source):
    """A preprocessor_config.json that goes with a config.json."""
    side = source["vision_config"]["image_size"]
    crop = {"height": side, "width": side}
    clip = source["model_type"] == "clip"
    return PREPROCESSOR | ({"size": {"shortest_edge": side + 3}, "crop_size": crop} if clip else {"size": crop})


def tokens_of(config):
    """Texts of unequal lengths with an end token, the largest id, and padding after it."""
    tokens_js = np.random.default_rng(0).integers(3, 300, (5, config.positions)).astype(np.int32)
    for row, length in zip(tokens_js, (4, 11, 7, 1, 9), strict=True):
        row[length:] = [301] + [1] * (config.positions - length - 1)
    return tokens_js


def pixels_of(config):
    return np.random.default_rng(1).normal(size=(3, 3, config.side, config.side)).astype(np.float32)


def random_params(config):
    """Random parameters, none of which is 0 or 1."""
    random, params = np.random.default_rng(0), {}
    for name, parameter in image_text_parameters(config).items():
        layers = layers_of(parameter, config)
        shape = parameter.shape if layers is None else (layers, *parameter.shape)
        noise = random.normal(size=shape) * (parameter.deviation + 0.1)
        params[name] = jnp.asarray((parameter.constant + noise).astype(np.float32))
    return params


def write(folder, source, **extra):
    """Write a folder as it is published, with the tensor names of transformers."""
    config = read_image_text_config(source)
    params, tensors = random_params(config), {}
    for name, parameter in image_text_parameters(config).items():
        layers, value = layers_of(parameter, config), np.asarray(params[name])
        for n, layer_value in enumerate(value if layers is not None else [value]):
            tensor = layer_value.T if parameter.transposed else layer_value
            tensors[parameter.file.format(n=n)] = np.ascontiguousarray(tensor).reshape(parameter.file_shape)
    save_file(tensors | extra, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(source))
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor(source)))
    return config, params


def write_tokenizer(folder):
    """Byte-level BPE with an end token after every text."""
    backend = byte_level()
    backend.add_special_tokens(["<pad>", "<end>"])
    end = backend.token_to_id("<end>")
    backend.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", end)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")
    tokenizer.save_pretrained(folder)
    return end


@cache
def everything(config):
    """Embeddings of images and texts, and their scores, in one program."""

    def run(params, pixels, tokens):
        image, text = (image_embeddings(params, pixels, config=config), text_embeddings(params, tokens, config=config))
        return image, text, as_scores(params, image @ text.T)

    return jax.jit(run)


# The arithmetic ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_scores_are_scaled_cosines_and_no_example_sees_another(name):
    """CLIP reads nothing after the end token, SigLIP reads padding."""
    config = read_image_text_config(CASES[name])
    params, pixels, tokens = random_params(config), pixels_of(config), tokens_of(config)
    tokens[:, 5], tokens[:, 6:] = 301, 1
    image_ip, text_jp, scores = everything(config)(params, pixels, tokens)
    assert image_ip.dtype == jnp.float32
    for embeddings in (image_ip, text_jp):
        np.testing.assert_allclose((embeddings**2).sum(1), 1.0, rtol=1e-5)
    shift = float(params["bias"]) if name == "siglip" else 0.0
    np.testing.assert_allclose(scores, image_ip @ text_jp.T * np.exp(float(params["scale"])) + shift, atol=1e-4)
    pixels[0], tokens[0, 3], tokens[1, 8] = 0.0, 7, 7
    changed = everything(config)(params, pixels, tokens)
    images, texts = (np.abs(a - b).max(1) > 1e-5 for a, b in zip(changed[:2], (image_ip, text_jp), strict=True))
    assert images.tolist() == [True, False, False]
    assert texts.tolist() == [True, name == "siglip", False, False, False]


# Folders ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_every_tensor_of_a_folder_becomes_its_parameter(tmp_path, name):
    """Also with a buffer of old folders, and with the scale as a list of one number."""
    old = {"text_model.embeddings.position_ids": np.arange(12)[None], "logit_scale": np.array([2.0], np.float32)}
    config, params = write(tmp_path, CASES[name], **old)
    params["scale"] = jnp.float32(2.0)
    for dtype in ("float32", "bfloat16"):
        loaded = load_image_text(tmp_path, tokenizer=False, dtype=dtype)
        assert (loaded.config, {value.dtype.name for value in loaded.params.values()}) == (config, {dtype})
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y.astype(x.dtype)), loaded.params, params)
    shapes = jax.eval_shape(partial(init_params, config), jax.random.key(0))
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, params)


def change(folder, file, changes):
    """Other fields in a file, and in the dicts that it holds."""
    source = json.loads((folder / file).read_text())
    for key, value in changes.items():
        source[key] = source[key] | value if isinstance(value, dict) else value
    (folder / file).write_text(json.dumps(source))


CONFIG, PREPARATION = "config.json", "preprocessor_config.json"


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        (CONFIG, {"model_type": "bert"}, "bert is not an image-text model"),
        (CONFIG, {"vision_config": {"image_size": 35}}, r"images of \(28, 28\), but the model reads 35"),
        (CONFIG, {"vision_config": {"num_hidden_layers": 4}}, r"layers\.3\..* is missing"),
        (CONFIG, {"vision_config": {"num_hidden_layers": 2}}, r"layers\.2\..* is unexpected"),
        (CONFIG, {"vision_config": {"num_attention_heads": 5}}, "5"),
        (CONFIG, {"vision_config": {"hidden_act": "relu6"}}, "relu6"),
        (CONFIG, {"vision_config": {"intermediate_size": 41}}, r"shape \[40, 24\] and not \[41, 24\]"),
        (CONFIG, {"vision_config": {"num_channels": 4}}, "three channels"),
        (CONFIG, {"vision_config": {"num_hidden_layers": 10**9}}, "vision_config: num_hidden_layers is 1000000000"),
        (CONFIG, {"text_config": {"layer_norm_eps": float("nan")}}, "text_config: layer_norm_eps is nan"),
        (PREPARATION, {"image_mean": [0.5, float("inf"), 0.5]}, r"image_mean\.1 is inf"),
        (CONFIG, {"text_config": {"eos_token_id": [1, 2]}}, "one end token"),
        (PREPARATION, {"size": None}, "has no size"),
        (PREPARATION, {"image_mean": [1, 2]}, "image_mean is .* three channels"),
        (PREPARATION, {"size": {"longest_edge": 20}}, "height and width"),
        (PREPARATION, {"crop_size": 27}, r"\(27, 27\)"),
        (PREPARATION, {"do_center_crop": False}, "images of 31"),
    ],
)
def test_folders_that_cant_be_read_are_refused_with_one_sentence(tmp_path, file, changes, message):
    write(tmp_path, CASES["clip"])
    change(tmp_path, file, changes)
    with pytest.raises(BadInput, match=message):
        load_image_text(tmp_path, tokenizer=False)


def test_preprocessor_config_missing_or_in_processor_config(tmp_path):
    write(tmp_path, CASES["clip"])
    (tmp_path / PREPARATION).unlink()
    with pytest.raises(BadInput, match=r"preprocessor_config\.json"):
        load_image_text(tmp_path, tokenizer=False)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": preprocessor(CASES["clip"])}))
    assert load_image_text(tmp_path, tokenizer=False).preprocess(IMAGES[0]).shape == (3, 28, 28)


# Pairs ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A SigLIP folder with its tokenizer, loaded."""
    folder = tmp_path_factory.mktemp("siglip")
    write(folder, CASES["siglip"])
    end = write_tokenizer(folder)
    loaded = load_image_text(folder)
    return SimpleNamespace(loaded=loaded, end=end, score=make_score_pairs(loaded, rows=2))


IMAGES = [np.random.default_rng(i).integers(0, 256, (30 + i, 50 - i, 3)).astype(np.uint8) for i in range(3)]
TEXTS = ["the capital", "a line", "the number of the line is long, long, long, and longer"]


def test_score_pairs_equals_scores_of_all_pairs_in_one_compiled_shape(pairs):
    loaded, actual = pairs.loaded, pairs.score(IMAGES, TEXTS)
    pixels, tokens = np.stack([loaded.preprocess(image) for image in IMAGES]), loaded.encode([*TEXTS, "", "a"])
    scores = np.diag(everything(loaded.config)(loaded.params, pixels, tokens)[2])
    np.testing.assert_allclose(as_scores(loaded.params, jnp.asarray(actual)), scores, atol=1e-5)
    np.testing.assert_allclose(probability(loaded.params, jnp.asarray(actual)), 1 / (1 + np.exp(-scores)), atol=1e-5)
    np.testing.assert_array_equal(pairs.score(IMAGES[2:], TEXTS[2:]), actual[2:])
    assert pairs.score([], []).shape == (0,)
    (task,) = make_drawings(0, 1)
    (drawn,) = picture_score(pairs.score, picture_of).score_all([task], [gold_commands(task)])
    assert drawn.value == pytest.approx(pairs.score([picture_of(gold_commands(task))], [task.query])[0])


def test_end_tokens_within_a_text_are_removed_and_ids_must_match(pairs, tmp_path):
    tokens = pairs.loaded.encode(["a<end>b", "<en<end>d>", "\ud800", "x" * 10_000_000])
    assert ((tokens == pairs.end).sum(axis=1) == 1).all()
    assert tokens.shape == (4, 12)
    for eos, refusal in ((pairs.end, nullcontext()), (5, pytest.raises(BadInput, match="without id 5"))):
        write(tmp_path, make_source("clip", {}, {"eos_token_id": eos}, projection_dim=20))
        write_tokenizer(tmp_path)
        with refusal:
            load_image_text(tmp_path).encode(["a line"])


# Pixels -----------------------------------------------------------------------------------------------


def test_preprocessing_worked_by_hand_with_a_black_border():
    image = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    actual = preprocess(image, settings=ImagePreprocessing(None, 3, (2, 2), 0.5, (1.0, 2.0, 3.0), (2.0, 4.0, 8.0)))
    expected = (image[1:3, 2:4] * 0.5 - np.array([1, 2, 3])) / np.array([2, 4, 8])
    np.testing.assert_allclose(actual, expected.transpose(2, 0, 1), rtol=1e-6)
    assert actual.dtype == np.float32
    actual = centre_crop(np.full((1, 5, 3), 9, np.uint8), (4, 2))
    assert actual[..., 0].tolist() == [[0, 0], [0, 0], [9, 9], [0, 0]]


def test_arrays_that_are_no_images_are_refused(pairs):
    loaded = pairs.loaded
    for image in (np.zeros((3, 3), np.uint8), np.zeros((3, 3, 3), np.float32), np.zeros((0, 3, 3), np.uint8)):
        with pytest.raises(BadInput, match="an image is bytes"):
            loaded.preprocess(image)
    with pytest.raises(BadInput, match="too narrow"):
        resize(np.zeros((1, 400_000, 3), np.uint8), 224, 3)
    with pytest.raises(BadInput, match="28, 28"):
        image_embeddings(loaded.params, np.zeros((1, 3, 27, 28), np.float32), config=loaded.config)
    with pytest.raises(BadInput, match="tokenizer=True"):
        make_score_pairs(loaded._replace(encode=None))


# Against transformers ---------------------------------------------------------------------------------


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.parametrize("name", CASES)
def test_embeddings_and_scores_equal_those_of_transformers(peer, tmp_path, name):
    theirs = peer.make("", CASES[name])
    theirs.logit_scale.data.fill_(4.6052)  # 100, as in CLIP's published models
    theirs.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(preprocessor(CASES[name])))
    ours = load_image_text(tmp_path, tokenizer=False)
    pixels, tokens = pixels_of(ours.config), tokens_of(ours.config)
    with peer.torch.no_grad():
        out = theirs(input_ids=peer.torch.tensor(tokens).long(), pixel_values=peer.torch.tensor(pixels))
    assert out.logits_per_image.numpy().std() > 0.3, "the scores are too flat to compare"
    actual = everything(ours.config)(ours.params, pixels, tokens)
    for part, key in zip(actual, ("image_embeds", "text_embeds", "logits_per_image"), strict=True):
        np.testing.assert_allclose(part, getattr(out, key).numpy(), rtol=0, atol=1e-4, err_msg=key)


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.parametrize("name", ["clip", "siglip"])
@pytest.mark.usefixtures("peer")
def test_pixels_equal_those_of_transformers_with_its_saved_settings(tmp_path, name):
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    kind = {"clip": CLIPImageProcessorPil, "siglip": SiglipImageProcessorPil}[name]
    theirs = kind(**preprocessor(CASES[name]))
    theirs.save_pretrained(tmp_path)
    settings = parse_preprocessing(*image_files._read_preprocessor_config(tmp_path), kind=name, side=28)
    for shape in [(40, 50), (50, 40), (31, 31), (28, 28), (9, 200), (200, 8), (1, 1)]:
        image = np.random.default_rng(0).integers(0, 256, (*shape, 3)).astype(np.uint8)
        expected = theirs(images=image, return_tensors="np", input_data_format="channels_last")["pixel_values"][0]
        np.testing.assert_allclose(preprocess(image, settings=settings), expected, atol=1e-6)
