"""A decoder's forward pass in NumPy and float64, written from its formulas: the reference for log-probabilities.

    x = embed[tokens];   per layer:  x += o(attention(norm(x)));  x += down(act(gate(norm(x))) * up(norm(x)))

It shares the parameters with the models of `flowgrpo.models`, the shape of a config, and the frequencies of the rotary
angles, which all implementations round to float32; nothing else.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from flowgrpo.models.config import DecoderConfig, rope_frequencies

ROWS = 256  # tokens whose logits are in memory at a time
UNSTACKED = ("embed", "unembed", "norm")  # parameters that no layer has

Matrices = Mapping[str, np.ndarray]
KeysValues = tuple[np.ndarray, np.ndarray]  # of a layer's tokens so far, [s k e] each


def rms_norm(x: np.ndarray, scale: np.ndarray, config: DecoderConfig) -> np.ndarray:
    """`x` over its root mean square, times the scale."""
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config.norm_eps) * (scale + config.norm_offset)


def _linear(x: np.ndarray, layer: Matrices, name: str, inputs: int = 1) -> np.ndarray:
    """`x W + b`, summed over the last `inputs` axes of x: [s inputs] -> [s outputs]."""
    w = layer[name]
    out = np.tensordot(x, w, axes=inputs)
    return out + layer[f"{name}_bias"] if f"{name}_bias" in layer else out


def _rotate(x_sne: np.ndarray, angle_sf: np.ndarray, magnitude: float) -> np.ndarray:
    """Rotate each pair (i, i + e/2) by its angle."""
    cosine, sine = (magnitude * f(angle_sf)[:, None, :] for f in (np.cos, np.sin))
    first, second = np.split(x_sne, 2, axis=-1)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def _attention(x: np.ndarray, layer: Matrices, index: int, config: DecoderConfig, cached: KeysValues) -> tuple:
    """Causal attention within the layer's window, a head at a time -> (states, keys and values of all tokens)."""
    q, k, v = (_linear(x, layer, name) for name in ("q", "k", "v"))
    if config.qk_norm:
        q, k = rms_norm(q, layer["q_norm"], config), rms_norm(k, layer["k_norm"], config)
    rope, position_k = config.ropes[index], np.arange(len(cached[0]) + len(x))
    position_s = position_k[len(cached[0]) :]
    # rounded to float32 like the product in every implementation, which a model was trained with
    angle_sf = (position_s[:, None].astype(np.float32) * rope_frequencies(rope, config.e)).astype(np.float64)
    q, k = (_rotate(y, angle_sf, rope.magnitude) for y in (q, k))
    k, v = (np.concatenate(pair) for pair in zip(cached, (k, v), strict=True))
    distance_qk = position_s[:, None] - position_k[None, :]
    visible_qk = (distance_qk >= 0) & (distance_qk < (config.windows[index] or len(position_k)))
    scale = config.e**-0.5 if config.query_scale is None else config.query_scale
    mixed = np.empty_like(q)
    for head in range(config.h):
        kv_head = head // (config.h // config.k)
        score_qk = scale * q[:, head] @ k[:, kv_head].T
        if config.attention_softcap is not None:
            score_qk = config.attention_softcap * np.tanh(score_qk / config.attention_softcap)
        score_qk = np.where(visible_qk, score_qk, -np.inf)
        weight_qk = np.exp(score_qk - score_qk.max(axis=-1, keepdims=True))
        mixed[:, head] = weight_qk @ v[:, kv_head] / weight_qk.sum(axis=-1, keepdims=True)
    return _linear(mixed, layer, "o", inputs=2), (k, v)


def _feed_forward(x: np.ndarray, layer: Matrices, config: DecoderConfig) -> np.ndarray:
    """`down(act(gate x) * up x)`."""
    gate = _linear(x, layer, "gate")
    if config.activation == "silu":
        gate = gate / (1 + np.exp(-gate))
    else:  # gelu in its approximation by tanh
        gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    return _linear(gate * _linear(x, layer, "up"), layer, "down")


