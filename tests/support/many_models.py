"""Models of many kinds, each as small as its kind allows, with batches: what the engine must train bit for bit as PyTorch does.

A model's forward takes the tensors of a batch by position and returns the loss, or something with `.loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations

Batch = tuple[torch.Tensor, ...]
VOCAB, SEQ, DIM, BATCH = 32, 12, 16, 2


class Case:
    """How a model is made, and batches for it. `needs` is a package it comes from; with `narrow` the user casts its buffers to
    16 bits along with the weights."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        batch: Callable[[torch.Generator], Batch],
        needs: str = "torch",
        *,
        narrow: bool = False,
    ) -> None:
        self.build, self.batch, self.needs, self.narrow = build, batch, needs, narrow

    def model(self, precision: str) -> nn.Module:
        torch.manual_seed(0)
        model = self.build().train()
        if self.narrow and precision == "bf16":
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    module._buffers[name] = buffer if buffer is None else buffer.bfloat16()
        return model

    def batches(self, count: int) -> list[Batch]:
        draw = torch.Generator().manual_seed(1)
        return [self.batch(draw) for _ in range(count)]


def vectors(draw: torch.Generator) -> Batch:
    return torch.randn(BATCH, SEQ, DIM, generator=draw), torch.randn(BATCH, SEQ, DIM, generator=draw)


def images(draw: torch.Generator) -> Batch:
    return torch.randn(BATCH, 3, 8, 8, generator=draw), torch.randint(0, 4, (BATCH,), generator=draw)


def tokens(draw: torch.Generator) -> Batch:
    rows = torch.randint(2, VOCAB, (BATCH, SEQ), generator=draw)
    return rows, rows


class Regression(nn.Module):
    """Blocks over vectors, one after the other."""

    def __init__(self, block: Callable[[], nn.Module], count: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(count))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(x.float(), y.float())


class Classifier(nn.Module):
    def __init__(self, body: nn.Module, features: int) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(features, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.body(x)).float(), y)


# Buffers that forward writes.


class Average(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(DIM, DIM), how
        self.register_buffer("scale", torch.ones(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            new = x.float().abs().mean((0, 1))
            if self.how == "replaced":
                self.scale = 0.9 * self.scale + 0.1 * new
            else:
                self.scale.mul_(0.9).add_(new, alpha=0.1)
        return torch.tanh(self.linear(x) * self.scale.to(x.dtype))


class Quantized(nn.Module):
    """A codebook that moves to the means of what it is nearest to, as in VQ-VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("codes", torch.linspace(-1, 1, 8 * DIM).view(8, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.linear(x)
        nearest = torch.cdist(flat.detach().float().flatten(0, 1), self.codes).argmin(-1)
        with torch.no_grad():
            ones = F.one_hot(nearest, 8).float()
            means = ones.T @ flat.detach().float().flatten(0, 1) / ones.sum(0).clamp(min=1).unsqueeze(1)
            self.codes.data.lerp_(means, 0.1)
        chosen = self.codes[nearest].view_as(flat).to(flat.dtype)
        return flat + (chosen - flat).detach()


class Wrapped(nn.Module):
    """Parametrised. spectral_norm multiplies weights with its buffers, which must have the weights' dtype."""

    def __init__(self, wrap: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        self.linear = wrap(nn.Linear(DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv1d(SEQ, SEQ, 3, padding=1)
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(self.conv(x)))


# Attention, recurrence, convolution.


class Attention(nn.Module):
    """`nn.MultiheadAttention` called directly, with one tensor as query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attend = nn.MultiheadAttention(DIM, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.attend(x, x, x, need_weights=False)[0]


class Bare(nn.Module):
    """Multi-head attention modules that are layers themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.ModuleList(nn.MultiheadAttention(DIM, 2, batch_first=True) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for attend in self.attend:
            x = x + attend(x, x, x)[0]
        return F.mse_loss(x.float(), y.float())


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.rnn = kind(DIM, DIM, batch_first=True, **settings)
        self.out = nn.Linear(DIM * (2 if settings.get("bidirectional") else 1), DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(x)[0])


class Cell(nn.Module):
    """A cell that is called once for each place of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, states = torch.zeros_like(x[:, 0]), []
        for k in range(x.shape[1]):
            state = self.cell(x[:, k], state)
            states.append(state)
        return torch.stack(states, 1)


class UNet(nn.Module):
    """Down and up again, with what was on the way down joined in on the way up."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [3, 8, 16]
        self.down = nn.ModuleList(self.double(a, b) for a, b in pairwise(sizes))
        self.middle = self.double(16, 32)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * a, a, 2, stride=2) for a in (16, 8))
        self.join = nn.ModuleList(self.double(2 * a, a) for a in (16, 8))
        self.head = nn.Conv2d(8, 4, 1)

    @staticmethod
    def double(a: int, b: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(a, b, 3, padding=1),
            nn.GroupNorm(2, b),
            nn.SiLU(),
            nn.Conv2d(b, b, 3, padding=1),
            nn.BatchNorm2d(b),
            nn.ReLU(),
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kept = []
        for down in self.down:
            x = down(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([kept.pop(), up(x)], 1))
        return F.cross_entropy(self.head(x).mean((2, 3)).float(), y)


class Bottle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


class Autoencoder(nn.Module):
    """Draws random numbers in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Dropout(0.1), nn.Linear(DIM, 2 * DIM))
        self.decoder = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Dropout(0.1), nn.Linear(DIM, DIM))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mean, spread = self.encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * spread)
        return F.mse_loss(self.decoder(z).float(), y.float())


class Graph(nn.Module):
    """Messages along edges, by index_add."""

    def __init__(self) -> None:
        super().__init__()
        self.send, self.keep = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        draw = torch.Generator().manual_seed(2)
        self.register_buffer("edges", torch.randint(0, SEQ, (2, 24), generator=draw))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        source, target = self.edges
        heard = torch.zeros_like(x).index_add(1, target, self.send(x)[:, source])
        return torch.relu(self.keep(x) + heard)


class Table(nn.Module):
    """An embedding, whose output layer is tied to it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM, **settings)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.GELU()) for _ in range(2))
        self.out = nn.Linear(DIM, VOCAB, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return F.cross_entropy(self.out(h).flatten(0, 1).float(), y.flatten())


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCAB, DIM, mode="mean")
        self.layers = nn.Sequential(nn.Linear(DIM, DIM), nn.PReLU(), nn.Linear(DIM, VOCAB))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layers(self.bag(x)).float(), y[:, 0])


def hooked() -> nn.Module:
    model = Regression(lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.GELU()))
    for block in model.blocks:
        block[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
    return model


def shared() -> nn.Module:
    """One block, used three times."""
    block = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.GELU())
    return Regression(lambda: block)


