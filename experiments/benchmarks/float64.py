"""A decoder's forward pass in NumPy and float64, written from its formulas alone: what log-probabilities are held to.

    x = embed[tokens];   per layer:  x += o(attention(norm(x)));  x += down(act(gate(norm(x))) * up(norm(x)))

It shares the parameters with the models of `flowgrpo.models`, the shape of a config, and the frequencies of the rotary
angles, which all implementations round to float32; nothing else.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from flowgrpo.models.config import DecoderConfig, rope_frequencies

ROWS = 256  # tokens whose logits are there at a time
ONCE = ("embed", "unembed", "norm")  # parameters that no layer has

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
    """Turn each pair (i, i + e/2) by its angle."""
    cosine, sine = (magnitude * f(angle_sf)[:, None, :] for f in (np.cos, np.sin))
    first, second = np.split(x_sne, 2, axis=-1)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def _attention(x: np.ndarray, layer: Matrices, index: int, config: DecoderConfig, before: KeysValues) -> tuple:
    """Causal attention within the layer's window, a head at a time -> (states, keys and values of all tokens)."""
    q, k, v = (_linear(x, layer, name) for name in ("q", "k", "v"))
    if config.qk_norm:
        q, k = rms_norm(q, layer["q_norm"], config), rms_norm(k, layer["k_norm"], config)
    rope, place_k = config.ropes[index], np.arange(len(before[0]) + len(x))
    place_s = place_k[len(before[0]) :]
    # Rounded to float32, as the product is in every implementation: what a model was trained with.
    angle_sf = (place_s[:, None].astype(np.float32) * rope_frequencies(rope, config.e)).astype(np.float64)
    q, k = (_rotate(y, angle_sf, rope.magnitude) for y in (q, k))
    k, v = (np.concatenate(pair) for pair in zip(before, (k, v), strict=True))
    distance_qk = place_s[:, None] - place_k[None, :]
    visible_qk = (distance_qk >= 0) & (distance_qk < (config.windows[index] or len(place_k)))
    scale = config.e**-0.5 if config.query_scale is None else config.query_scale
    mixed = np.empty_like(q)
    for head in range(config.h):
        shared = head // (config.h // config.k)
        score_qk = scale * q[:, head] @ k[:, shared].T
        if config.attention_softcap is not None:
            score_qk = config.attention_softcap * np.tanh(score_qk / config.attention_softcap)
        score_qk = np.where(visible_qk, score_qk, -np.inf)
        share_qk = np.exp(score_qk - score_qk.max(axis=-1, keepdims=True))
        mixed[:, head] = share_qk @ v[:, shared] / share_qk.sum(axis=-1, keepdims=True)
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
    params: Matrices, config: DecoderConfig, tokens: Sequence[int], before: Sequence[KeysValues] = ()
) -> tuple[np.ndarray, list[KeysValues]]:
    """Final hidden states [s d] of tokens after others, whose keys and values stand in `before`, a pair a layer.

    Parameters are float32 and stacked over the layers. Returns the keys and values of all tokens, too.
    """
    nothing = np.zeros((0, config.k, config.e))
    before, after = list(before) or [(nothing, nothing)] * config.num_layers, []
    x = params["embed"][np.asarray(tokens)].astype(np.float64) * config.embed_scale
    for index, pair in enumerate(before):
        layer = {name: value[index].astype(np.float64) for name, value in params.items() if name not in ONCE}
        out, pair_after = _attention(rms_norm(x, layer["attention_norm"], config), layer, index, config, pair)
        after.append(pair_after)
        x = x + (rms_norm(out, layer["attention_post_norm"], config) if config.sandwich_norms else out)
        out = _feed_forward(rms_norm(x, layer["ffn_norm"], config), layer, config)
        x = x + (rms_norm(out, layer["ffn_post_norm"], config) if config.sandwich_norms else out)
    return rms_norm(x, params["norm"].astype(np.float64), config), after


class Reference:
    """Scores of contexts in float64; what a context begins with like an earlier one is not computed again."""

    def __init__(self, params: Matrices, config: DecoderConfig, banned: Collection[int] = ()):
        self.params, self.config, self.banned = params, config, list(banned)
        self._embed = params.get("unembed", params["embed"].T).astype(np.float64)
        self._computed: list[tuple[tuple[int, ...], list[KeysValues], dict[str, np.ndarray]]] = []

    def score(self, tokens: Sequence[int]) -> dict[str, np.ndarray]:
        """Of each token of a context its log-probability given those before it, [s] each; the first has NaN.

        `logp` is that among the tokens that are not banned, `logp_all` among all. `margin` is how far its logit is
        above the largest of the other tokens that are not banned: at least 0 for a greedy choice.
        """
        tokens, scores = tuple(tokens), {name: np.full(len(tokens), np.nan) for name in ("logp", "logp_all", "margin")}
        start, pairs = 0, []
        for known, known_pairs, known_scores in self._computed:
            if (common := _common(known, tokens)) > start + 1:
                start = common - 1  # the last one's state is wanted, for the token after it
                pairs = [(k[:start], v[:start]) for k, v in known_pairs]
                for name, score in scores.items():
                    score[:common] = known_scores[name][:common]
        states, after = hidden_states(self.params, self.config, tokens[start:], pairs)
        for at in range(start, len(tokens) - 1, ROWS):
            next_c = np.asarray(tokens[at + 1 : at + 1 + ROWS])
            part = self._score_next(states[at - start : at - start + len(next_c)], next_c)
            for name, score in scores.items():
                score[at + 1 : at + 1 + len(next_c)] = part[name]
        self._computed.append((tokens, after, scores))
        return scores

    def _score_next(self, states_cd: np.ndarray, next_c: np.ndarray) -> dict[str, np.ndarray]:
        logits_cv, place = states_cd @ self._embed, (np.arange(len(next_c)), next_c)
        if self.config.logit_softcap is not None:
            logits_cv = self.config.logit_softcap * np.tanh(logits_cv / self.config.logit_softcap)
        chosen_c = logits_cv[place]
        logp_all = chosen_c - _log_sum_exp(logits_cv)
        logits_cv[:, self.banned] = -np.inf
        logp = logits_cv[place] - _log_sum_exp(logits_cv)
        logits_cv[place] = -np.inf
        return {"logp": logp, "logp_all": logp_all, "margin": chosen_c - logits_cv.max(axis=-1)}


def _common(known: Sequence[int], tokens: Sequence[int]) -> int:
    """Number of tokens with which both begin."""
    pairs = zip(known, tokens, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(known), len(tokens)))


def _log_sum_exp(logits_cv: np.ndarray) -> np.ndarray:
    most_c = logits_cv.max(axis=-1)
    return most_c + np.log(np.exp(logits_cv - most_c[:, None]).sum(axis=-1))
