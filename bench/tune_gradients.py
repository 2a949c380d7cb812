"""What each layer's K or V costs at each type, by the gradients of the model's own predictions: for all layers and types at once.

A small change e of what is stored moves the predictions by a KLD of e' F e / 2, where F is the mean of g g' and g the gradient of
log p(y) for a token y drawn from the model's own predictions (the Fisher information; drawn, and not the text's next token: Kunstner,
Balles and Hennig 2019). One pass back through the model gives g for every key and value, and e is what a type does to them. Errors of
different heads and tokens are taken to be independent. So no layer has to be quantized alone, and no noise floor hides the fine types:
the arithmetic is float32. transformers does it, from the same GGUF file.
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, Sequence

import numpy as np

from bench.caches import F16
from bench.divergence import Scores, compare
from bench.engine import Engine, free_memory
from bench.tune_costs import Place, type_of
from kvfmt.errors import KvfmtError, MissingTool
from kvfmt.head_store import HeadStore
from kvfmt.policy import cache_type
from kvfmt.side_maps import SideMaps

if TYPE_CHECKING:
    import torch

    from bench.tune import Profiles

#: Tokens drawn at each scored position.
DRAWS = 2
#: KLD in nats between the predictions of transformers and llama.cpp beyond which they are not of one model. SmolLM2: 0.003.
APART = 0.1
#: What attention is registered as in transformers.
NAME = "kvfmt_perturbed"
#: Bytes for each parameter: the model in float32, and as much again for what a pass back keeps.
BYTES_EACH = 8


class Unsuitable(KvfmtError):
    """Gradients of this model cannot be had here; quantizing one layer at a time can."""


class Perturbed:
    """A model of transformers whose attention adds a zero to the keys and values of every layer, to take gradients by.

    Raises Unsuitable if the extra "torch" is missing, or transformers cannot open the file.
    """

    def __init__(self, path: Path, threads: int) -> None:
        try:
            import torch
            from transformers import AttentionInterface, AttentionMaskInterface
            from transformers.integrations.sdpa_attention import sdpa_attention_forward
            from transformers.masking_utils import sdpa_mask

            from kvfmt.torch import INTERLEAVED, open_gguf
        except (ImportError, MissingTool) as error:
            raise Unsuitable(f"gradients need transformers: {error}", "Install the extra: pip install 'kvfmt[torch]', or use --costs alone.") from None
        torch.set_num_threads(threads)
        try:
            self.model, _ = open_gguf(path)
        except KvfmtError as error:
            raise Unsuitable(f"gradients need transformers: {error}", "Use --costs alone.") from None
        self.model.requires_grad_(False)
        config = self.model.config.get_text_config(decoder=True)
        #: Whether keys are in another order than llama.cpp's.
        self.interleaved = config.model_type in INTERLEAVED
        #: Layer -> keys and values, and what was added to them, [1, heads, tokens, size] each.
        self.seen: dict[int, tuple[torch.Tensor, ...]] = {}
        # transformers keeps what is registered for good: that must not keep the model.
        seen = self.seen

        def attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **others: Any) -> Any:
            added = [torch.zeros_like(side, requires_grad=True) for side in (key, value)]
            seen[module.layer_idx] = (key.detach(), value.detach(), *added)
            return sdpa_attention_forward(module, query, key + added[0], value + added[1], mask, **others)

        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        self.model.set_attn_implementation(NAME)

    def logits(self, tokens: np.ndarray) -> torch.Tensor:
        """Of all positions of one chunk, int32 [n] -> float32 [n, vocabulary], with a way back to what was added."""
        import torch

        self.seen.clear()
        return self.model(input_ids=torch.as_tensor(tokens.astype(np.int64))[None], use_cache=False).logits[0]

    def gradients(self, logits: torch.Tensor, draws: int, seed: int) -> list[dict[int, tuple[np.ndarray, np.ndarray]]]:
        """For each draw of a token at every row of ``logits``: layer -> gradients of the sum of log p by keys and values,
        float32 [heads, tokens, size]. The graph of ``logits`` is used up."""
        import torch

        rng = torch.Generator().manual_seed(seed)
        log_p = torch.log_softmax(logits, -1)
        drawn = torch.multinomial(log_p.detach().exp(), draws, replacement=True, generator=rng)
        order = sorted(self.seen)
        out = []
        for i in range(draws):
            found = torch.autograd.grad(
                log_p.gather(1, drawn[:, i : i + 1]).sum(), [added for layer in order for added in self.seen[layer][2:]], retain_graph=i + 1 < draws
            )
            sides = [side[0].numpy() for side in found]
            out.append({layer: (sides[2 * j], sides[2 * j + 1]) for j, layer in enumerate(order)})
        return out


def check_size(engine: Engine) -> None:
    """Raises Unsuitable if the model in float32, with a pass back, does not fit the free memory."""
    needed, free = BYTES_EACH * engine.lib.llama_model_n_params(engine.model), free_memory()
    if free is not None and needed > free:
        raise Unsuitable(f"gradients take {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB of memory are free", "Use --costs alone.")


def check_same(engine: Engine, tokens: np.ndarray, first: int, logits: np.ndarray) -> None:
    """Raises Unsuitable if llama.cpp does not predict after one chunk, int32 [n], what ``logits`` say, float32 [n - 1 - first, vocabulary]."""
    rows = engine.logit_rows()
    found = Scores.empty(len(logits))
    with engine.open(F16, len(tokens), rows) as session, ThreadPoolExecutor(engine.threads) as pool:
        session.prefill(tokens[:first])
        for start in range(first, len(tokens) - 1, rows):
            piece = tokens[start : min(start + rows, len(tokens) - 1)]
            at = slice(start - first, start - first + len(piece))
            compare(session.decode(piece, 0), np.ascontiguousarray(logits[at]), tokens[start + 1 : start + 1 + len(piece)], found.part(at), pool, engine.threads)
    apart = float(found.kld.mean())
    if not apart <= APART:
        raise Unsuitable(f"transformers' predictions are {apart:.3f} nats from llama.cpp's: it does not open this model right", "Use --costs alone.")


def gradient_costs(
    engine: Engine,
    path: Path,
    profiles: Profiles,
    pieces: np.ndarray,
    first: int,
    candidates: Mapping[str, Sequence[str]],
    update: Callable[[int, int], None] = lambda done, total: None,
) -> dict[Place, float]:
    """Cost of every candidate but f16 in nats, a mean over the positions from ``first`` on of ``pieces``, int32 [chunks, n].

    ``update(done, total)`` counts chunks. Raises Unsuitable for a model whose gradients cannot be had, KvfmtError for a candidate
    that only llama.cpp writes.
    """
    layers = engine.lib.llama_model_n_layer(engine.model)
    if profiles.owners != tuple(range(layers)):
        raise Unsuitable(f"{len(profiles.owners)} of {layers} layers own KV; gradients are taken where all do", "Use --costs alone.")
    check_size(engine)
    model = Perturbed(path, engine.threads)
    stores = dict(_stores(profiles, candidates, model.interleaved))
    sums: dict[Place, float] = defaultdict(float)
    for chunk, tokens in enumerate(pieces):
        logits = model.logits(tokens)[first:-1]
        if chunk == 0:
            check_same(engine, tokens, first, logits.detach().numpy())
        found = model.gradients(logits, DRAWS, seed=chunk)
        for (layer, side, kind), store in stores.items():
            at = "kv".index(side)
            states = model.seen[layer][at].numpy()
            error = (store.decode(store.encode(states)) - states)[0]
            for gradients in found:
                # By head and token: a block's errors go together, those of others do not.
                moved = np.einsum("htd,htd->ht", gradients[layer][at], error, dtype=np.float64)
                sums[layer, side, kind] += float(np.sum(moved**2)) / (2 * DRAWS * len(logits) * len(pieces))
        update(chunk + 1, len(pieces))
    model.seen.clear()
    return dict(sums)


def _stores(profiles: Profiles, candidates: Mapping[str, Sequence[str]], interleaved: bool) -> Iterator[tuple[Place, HeadStore]]:
    """How every candidate but f16 stores its side of its layer."""
    for layer in profiles.owners:
        statistics = profiles.base.statistics[layer]
        for side, size in (("k", statistics.k_size), ("v", statistics.v_size)):
            for kind in candidates[side]:
                if kind != "f16":
                    maps = SideMaps.of(profiles.maps(layer, side, kind), side == "k")
                    yield (layer, side, kind), HeadStore(cache_type(type_of(kind)), size, side == "k", maps, interleaved and side == "k")
