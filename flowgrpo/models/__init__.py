"""Models: one Flax decoder for the open families, and what reads and writes their checkpoints.

Modules:

    attention          Attention over whole rows, or over blocks of a cache
    attention_kernels  The same over whole rows by the kernel of an accelerator, chosen by platform
    config             The shape of a decoder: numbers by axis letter, and what differs between the model families
    critic             A critic: a decoder under a scalar head, which gives a value for each token's state
    decoder            One decoder for the open model families
    families           The model families: config.json -> `DecoderConfig`, and the names that published tensors go by
    decode_attention   Attention of one token a row over a cache, a kernel for GPUs
    flash_attention    Flash attention over packed rows, a kernel for GPUs
    free_memory        Whether a model fits into the memory that is free, and what would
    gguf               How GGUF calls what a Hugging Face folder holds, in both directions
    gguf_export        Write a model as GGUF, which llama.cpp and Ollama open
    hf                 Read and write checkpoints in the Hugging Face format
    image_files        Read published image-text models, and score images and texts with them
    image_text         Image-text models, CLIP and SigLIP: their shape, their parameters and their scores
    kv_cache           The cache of a decoder: where new tokens go, and what they see
    lora               Low-rank adapters: several policies share one set of base weights (Hu et al., 2021)
    peft               Adapters in PEFT's format, in and out: adapter_config.json and adapter_model.safetensors
    products           Products of a layer: `x W + b`, with an adapter's, and exact rounding where that is asked for
    quantised          Matrices of frozen layers in 8 or 4 bits an entry: the base under an adapter, or a sampler's
    reward_model       Read scalar-head reward models in the Hugging Face format, and score conversations with them
    splash_attention   Attention over packed rows by JAX's splash attention, a kernel for TPUs
    trainable          Which part of the parameters an update changes: all of them, an adapter, the actor and its critic
"""

from flowgrpo.models.config import DecoderConfig, small_config
from flowgrpo.models.decoder import make_policy, matrices
from flowgrpo.models.gguf_export import save_gguf, save_gguf_folder
from flowgrpo.models.hf import Model, init_model, load_model, save_model
from flowgrpo.models.image_files import load_image_text
from flowgrpo.models.lora import Adapted, LoraConfig, init_adapter, lora_policy, merge
from flowgrpo.models.peft import load_adapter, save_adapter
from flowgrpo.models.quantised import Quantised, dequantise_layers, quantise_layers
from flowgrpo.models.reward_model import load_scorer
from flowgrpo.models.trainable import ActorCritic