def hidden_states(
    params: Matrices, config: DecoderConfig, tokens: Sequence[int], cached: Sequence[KeysValues] = ()
) -> tuple[np.ndarray, list[KeysValues]]:
    """Final hidden states [s d] of tokens after others, whose keys and values are `cached`, a pair per layer.

    Parameters are float32 and stacked over the layers. Also returns the keys and values of all tokens.
    """
    empty = np.zeros((0, config.k, config.e))
    cached, updated = list(cached) or [(empty, empty)] * config.num_layers, []
    x = params["embed"][np.asarray(tokens)].astype(np.float64) * config.embed_scale
    for index, pair in enumerate(cached):
        layer = {name: value[index].astype(np.float64) for name, value in params.items() if name not in UNSTACKED}
        out, new_pair = _attention(rms_norm(x, layer["attention_norm"], config), layer, index, config, pair)
        updated.append(new_pair)
        x = x + (rms_norm(out, layer["attention_post_norm"], config) if config.sandwich_norms else out)
        out = _feed_forward(rms_norm(x, layer["ffn_norm"], config), layer, config)
        x = x + (rms_norm(out, layer["ffn_post_norm"], config) if config.sandwich_norms else out)
    return rms_norm(x, params["norm"].astype(np.float64), config), updated


class Reference:
    """Scores of contexts in float64; a prefix shared with an earlier context is not computed again."""

    def __init__(self, params: Matrices, config: DecoderConfig, banned: Collection[int] = ()):
        self.params, self.config, self.banned = params, config, list(banned)
        self._embed = params.get("unembed", params["embed"].T).astype(np.float64)
        self._computed: list[tuple[tuple[int, ...], list[KeysValues], dict[str, np.ndarray]]] = []

    def score(self, tokens: Sequence[int]) -> dict[str, np.ndarray]:
        """Log-probability of each token of a context given those before it, [s] each; NaN for the first.

        `logp` is among the tokens that are not banned, `logp_all` among all. `margin` is the distance of its logit
        from the largest of the other tokens that are not banned: at least 0 for a greedy choice.
        """
        tokens, scores = tuple(tokens), {name: np.full(len(tokens), np.nan) for name in ("logp", "logp_all", "margin")}
        start, pairs = 0, []
        for earlier, earlier_pairs, earlier_scores in self._computed:
            if (common := _common_prefix(earlier, tokens)) > start + 1:
                start = common - 1  # the last token's state is needed for the token after it
                pairs = [(k[:start], v[:start]) for k, v in earlier_pairs]
                for name, score in scores.items():
                    score[:common] = earlier_scores[name][:common]
        states, updated = hidden_states(self.params, self.config, tokens[start:], pairs)
        for index in range(start, len(tokens) - 1, ROWS):
            next_c = np.asarray(tokens[index + 1 : index + 1 + ROWS])
            part = self._score_next(states[index - start : index - start + len(next_c)], next_c)
            for name, score in scores.items():
                score[index + 1 : index + 1 + len(next_c)] = part[name]
        self._computed.append((tokens, updated, scores))
        return scores

    def _score_next(self, states_cd: np.ndarray, next_c: np.ndarray) -> dict[str, np.ndarray]:
        logits_cv, entry = states_cd @ self._embed, (np.arange(len(next_c)), next_c)
        if self.config.logit_softcap is not None:
            logits_cv = self.config.logit_softcap * np.tanh(logits_cv / self.config.logit_softcap)
        chosen_c = logits_cv[entry]
        logp_all = chosen_c - _log_sum_exp(logits_cv)
        logits_cv[:, self.banned] = -np.inf
        logp = logits_cv[entry] - _log_sum_exp(logits_cv)
        logits_cv[entry] = -np.inf
        return {"logp": logp, "logp_all": logp_all, "margin": chosen_c - logits_cv.max(axis=-1)}


def _common_prefix(earlier: Sequence[int], tokens: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = zip(earlier, tokens, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(earlier), len(tokens)))


def _log_sum_exp(logits_cv: np.ndarray) -> np.ndarray:
    max_c = logits_cv.max(axis=-1)
    return max_c + np.log(np.exp(logits_cv - max_c[:, None]).sum(axis=-1))
