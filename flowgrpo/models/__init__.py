"""Models: one Flax decoder for the open families, and readers and writers of their checkpoints.

Modules:

    attention          Attention over whole rows, or over blocks of a cache, in plain JAX
    attention_kernels  Attention by accelerator kernels, in place of the plain one, chosen by platform
    config             The shape of a decoder: sizes by axis letter, and what differs between the model families
    critic             A critic: a decoder under a scalar head, which predicts the value of each token's state
    decoder            One decoder for the open model families
    families           The model families: config.json -> `DecoderConfig`, and the names of tensors in checkpoints
    decode_attention   Attention of one token a row over a cache, a kernel for GPUs
    flash_attention    Flash attention over packed rows, a kernel for GPUs
    free_memory        Whether a model fits into free memory, and which smaller form would
    gguf               Conversion between GGUF and the contents of a Hugging Face folder
    gguf_export        Write a model as GGUF, which llama.cpp and Ollama open
    hf                 Read and write checkpoints in the Hugging Face format
    image_files        Read published image-text models, and score images and texts with them
    image_text         Image-text models, CLIP and SigLIP: shape, parameters and scores
    kv_cache           The KV cache of a decoder: which slots new tokens are written to, and how attention reads it
    lora               Low-rank adapters: several policies share one set of base weights (Hu et al., 2021)
    peft               Read and write adapters in PEFT's format
    products           Matrix products of a layer, with results independent of the batch in exact mode
    quantised          Frozen matrices in 8 or 4 bits an entry: the base of an adapter, or a sampler's weights
    reward_model       Read scalar-head reward models in the Hugging Face format, and score conversations with them
    splash_attention   Attention over packed rows by JAX's splash attention, a kernel for TPUs
    trainable          Which part of the parameters an update changes: all, an adapter, or the actor and its critic
"""

from flowgrpo.models.config import DecoderConfig, small_config
from flowgrpo.models.decoder import make_policy, matrices
from flowgrpo.models.gguf_export import save_gguf, save_gguf_folder
from flowgrpo.models.hf import Model, init_model, load_model, save_model
from flowgrpo.models.image_files import load_image_text
from flowgrpo.models.lora import LoraConfig, LoraParams, init_adapter, lora_policy, merge_adapter
from flowgrpo.models.peft import load_adapter, save_adapter
from flowgrpo.models.quantised import Quantised, dequantise_layers, quantise_layers
from flowgrpo.models.reward_model import load_scorer
from flowgrpo.models.trainable import ActorCritic
