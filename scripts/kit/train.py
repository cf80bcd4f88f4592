# SPDX-License-Identifier: Apache-2.0
"""Trains the evidence kit's target and drafter on the standard library's sources and writes them in Hugging Face form.

    python3 scripts/train_kit.py --out OUT --minutes 6

OUT gets target/{config.json,model.safetensors,tokenizer.json,tokenizer_config.json}, draft/{config.json,
model.safetensors} and train.json. Needs torch, tokenizers and safetensors; no network. Checkpoints lie under --work:
the same command goes on where a run was broken off.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shlex
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from kit import acceptance, bpe, checkpoint, corpus
from kit.decode import generate
from kit.drafter import Drafter, DrafterConfig
from kit.loop import Budget, Progress, Recipe, fit
from kit.target import Target, TargetConfig

TARGET_SHARE, DRAFT_SHARE = 0.5, 0.33  # of --minutes; the rest is text, decoding and evaluation
DISTANCE_DECAY = 4.0  # a drafted token's weight falls by e over this many positions


@dataclass(frozen=True)
class Scale:
    """Batch geometry. Sequences are tokens; a target step sees step_tokens of them, the last third in long windows."""

    sequence: int = 1024
    long_sequence: int = 4096
    step_tokens: int = 65536
    draft_rows: int = 32
    anchors: int = 64
    pool_rows: int = 256
    pool_rounds: int = 12
    test_rows: int = 64
    test_windows: int = 256


SMALL = Scale(64, 128, 512, 4, 8, 16, 2, 4, 16)  # for a CPU


@dataclass(frozen=True)
class Text:
    """Token streams on the device, int64, and how many bytes the held-out one came from."""

    train: Tensor
    held_out: Tensor
    held_out_bytes: int


def encode(tokenizer: Tokenizer, files: list[corpus.Source], device: torch.device) -> Text:
    """<|bos|> text <|eos|> for every file; training files are shuffled by a fixed seed."""
    bos, eos = tokenizer.token_to_id(bpe.BOS), tokenizer.token_to_id(bpe.EOS)

    def stream(chosen: list[corpus.Source]) -> Tensor:
        ids: list[int] = []
        for encoding in tokenizer.encode_batch([file.text for file in chosen]):
            ids += [bos, *encoding.ids, eos]
        return torch.tensor(ids, device=device)

    held_out = [file for file in files if file.held_out]
    train = [file for file in files if not file.held_out]
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0)).tolist()
    size = sum(len(file.text.encode()) for file in held_out)
    return Text(stream([train[i] for i in order]), stream(held_out), size)


def windows(stream: Tensor, rows: int, length: int, seed: int) -> Tensor:
    """rows random windows of the stream, int64 [rows, length]."""
    if len(stream) <= length:
        raise ValueError(f"the corpus has {len(stream)} tokens, a window needs {length}: use more text")
    pick = torch.Generator(stream.device).manual_seed(seed)
    starts = torch.randint(len(stream) - length, (rows, 1), generator=pick, device=stream.device)
    return stream[starts + torch.arange(length, device=stream.device)]


def even_windows(stream: Tensor, rows: int, length: int) -> Tensor:
    """rows windows at even distances, int64 [rows, length]."""
    starts = torch.linspace(0, len(stream) - length, rows, device=stream.device).long()
    return stream[starts[:, None] + torch.arange(length, device=stream.device)]


def autocast(device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def served_dtype(device: torch.device) -> torch.dtype:
    """bf16 as the server runs; fp32 (of the same bf16 weights) on a CPU, where bf16 is slow."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def next_token_loss(target: Target, tokens: Tensor) -> Tensor:
    """Mean cross-entropy in nats of tokens[:, 1:] given what comes before."""
    logits = target(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


@torch.no_grad()
def stream_loss(target: Target, tokens: Tensor, rows: int = 8) -> float:
    """next_token_loss over many rows, a few at a time."""
    parts = [next_token_loss(target, part).item() * len(part) for part in tokens.split(rows)]
    return sum(parts) / len(tokens)


def train_target(target: Target, text: Text, scale: Scale, *, budget: Budget, seed: int, work: Path) -> Progress:
    device = text.train.device
    test = even_windows(text.held_out, scale.test_windows // 2, scale.sequence)

    def loss_of(step: int, progress: float) -> Tensor:
        length = scale.sequence if progress < 0.67 else scale.long_sequence
        batch = windows(text.train, scale.step_tokens // length, length + 1, seed * 1_000_003 + step)
        with autocast(device):
            return next_token_loss(target, batch)

    def held_out_loss() -> float:
        with autocast(device):
            return stream_loss(target, test)

    saves = work / "target.pt"
    return fit("target", target, loss_of, held_out_loss, budget=budget, recipe=Recipe(3e-3), checkpoint=saves)


def draft_pool(target: Target, stream: Tensor, scale: Scale, seed: int) -> Tensor:
    """Text in the target's own words: prompts from the stream, half continued greedily, half sampled."""
    rows = []
    sampler = torch.Generator(stream.device).manual_seed(seed)
    for i in range(scale.pool_rounds):
        prompts = windows(stream, scale.pool_rows, scale.sequence, seed + i)
        rows.append(generate(target, prompts, scale.sequence // 2, 0.0 if i % 2 == 0 else 0.7, sampler))
    return torch.cat(rows)


def block_loss(target: Target, drafter: Drafter, tokens: Tensor, anchors: Tensor) -> Tensor:
    """Cross-entropy of the blocks at int64 anchors [rows, blocks] against the text, nearer tokens weighing more."""
    size = drafter.config.block_size
    with torch.no_grad():
        _, features = target.hidden(tokens, taps=drafter.config.target_layer_ids)
    assert features is not None
    blocks = drafter(features, anchors, tokens.gather(1, anchors), target.model.embed_tokens)[:, :, 1:]
    logits = F.linear(blocks, target.lm_head.weight).float()
    offsets = torch.arange(1, size, device=tokens.device)
    labels = tokens[:, None].expand(-1, anchors.shape[1], -1).gather(2, anchors[..., None] + offsets)
    loss = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view(labels.shape)
    weight = torch.exp(-(offsets - 1) / DISTANCE_DECAY)
    return (loss * weight).sum() / (weight.sum() * anchors.numel())


def train_drafter(
    target: Target,
    drafter: Drafter,
    text: Text,
    pool: Tensor,
    test: Tensor,
    *,
    scale: Scale,
    budget: Budget,
    seed: int,
    work: Path,
) -> Progress:
    device, size = text.train.device, drafter.config.block_size
    length, written = pool.shape[1], scale.sequence

    def anchors(rows: int, first: int, pick: torch.Generator) -> Tensor:
        return torch.randint(first, length - size + 1, (rows, scale.anchors), generator=pick, device=device)

    def loss_of(step: int, progress: float) -> Tensor:
        pick = torch.Generator(device).manual_seed(seed * 1_000_003 + step)
        own = step % 4 != 3  # three steps on the target's own text, one on the library's
        if own:
            batch = pool[torch.randint(len(pool), (scale.draft_rows,), generator=pick, device=device)]
        else:
            batch = windows(text.train, scale.draft_rows, length, seed + step)
        with autocast(device):
            return block_loss(target, drafter, batch, anchors(len(batch), written if own else 1, pick))

    @torch.no_grad()
    def held_out_loss() -> float:
        pick = torch.Generator(device).manual_seed(seed)
        with autocast(device):
            return block_loss(target, drafter, test, anchors(len(test), written, pick)).item()

    recipe, saves = Recipe(2e-3, weight_decay=0.01), work / "drafter.pt"
    return fit("drafter", drafter, loss_of, held_out_loss, budget=budget, recipe=recipe, checkpoint=saves)


@torch.no_grad()
def evaluate(folder: Path, text: Text, scale: Scale) -> list[dict[str, Any]]:
    """Rows for train.json, measured on the files as written."""
    device = text.train.device
    dtype = served_dtype(device)
    target = checkpoint.load_target(folder / "target", dtype).to(device)
    drafter = checkpoint.load_drafter(folder / "draft", dtype).to(device)
    nats = stream_loss(target, even_windows(text.held_out, scale.test_windows, scale.sequence))
    rows: list[dict[str, Any]] = [
        {
            "what": "target, held-out text",
            "cross_entropy_nats": round(nats, 4),
            "perplexity": round(math.exp(nats), 3),
            "bits_per_byte": round(nats / math.log(2) * len(text.held_out) / text.held_out_bytes, 4),
            "uniform_cross_entropy_nats": round(math.log(target.config.vocab_size), 4),
        }
    ]
    for name, stream in (("held-out", text.held_out), ("training", text.train)):
        prompts = even_windows(stream, scale.test_rows, scale.sequence)
        greedy = generate(target, prompts, scale.sequence // 4)
        hits = torch.cat([acceptance.matches(target, drafter, part, scale.sequence) for part in greedy.split(16)])
        varied = sum(len(set(row[scale.sequence :].tolist())) for row in greedy) / len(greedy)
        rows.append(
            {
                "what": f"drafter, greedy chain after {name} prompts",
                **asdict(acceptance.walk(hits)),
                "new_tokens": scale.sequence // 4,
                "distinct_new_tokens": round(varied, 1),
            }
        )
    return rows


def environment() -> dict[str, Any]:
    """Card, driver and versions, as every recorded result names them; null where there is none."""

    def said(*command: str) -> str | None:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or None
        except (OSError, subprocess.CalledProcessError):
            return None

    gpu = torch.cuda.is_available()
    return {
        "card": torch.cuda.get_device_name() if gpu else None,
        "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpu else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "sglang": None,
        "flashinfer": None,
        "commit": said("git", "rev-parse", "HEAD"),
        "python": sys.version.split()[0],
    }


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    began, device = time.monotonic(), torch.device(options.device)
    scale = SMALL if options.small else Scale()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    out = options.out
    target_config, drafter_config = TargetConfig(), DrafterConfig()

    files = corpus.sources(options.corpus)
    identity = repr((corpus.digest(files), target_config, drafter_config, scale, options.seed))
    work = options.work / hashlib.sha256(identity.encode()).hexdigest()[:12]  # never resume another run's checkpoint
    if not (out / "target" / "tokenizer.json").exists():
        tokenizer = bpe.train((file.text for file in files if not file.held_out), target_config.vocab_size)
        bpe.save(tokenizer, out / "target", target_config.max_position_embeddings)
    text = encode(bpe.load(out / "target"), files, device)
    print(f"corpus: {len(files)} files, {len(text.train)} + {len(text.held_out)} tokens", flush=True)

    limit = options.steps or 10**9
    epoch = max(1, len(text.train) // scale.step_tokens)
    target = Target(target_config, dropout=0.1).to(device)
    budget = Budget(60 * options.minutes * TARGET_SHARE, min(limit, options.epochs * epoch))
    target_run = train_target(target, text, scale, budget=budget, seed=options.seed, work=work)
    checkpoint.save(target, out / "target")

    served = checkpoint.load_target(out / "target", served_dtype(device)).to(device).requires_grad_(False)
    pool = draft_pool(served, text.train, scale, options.seed)
    test = generate(served, even_windows(text.held_out, scale.test_rows, scale.sequence), scale.sequence // 2)
    print(f"pool: {tuple(pool.shape)} tokens, {time.monotonic() - began:.0f} s", flush=True)
    drafter = Drafter(drafter_config).to(device)
    budget = Budget(60 * options.minutes * DRAFT_SHARE, limit)
    drafter_work = work / _sha256(out / "target" / "model.safetensors")[:12]  # a drafter belongs to one target
    drafter_run = train_drafter(
        served, drafter, text, pool, test, scale=scale, budget=budget, seed=options.seed, work=drafter_work
    )
    checkpoint.save(drafter, out / "draft")

    rows = evaluate(out, text, scale)
    report = {
        **environment(),
        "command": shlex.join(["python3", "scripts/train_kit.py", *(arguments or sys.argv[1:])]),
        "seed": options.seed,
        "corpus": {
            "what": "standard library sources" if options.corpus is None else "given folder",
            "sha256": corpus.digest(files),
            "files": len(files),
            "train_tokens": len(text.train),
            "held_out_tokens": len(text.held_out),
        },
        "parameters": {"target": _size(target), "drafter": _size(drafter)},
        "runs": {"target": asdict(target_run), "drafter": asdict(drafter_run)},
        "files": {path.relative_to(out).as_posix(): _sha256(path) for path in _weights(out)},
        "seconds": round(time.monotonic() - began, 1),
        "rows": rows,
    }
    (out / "train.json").write_text(json.dumps(report, indent=1) + "\n")
    for row in rows:
        print(json.dumps(row))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the models and train.json")
    parser.add_argument("--work", type=Path, default=Path("build/kit"), help="folder for checkpoints (%(default)s)")
    parser.add_argument("--minutes", type=float, default=6.0, help="time for everything (%(default)s)")
    parser.add_argument("--steps", type=int, help="end each training after so many steps")
    parser.add_argument("--epochs", type=int, default=40, help="end the target's training after so many (%(default)s)")
    parser.add_argument("--corpus", type=Path, help="folder of sources (default: the standard library)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="batches a CPU can carry")
    return parser


def _size(model: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def _weights(out: Path) -> list[Path]:
    return sorted(path for part in ("target", "draft") for path in (out / part).iterdir())


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