def frozen() -> nn.Module:
    model = Regression(lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM)))
    model.blocks[0].requires_grad_(False)
    model.blocks[1][2].requires_grad_(False)
    return model


# Hugging Face.


class ByPosition(nn.Module):
    def __init__(self, model: nn.Module, names: tuple[str, ...], loss: Callable[[Any], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.model, self.names, self.loss = model, names, loss

    def forward(self, *tensors: torch.Tensor) -> Any:
        out = self.model(**dict(zip(self.names, tensors, strict=True)))
        return out if self.loss is None else self.loss(out)


SIZES = {"vocab_size": VOCAB, "hidden_size": DIM, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
CAUSAL = ("input_ids", "labels")
PLAIN = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}


def hugging(
    model: str, config: str, names: tuple[str, ...] = CAUSAL, loss: Any = None, **settings: Any
) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        # A cache lays keys out differently, and so rounds differently; training does not fill one.
        made = getattr(transformers, model)(getattr(transformers, config)(**settings, use_cache=False))
        return ByPosition(made, names, loss)

    return build


def lora() -> nn.Module:
    import peft
    import transformers

    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=1, max_position_embeddings=SEQ, **PLAIN)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return ByPosition(peft.get_peft_model(transformers.LlamaForCausalLM(config), settings), CAUSAL)


def clip() -> nn.Module:
    import transformers

    text = {**SIZES, "max_position_embeddings": SEQ, **PLAIN}
    vision = {k: v for k, v in SIZES.items() if k != "vocab_size"} | {"image_size": 8, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    names = ("input_ids", "pixel_values")
    return ByPosition(_Lossy(transformers.CLIPModel(config)), names)


class _Lossy(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> Any:
        return self.model(**inputs, return_loss=True)


def words_and_images(draw: torch.Generator) -> Batch:
    return torch.randint(2, VOCAB, (BATCH, SEQ), generator=draw), torch.randn(BATCH, 3, 8, 8, generator=draw)


def speech(draw: torch.Generator) -> Batch:
    return torch.randn(BATCH, 8, 2 * SEQ, generator=draw), torch.randint(2, VOCAB, (BATCH, SEQ), generator=draw)


def labelled(draw: torch.Generator) -> Batch:
    return torch.randn(BATCH, 3, 8, 8, generator=draw), torch.randint(0, 2, (BATCH,), generator=draw)


VISION = {
    "image_size": 8,
    "patch_size": 4,
    "hidden_size": DIM,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
T5 = {
    "vocab_size": VOCAB,
    "d_model": DIM,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    **PLAIN,
    "decoder_start_token_id": 0,
}
SEQ2SEQ = {
    "vocab_size": VOCAB, "d_model": DIM, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, **PLAIN, "decoder_start_token_id": 0,
}  # fmt: skip
WHISPER = {
    **SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": SEQ, "max_target_positions": SEQ, "begin_suppress_tokens": None,
    "suppress_tokens": None,
}  # fmt: skip
MAMBA = {"vocab_size": VOCAB, "hidden_size": DIM, "state_size": 4, "num_hidden_layers": 2, "intermediate_size": 32, **PLAIN}
KV = {"num_key_value_heads": 1, "max_position_embeddings": SEQ, **PLAIN}

GPT2 = {"vocab_size": VOCAB, "n_positions": SEQ, "n_embd": DIM, "n_layer": 2, "n_head": 2, **PLAIN}
MIXTRAL = {**SIZES, **KV, "num_local_experts": 4, "num_experts_per_tok": 2}
OPT = {
    "vocab_size": VOCAB, "hidden_size": DIM, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": SEQ, "word_embed_proj_dim": DIM, **PLAIN,
}  # fmt: skip
MAMBA2 = {
    "vocab_size": VOCAB, "hidden_size": DIM, "state_size": 4, "num_hidden_layers": 2, "head_dim": 8, "num_heads": 4,
    "n_groups": 1, "expand": 2, "chunk_size": 4, **PLAIN,
}  # fmt: skip


def convnet() -> nn.Module:
    body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *(Bottle() for _ in range(3)), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Classifier(body, 8)


def blocks(make: Callable[..., nn.Module], *args: Any, count: int = 3, **settings: Any) -> Case:
    """A model of such blocks, over vectors."""
    return Case(lambda: Regression(lambda: make(*args, **settings), count), vectors)


def sequential(*makes: Callable[[], nn.Module]) -> Case:
    return blocks(lambda: nn.Sequential(*(make() for make in makes)))


def text(model: str, config: str, settings: dict[str, Any]) -> Case:
    return Case(hugging(model, config, **settings), tokens, "transformers")


def linear() -> nn.Module:
    return nn.Linear(DIM, DIM)


SPEECH = hugging("WhisperForConditionalGeneration", "WhisperConfig", ("input_features", "labels"), **WHISPER)
VIT = hugging("ViTForImageClassification", "ViTConfig", ("pixel_values", "labels"), **VISION)

CASES: dict[str, Case] = {
    "mlp": sequential(linear, nn.GELU, linear),
    "shared block": Case(shared, vectors),
    "frozen parts": Case(frozen, vectors),
    "tensor hooks": Case(hooked, vectors),
    "dropout": sequential(linear, lambda: nn.Dropout(0.3)),
    "ema in place": blocks(Average, "in place"),
    "ema replaced": blocks(Average, "replaced"),
    "vq codebook": blocks(Quantized),
    "spectral norm": Case(lambda: Regression(lambda: Wrapped(parametrizations.spectral_norm)), vectors, narrow=True),
    "weight norm": blocks(Wrapped, parametrizations.weight_norm),
    "batch norm": blocks(lambda: Normed(nn.BatchNorm1d(SEQ))),
    "instance norm": blocks(lambda: Normed(nn.InstanceNorm1d(SEQ, track_running_stats=True))),
    "rms norm": sequential(lambda: nn.RMSNorm(DIM), linear, nn.SiLU),
    "multihead attention": blocks(Attention),
    "bare attention": Case(Bare, vectors),
    "transformer encoder": blocks(nn.TransformerEncoderLayer, DIM, 2, 32, dropout=0.1, batch_first=True, count=2),
    "gru": blocks(Recurrent, nn.GRU),
    "lstm": blocks(Recurrent, nn.LSTM, num_layers=2, bidirectional=True),
    "gru cell": blocks(Cell, count=2),
    "unet": Case(UNet, images),
    "residual convnet": Case(convnet, images),
    "autoencoder": Case(Autoencoder, vectors),
    "graph network": blocks(Graph),
    "tied table": Case(Table, tokens),
    "padded table": Case(lambda: Table(padding_idx=3), tokens),
    "embedding bag": Case(Bag, tokens),
    "gpt2": text("GPT2LMHeadModel", "GPT2Config", GPT2),
    "llama": text("LlamaForCausalLM", "LlamaConfig", {**SIZES, **KV}),
    "qwen2": text("Qwen2ForCausalLM", "Qwen2Config", {**SIZES, **KV}),
    "mixtral": text("MixtralForCausalLM", "MixtralConfig", MIXTRAL),
    "opt": text("OPTForCausalLM", "OPTConfig", OPT),
    "bert": text("BertForMaskedLM", "BertConfig", {**SIZES, "max_position_embeddings": SEQ}),
    "t5": text("T5ForConditionalGeneration", "T5Config", T5),
    "bart": text("BartForConditionalGeneration", "BartConfig", {**SEQ2SEQ, "max_position_embeddings": SEQ}),
    "whisper": Case(SPEECH, speech, "transformers"),
    "clip": Case(clip, words_and_images, "transformers"),
    "vit": Case(VIT, labelled, "transformers"),
    "mamba": text("MambaForCausalLM", "MambaConfig", MAMBA),
    "mamba2": text("Mamba2ForCausalLM", "Mamba2Config", MAMBA2),
    "peft lora": Case(lora, tokens, "peft"),
}
