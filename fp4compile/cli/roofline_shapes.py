"""The shapes of `roofline --shapes`: powers of two, layers of published models, or one shape.

A model's layers come from its published configuration and transformers' code for it: experts have the gate and up
projections in one weight. All layers are on one GPU, without the embedding, the router and the head.
"""

from dataclasses import dataclass

POW2 = tuple(2**power for power in range(9, 15))
TOKENS = (1, 64, 8192)  # a decode step of one and of many sequences, a prompt; training uses only the last


@dataclass(frozen=True)
class LayerShape:
    """A layer that multiplies m rows with a weight [n, k], or with weights [experts, n, k].

    m: for experts, the rows of all experts: each token is a row of each expert to which the router sends it.
    """

    layer: str
    m: int
    n: int
    k: int
    experts: int | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.m, self.n, self.k

    @property
    def rows_each(self) -> float | None:
        """Rows of an expert on average; None without experts."""
        return None if self.experts is None else self.m / self.experts


@dataclass(frozen=True)
class Layers:
    """Layers and experts of a model, as (name, out features, in features). top_k: experts of each token."""

    layers: tuple[tuple[str, int, int], ...]
    count: int | None = None
    top_k: int = 1
    experts: tuple[tuple[str, int, int], ...] = ()

    def shapes(self, tokens: int) -> list[LayerShape]:
        """The shapes of a step of `tokens` tokens."""
        routed = [LayerShape(f"experts {name}", tokens * self.top_k, n, k, self.count) for name, n, k in self.experts]
        return [*(LayerShape(name, tokens, n, k) for name, n, k in self.layers), *routed]


def _gpt_oss(count: int) -> Layers:
    return Layers((("q", 4096, 2880), ("k, v", 512, 2880), ("o", 2880, 4096)), count, 4,
                 (("gate_up", 5760, 2880), ("down", 2880, 2880)))  # fmt: skip


MODELS = {
    "llama3-8b": Layers((("q, o", 4096, 4096), ("k, v", 1024, 4096), ("gate, up", 14336, 4096), ("down", 4096, 14336))),
    "llama3-70b": Layers(
        (("q, o", 8192, 8192), ("k, v", 1024, 8192), ("gate, up", 28672, 8192), ("down", 8192, 28672))
    ),
    "dsv3": Layers(
        (("q_a", 1536, 7168), ("q_b", 24576, 1536), ("kv_a", 576, 7168), ("kv_b", 32768, 512), ("o", 7168, 16384),
         ("dense gate, up", 18432, 7168), ("dense down", 7168, 18432), ("shared gate, up", 2048, 7168),
         ("shared down", 7168, 2048)),
        256, 8, (("gate_up", 4096, 7168), ("down", 7168, 2048)),
    ),
    "qwen3-30b-a3b": Layers(
        (("q", 4096, 2048), ("k, v", 512, 2048), ("o", 2048, 4096)),
        128, 8, (("gate_up", 1536, 2048), ("down", 2048, 768)),
    ),
    "llama4-scout": Layers(
        (("q, o", 5120, 5120), ("k, v", 1024, 5120), ("shared gate, up", 8192, 5120), ("shared down", 5120, 8192)),
        16, 1, (("gate_up", 16384, 5120), ("down", 5120, 8192)),
    ),
    "mixtral-8x7b": Layers(
        (("q, o", 4096, 4096), ("k, v", 1024, 4096)), 8, 2, (("gate_up", 28672, 4096), ("down", 4096, 14336)),
    ),
    "gpt-oss-20b": _gpt_oss(32),
    "gpt-oss-120b": _gpt_oss(128),
}  # fmt: skip


def shapes(text: str, train: bool) -> list[LayerShape]:
    """The shapes that --shapes names. Raises ValueError for any other text."""
    if text == "pow2":
        return [LayerShape("", size, size, size) for size in POW2]
    if text in MODELS:
        return [shape for tokens in (TOKENS[-1:] if train else TOKENS) for shape in MODELS[text].shapes(tokens)]
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"--shapes {text!r}: allowed are pow2, {', '.join(MODELS)}, or M,N,K, three positive whole "
                         "numbers")  # fmt: skip
    m, n, k = map(int, parts)
    return [LayerShape("", m, n, k)]
