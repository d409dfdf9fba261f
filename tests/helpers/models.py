"""A zoo of small deterministic models with batches, for every test that runs a whole model.

All are float32, two layers deep, seeded, without downloads; batch 8, sequence 16, hidden 32, 8 heads, so that every dim
that a plan may shard divides by 8 (``odd`` is the exception on purpose). Calling ``case.model()(**case.batch())`` gives
an output that holds a loss unless ``case.has_loss`` is False.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

BATCH, SEQ, HIDDEN, HEADS, VOCAB, LAYERS = 8, 16, 32, 8, 96, 2


@dataclass(frozen=True)
class Case:
    """A model and a batch for it.

    Attributes:
        name: its key in :data:`ZOO` or :data:`EXTRA`.
        build: makes the model; call through :meth:`model`, which seeds.
        make_batch: makes keyword arguments of ``forward`` from a generator.
        has_loss: whether the output holds a 0-dim loss.
        random: whether its forward draws random numbers (dropout), so that eager and captured numbers differ.
    """

    name: str
    build: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator], dict[str, Any]]
    has_loss: bool = True
    random: bool = False

    def model(self, seed: int = 0, device: str = "cpu") -> nn.Module:
        """The model in training mode; equal seeds give equal weights."""
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(seed)
            return self.build().train()

    def batch(self, seed: int = 0) -> dict[str, Any]:
        """Keyword arguments for one call; equal seeds give equal batches."""
        return self.make_batch(torch.Generator().manual_seed(seed))


def loss_of(output: Any) -> torch.Tensor:
    """The 0-dim loss in a model's output: itself, the entry or field ``loss``, or the first element of a tuple."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        return output["loss"]
    return output.loss if hasattr(output, "loss") else output[0]


# --- batches ------------------------------------------------------------------------------------------------------


def _ids(g: torch.Generator, vocab: int, seq: int = SEQ, batch: int = BATCH) -> torch.Tensor:
    return torch.randint(0, vocab, (batch, seq), generator=g)


def _labels(g: torch.Generator, vocab: int, seq: int = SEQ, batch: int = BATCH) -> torch.Tensor:
    """Labels of which each row ignores another number of positions (-100)."""
    labels = _ids(g, vocab, seq, batch)
    for row in range(batch):
        labels[row, seq - row % 4 :] = -100
    return labels


def _tokens(vocab: int = VOCAB, batch: int = BATCH, seq: int = SEQ) -> Callable[[torch.Generator], dict[str, Any]]:
    def make(g: torch.Generator) -> dict[str, Any]:
        return {"input_ids": _ids(g, vocab, seq, batch), "labels": _labels(g, vocab, seq, batch)}

    return make


def _masked_tokens(g: torch.Generator) -> dict[str, Any]:
    mask = torch.ones(BATCH, SEQ, dtype=torch.long)
    mask[1::2, SEQ - 3 :] = 0
    return {"input_ids": _ids(g, VOCAB), "attention_mask": mask, "labels": _labels(g, VOCAB)}


def _padded_tokens(g: torch.Generator) -> dict[str, Any]:
    """Ten rows: of other lengths, padded at the right, and two that count for nothing."""
    mask, labels = torch.ones(10, SEQ, dtype=torch.long), _labels(g, VOCAB, batch=10)
    for row in range(10):
        mask[row, SEQ - row % 5 :] = 0
    labels[8:] = -100
    return {"input_ids": _ids(g, VOCAB, batch=10), "attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}


def _ten(make: Callable[[torch.Generator], dict[str, Any]]) -> Callable[[torch.Generator], dict[str, Any]]:
    """Ten samples of a batch of eight: the first two once more."""
    return lambda g: {name: torch.cat([t, t[:2]]) for name, t in make(g).items()}


def _vectors(g: torch.Generator) -> dict[str, Any]:
    return {"x": torch.randn(BATCH, HIDDEN, generator=g), "target": torch.randn(BATCH, 8, generator=g)}


def _images(size: int, name: str = "pixel_values") -> Callable[[torch.Generator], dict[str, Any]]:
    def make(g: torch.Generator) -> dict[str, Any]:
        return {name: torch.randn(BATCH, 3, size, size, generator=g), "labels": torch.randint(0, 8, (BATCH,), generator=g)}

    return make


def _image_pair(g: torch.Generator) -> dict[str, Any]:
    return {"x": torch.randn(BATCH, 4, 16, 16, generator=g), "target": torch.randn(BATCH, 4, 16, 16, generator=g)}


# --- plain PyTorch ------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """Three linear layers and a mean squared error."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.up = nn.Linear(HIDDEN, 64)
        self.mid = nn.Linear(64, 64)
        self.down = nn.Linear(64, 8)
        self.dropout = nn.Dropout(dropout)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(F.gelu(self.up(x)))
        return self.dropout(F.relu(self.mid(hidden)))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.down(self.features(x)), target)


class _Residual(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.skip = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(hidden)) + self.skip(x))


class Cnn(nn.Module):
    """A small residual network with batch normalisation, max pooling and average pooling."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.Sequential(_Residual(16, 16, 1), _Residual(16, 32, 2))
        self.head = nn.Linear(32, 8)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = F.adaptive_avg_pool2d(self.blocks(self.stem(pixel_values)), 1).flatten(1)
        logits = self.head(hidden)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Transformer(nn.Module):
    """Token and position embeddings, ``nn.TransformerEncoderLayer`` with a causal mask, a head."""

    def __init__(self, vocab: int = VOCAB, hidden: int = HIDDEN, heads: int = HEADS, seq: int = SEQ):
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        self.positions = nn.Parameter(torch.randn(seq, hidden) * 0.02)
        layer = nn.TransformerEncoderLayer(hidden, heads, 2 * hidden, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(input_ids) + self.positions
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1], device=input_ids.device)
        logits = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class UNet(nn.Module):
    """One level down and up with GroupNorm, SiLU, nearest interpolation and a skip joined by ``cat``."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Conv2d(4, 16, 3, padding=1)
        self.norm1 = nn.GroupNorm(8, 16)
        self.down = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.norm2 = nn.GroupNorm(8, 32)
        self.mid = nn.Conv2d(32, 16, 3, padding=1)
        self.out = nn.Conv2d(32, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        skip = F.silu(self.norm1(self.inp(x)))
        low = F.silu(self.norm2(self.down(skip)))
        high = F.interpolate(self.mid(low), scale_factor=2, mode="nearest")
        return F.mse_loss(self.out(torch.cat([high, skip], 1)), target)


class DeepUNet(nn.Module):
    """Three levels down and up: every level's result skips to the other side, where it is joined by ``cat`` or added."""

    def __init__(self, width: int = 8):
        super().__init__()
        sizes = [width, 2 * width, 4 * width]
        self.stem = nn.Conv2d(4, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in itertools.pairwise(sizes))
        self.mid = nn.Sequential(nn.GroupNorm(4, 4 * width), nn.SiLU(), nn.Conv2d(4 * width, 4 * width, 3, padding=1))
        self.up = nn.ModuleList(nn.Conv2d(b, a, 3, padding=1) for a, b in itertools.pairwise(sizes))
        self.join = nn.ModuleList(nn.Conv2d(2 * a, a, 1) for a in sizes[:-1])
        self.out = nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(self.stem(x))
        skips = []
        for down in self.down:
            skips.append(hidden)
            hidden = F.silu(down(hidden))
        hidden = hidden + self.mid(hidden)
        for up, join, skip in zip(reversed(self.up), reversed(self.join), reversed(skips), strict=True):
            hidden = F.interpolate(up(hidden), scale_factor=2, mode="nearest")
            hidden = F.silu(join(torch.cat([hidden, skip], 1))) + skip
        return F.mse_loss(self.out(hidden), target)


class Contrastive(nn.Module):
    """A loss that compares every sample with every other of the batch."""

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(HIDDEN, 16)
        self.right = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        scores = self.left(x) @ self.right(target).t()
        return F.cross_entropy(scores, torch.arange(x.shape[0], device=x.device))


class InputStatistics(nn.Module):
    """Inputs standardised over the batch: a statistic, but one of inputs alone."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(HIDDEN, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = (x - x.mean(0)) / (x.std(0) + 1e-3)
        return F.mse_loss(self.down(F.gelu(self.up(x))), target)


class Regularised(nn.Module):
    """Its loss has terms that read parameters alone, of every layer at once, one of which nothing else reads; and shared gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.shift, self.alone = nn.Parameter(torch.randn(HIDDEN)), nn.Parameter(torch.randn(HIDDEN, 8))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x) + self.shift)
        squares = torch.stack([layer.weight.square().sum() for layer in self.layers]).sum()
        return (
            F.mse_loss(x[:, :8], target) + 0.01 * squares + squares.sqrt() + self.alone.sum() + 0.1 * self.alone.square().mean()
        )


class UnusedParameter(Mlp):
    """A parameter, a whole layer and a buffer that forward never reads."""

    def __init__(self):
        super().__init__()
        self.never = nn.Parameter(torch.ones(8))
        self.never_layer = nn.Linear(8, 8)
        self.register_buffer("never_buffer", torch.ones(4))


class TiedWeights(nn.Module):
    """An embedding whose weight is the head's too."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, HIDDEN)
        self.mix = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.tanh(self.mix(self.tokens(input_ids))))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class LogitsOnly(Mlp):
    """No loss in the output: the caller makes one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.down(self.features(x))


@dataclass
class NestedOutput:
    """An output structure with everything in it."""

    loss: torch.Tensor
    parts: dict[str, Any]
    nothing: None = None


torch.utils._pytree.register_dataclass(NestedOutput)


class Nested(Mlp):
    """A dataclass holding a dict, a tuple, an int and ``None``; a nested keyword input with a plain flag in it."""

    def forward(self, batch: dict[str, Any], scale: float = 1.0) -> NestedOutput:  # type: ignore[override]
        hidden = self.features(batch["x"])
        out = self.down(hidden) * scale
        loss = F.mse_loss(out, batch["more"][0])
        count = batch["x"].shape[0]
        return NestedOutput(loss, {"hidden": hidden, "pair": (out.detach(), out.argmax(-1)), "count": count})


class FrozenBase(nn.Module):
    """Frozen linear layers with trainable low-rank additions, as LoRA makes them."""

    def __init__(self, rank: int = 8):
        super().__init__()
        self.base1 = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.base2 = nn.Linear(HIDDEN, 8).requires_grad_(False)
        self.down1 = nn.Linear(HIDDEN, rank, bias=False)
        self.up1 = nn.Linear(rank, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.base1(x) + self.up1(self.down1(x)))
        return F.mse_loss(self.base2(hidden), target)


# --- Hugging Face -------------------------------------------------------------------------------------------------


def gpt2(dropout: float = 0.0, vocab: int = VOCAB, hidden: int = HIDDEN, heads: int = HEADS, layers: int = LAYERS) -> nn.Module:
    """A GPT-2 language model with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocab,
        n_positions=SEQ,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def llama(
    layers: int = LAYERS,
    hidden: int = HIDDEN,
    intermediate: int = 64,
    heads: int = HEADS,
    kv_heads: int = 4,
    vocab: int = VOCAB,
    max_seq: int = 64,
    tied: bool = False,
) -> nn.Module:
    """A Llama language model with random weights; the defaults are tiny. Under ``torch.device("meta")`` it is free."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_seq,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def llama_3_8b(layers: int = 32) -> nn.Module:
    """Llama-3-8B with ``layers`` layers; build it under ``torch.device("meta")``."""
    return llama(layers, 4096, 14336, 32, 8, 128256, 8192)


def _qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=4,
        head_dim=8,
        max_position_embeddings=64,
        use_cache=False,
    )
    return Qwen3ForCausalLM(config)


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=64,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=8,
    )
    return ViTForImageClassification(config)


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB,
        d_model=HIDDEN,
        d_kv=4,
        d_ff=64,
        num_layers=LAYERS,
        num_heads=HEADS,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config)


# --- the zoo ------------------------------------------------------------------------------------------------------


def _table(*cases: Case) -> dict[str, Case]:
    return {case.name: case for case in cases}


ZOO: dict[str, Case] = _table(
    Case("mlp", Mlp, _vectors),
    Case("cnn", Cnn, _images(16)),
    Case("transformer", Transformer, _tokens()),
    Case("gpt2", gpt2, _tokens()),
    Case("llama", llama, _tokens()),
    Case("qwen3", _qwen3, _tokens()),
    Case("bert", _bert, _masked_tokens),
    Case("vit", _vit, _images(16)),
    Case("t5", _t5, _tokens()),
)
"""The models of the main job."""

EXTRA: dict[str, Case] = _table(
    Case("gpt2_padded", gpt2, _padded_tokens),
    Case("llama_padded", llama, _padded_tokens),
    Case("t5_padded", _t5, _padded_tokens),
    Case("llama_tied_padded", lambda: llama(tied=True), _padded_tokens),
    Case("unet_ten", DeepUNet, _ten(_image_pair)),
    Case("mlp_dropout", lambda: Mlp(0.1), _vectors, random=True),
    Case("gpt2_dropout", lambda: gpt2(0.1), _tokens(), random=True),
    Case("unet", UNet, _image_pair),
    Case("unet_deep", DeepUNet, _image_pair),
    Case("contrastive", Contrastive, _vectors),
    Case("input_statistics", InputStatistics, _vectors),
    Case("unused", UnusedParameter, _vectors),
    Case("regularised", Regularised, _vectors),
    Case("odd", lambda: Transformer(vocab=53, hidden=30, heads=5, seq=7), _tokens(53, 6, 7)),
    Case("gpt2_odd", lambda: gpt2(vocab=53, hidden=36, heads=6), _tokens(53)),
    Case("tied", TiedWeights, _tokens()),
    Case("llama_tied", lambda: llama(tied=True), _tokens()),
    Case("logits", LogitsOnly, lambda g: {"x": torch.randn(BATCH, HIDDEN, generator=g)}, has_loss=False),
    Case(
        "nested",
        Nested,
        lambda g: {
            "batch": {
                "x": torch.randn(BATCH, HIDDEN, generator=g),
                "more": [torch.randn(BATCH, 8, generator=g), None, "a flag"],
            },
            "scale": 0.5,
        },
    ),
    Case("frozen", FrozenBase, _vectors),
)
"""Everyday awkwardness."""

ALL: dict[str, Case] = {**ZOO, **EXTRA}


class Stack(nn.Module):
    """Square layers that are all alike, and a loss."""

    def __init__(self, layers: int, width: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()
